"""The vision transformer: an image as a sequence of patches, and a class token in front of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jdist.errors import BatchError

_EPSILON = 1e-12


class Layer(nn.Module):
    """One layer: attention, then a feed-forward network, each on what is normalised and added to its input."""

    heads: int
    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(_EPSILON, dtype=self.dtype, use_fast_variance=False, name="norm_1")(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, name="attention")(h)
        h = nn.LayerNorm(_EPSILON, dtype=self.dtype, use_fast_variance=False, name="norm_2")(x)
        h = nn.gelu(nn.Dense(self.hidden, dtype=self.dtype, name="up")(h), approximate=False)
        return x + nn.Dense(x.shape[-1], dtype=self.dtype, name="down")(h)


class ViT(nn.Module):
    """Logits of classes of images [rows, height, width, channels]; the defaults are those of ViT-B/16.

    `jdist.weights.vit()` are the rules for its weights on Hugging Face.

    Attributes:
        num_classes: number of classes.
        patch: side of a patch, in pixels; it divides the image's.
        layers: number of layers.
        width: features of a patch.
        heads: attention heads.
        hidden: features within the feed-forward networks.
        dtype: dtype of the activations; parameters and logits are float32.

    Example:
        >>> model = ViT(num_classes=3, patch=4, layers=1, width=16, heads=2, hidden=32)
        >>> images = jnp.zeros((2, 8, 8, 3))
        >>> model.apply(model.init(jax.random.key(0), images), images).shape
        (2, 3)

    Source: Dosovitskiy et al. 2021, arXiv:2010.11929
    """

    num_classes: int = 1000
    patch: int = 16
    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        height, width = images.shape[1:3]
        if height % self.patch or width % self.patch:  # `Conv` would leave the rest of the pixels out
            raise BatchError(f"images are {height} x {width}, which `patch`, {self.patch}, does not divide")
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, strides=size, padding="VALID", dtype=self.dtype, name="patches")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        cls = self.param("cls", nn.initializers.normal(0.02), (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(cls, (x.shape[0], 1, self.width)).astype(x.dtype), x], axis=1)
        x += self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], self.width)).astype(x.dtype)
        for i in range(self.layers):
            x = Layer(self.heads, self.hidden, self.dtype, name=f"layer_{i}")(x)
        x = nn.LayerNorm(_EPSILON, dtype=self.dtype, use_fast_variance=False, name="norm")(x)
        return nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x[:, 0]).astype(jnp.float32)
