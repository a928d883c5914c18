"""ResNet in its version 1.5: a bottleneck halves the resolution in its 3 x 3 convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

_EPSILON = 1e-5


class ConvNorm(nn.Module):
    """A convolution that keeps the resolution or halves it, batch normalisation, and a ReLU unless it is left out."""

    features: int
    size: int
    stride: int
    dtype: Any
    relu: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        # As many pixels on each side, also with a stride of 2, where "SAME" would put them on one.
        x = nn.Conv(
            self.features,
            (self.size, self.size),
            strides=self.stride,
            padding=self.size // 2,
            use_bias=False,
            dtype=self.dtype,
            name="convolution",
        )(x)
        x = nn.BatchNorm(not train, momentum=0.9, epsilon=_EPSILON, dtype=self.dtype, name="normalization")(x)
        return nn.relu(x) if self.relu else x


class Layer(nn.Module):
    """A residual block: two 3 x 3 convolutions, or a bottleneck of three."""

    features: int
    stride: int
    bottleneck: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        inner = self.features // 4
        parts = [(inner, 1, 1), (inner, 3, self.stride), (self.features, 1, 1)]
        if not self.bottleneck:
            parts = [(self.features, 3, self.stride), (self.features, 3, 1)]
        h = x
        for i, part in enumerate(parts):
            h = ConvNorm(*part, self.dtype, relu=i + 1 < len(parts), name=f"layer_{i}")(h, train=train)
        if x.shape[-1] != self.features or self.stride != 1:
            x = ConvNorm(self.features, 1, self.stride, self.dtype, relu=False, name="shortcut")(x, train=train)
        return nn.relu(h + x)


class ResNet(nn.Module):
    """Logits of classes of images [rows, height, width, channels]; the defaults are those of ResNet-50.

    `jdist.weights.resnet()` are the rules for its weights on Hugging Face. In training, `mutable=["batch_stats"]` gives the
    averages of the batch normalisation.

    Attributes:
        num_classes: number of classes.
        depths: blocks of each stage.
        features: channels of each stage's output.
        stem: channels of the first convolution.
        bottleneck: whether blocks are bottlenecks.
        dtype: dtype of the activations; parameters and logits are float32.

    Example:
        >>> model = ResNet(num_classes=3, depths=(1,), features=(8,), stem=4)
        >>> images = jnp.zeros((2, 32, 32, 3))
        >>> model.apply(model.init(jax.random.key(0), images), images).shape
        (2, 3)

    Source: He et al. 2016, arXiv:1512.03385
    """

    num_classes: int = 1000
    depths: Sequence[int] = (3, 4, 6, 3)
    features: Sequence[int] = (256, 512, 1024, 2048)
    stem: int = 64
    bottleneck: bool = True
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        x = ConvNorm(self.stem, 7, 2, self.dtype, name="embedder")(images, train=train)
        edges: Any = ((1, 1), (1, 1))  # Any: annotated as text alone
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=edges)
        for stage, (depth, features) in enumerate(zip(self.depths, self.features, strict=True)):
            for i in range(depth):
                layer = Layer(
                    features,
                    2 if stage and i == 0 else 1,
                    self.bottleneck,
                    self.dtype,
                    name=f"stage_{stage}_layer_{i}",
                )
                x = layer(x, train=train)
        return nn.Dense(self.num_classes, dtype=self.dtype, name="classifier")(x.mean((1, 2))).astype(jnp.float32)
