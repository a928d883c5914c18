"""A small decoder-only transformer: pre-norm, rotary positions, one fused projection for q, k and v."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


def rotary(x: jax.Array, *, base: float = 10_000.0) -> jax.Array:
    """Turns each pair of features by an angle that grows with the position (RoPE, arXiv:2104.09864).

    Example:
        >>> rotary(jnp.ones((1, 4, 2, 8))).shape
        (1, 4, 2, 8)
    """
    # `x`: [rows, length, heads, even head_width]; `base`: the longest wavelength, in positions over
    # 2 pi. The angles are computed in float32.
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Block(nn.Module):
    """One layer: causal attention, then a feed-forward network, each added to its input."""

    heads: int  # divide the width
    layers: int  # of the full model; scales the initial additions to the residual stream
    dropout: float  # share of each half's addition that is dropped; 0 outside training
    dtype: Any  # of the activations; the parameters stay float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        rows, length, width = x.shape
        inner = nn.initializers.normal(width**-0.5)
        # The sum of 2 * layers branches should start with a variance that does not grow with depth.
        outward = nn.initializers.normal(width**-0.5 / (2 * self.layers) ** 0.5)

        h = nn.RMSNorm(dtype=self.dtype)(x)
        qkv = nn.Dense(3 * width, use_bias=False, kernel_init=inner, dtype=self.dtype, name="qkv")(h)
        q, k, v = jnp.split(qkv.reshape(rows, length, 3 * self.heads, width // self.heads), 3, axis=2)
        h = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        h = h.reshape(rows, length, width)
        h = nn.Dense(width, use_bias=False, kernel_init=outward, dtype=self.dtype, name="attention_out")(h)
        x = x + nn.Dropout(self.dropout, deterministic=False)(h)

        h = nn.RMSNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * width, use_bias=False, kernel_init=inner, dtype=self.dtype, name="up")(h))
        h = nn.Dense(width, use_bias=False, kernel_init=outward, dtype=self.dtype, name="down")(h)
        return x + nn.Dropout(self.dropout, deterministic=False)(h)


class Transformer(nn.Module):
    """Logits of the next token at every position of a sequence.

    Attributes:
        vocabulary: number of different tokens.
        layers: number of blocks.
        width: features of the residual stream.
        heads: attention heads; `width // heads` is even.
        dropout: share of each branch dropped in training; it needs the rng "dropout".
        dtype: dtype of the activations; parameters, normalisation and logits are float32.
        stacked: whether the parameters of all blocks are in arrays [layers, ...], over which a scan goes; each block
            is then computed again in the backward pass.

    Example:
        >>> model = Transformer(vocabulary=257, layers=2, width=32, heads=2)
        >>> tokens = jnp.zeros((1, 8), jnp.int32)
        >>> variables = model.init(jax.random.key(0), tokens)
        >>> model.apply(variables, tokens).shape
        (1, 8, 257)
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    dropout: float = 0.0
    dtype: Any = jnp.float32
    stacked: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(1.0))
        x = embed(tokens).astype(self.dtype)
        dropout = self.dropout if train else 0.0
        if self.stacked:
            of_layers = nn.scan(
                nn.remat(lambda block, x: (block(x), None), prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.layers,
            )
            x, _ = of_layers(Block(self.heads, self.layers, dropout, self.dtype, name="blocks"), x)
        else:
            for i in range(self.layers):
                x = Block(self.heads, self.layers, dropout, self.dtype, name=f"block_{i}")(x)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        # Small at the start, so that the first loss is that of the uniform distribution.
        head = nn.Dense(self.vocabulary, kernel_init=nn.initializers.normal(0.02), dtype=self.dtype, name="logits")
        return head(x).astype(jnp.float32)
