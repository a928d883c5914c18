"""GPT-2 as it was published: pre-norm, learned positions, the output layer tied to the embedding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jdist.errors import BatchError

_EPSILON = 1e-5


class Attention(nn.Module):
    """Causal attention with one projection for queries, keys and values."""

    heads: int  # divide the width
    dtype: Any  # of the activations

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        rows, length, width = x.shape
        qkv = nn.Dense(3 * width, dtype=self.dtype, name="c_attn")(x)
        q, k, v = jnp.split(qkv.reshape(rows, length, 3 * self.heads, width // self.heads), 3, axis=2)
        h = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True).reshape(rows, length, width)
        return nn.Dense(width, dtype=self.dtype, name="c_proj")(h)


class Mlp(nn.Module):
    """The feed-forward network, four times as wide."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype, name="c_fc")(x), approximate=True)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="c_proj")(h)


class Block(nn.Module):
    """One layer; attributes as of `GPT2`."""

    heads: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        drop = nn.Dropout(self.dropout, deterministic=False)
        h = nn.LayerNorm(_EPSILON, dtype=self.dtype, use_fast_variance=False, name="ln_1")(x)
        x = x + drop(Attention(self.heads, self.dtype, name="attn")(h, mask))
        h = nn.LayerNorm(_EPSILON, dtype=self.dtype, use_fast_variance=False, name="ln_2")(x)
        return x + drop(Mlp(self.dtype, name="mlp")(h))


class GPT2(nn.Module):
    """Logits of the next token at every position; the defaults are those of the smallest, of 124 million parameters.

    `jdist.weights.gpt2()` are the rules for its weights on Hugging Face. For rows that texts were packed into, `segment_ids`
    [rows, length] are each token's text, beyond which it does not attend, and `position_ids` its place there.

    Attributes:
        vocabulary: number of different tokens.
        positions: the longest sequence.
        layers: number of blocks.
        width: features of the residual stream.
        heads: attention heads.
        dropout: share dropped in training of the embeddings and of what each branch adds; it needs the rng "dropout".
        dtype: dtype of the activations; the parameters are float32.
        stacked: whether the parameters of all blocks are in arrays [layers, ...], over which a scan goes; each block
            is then computed again in the backward pass.

    Example:
        >>> model = GPT2(vocabulary=50, positions=16, layers=2, width=32, heads=2)
        >>> tokens = jnp.zeros((1, 8), jnp.int32)
        >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
        (1, 8, 50)

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners"
    """

    vocabulary: int = 50_257
    positions: int = 1024
    layers: int = 12
    width: int = 768
    heads: int = 12
    dropout: float = 0.1
    dtype: Any = jnp.float32
    stacked: bool = False

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        if tokens.shape[1] > self.positions:  # `Embed` would give NaN
            raise BatchError(f"a sequence has {tokens.shape[1]} tokens, and the model `positions` for {self.positions}")
        dropout = self.dropout if train else 0.0
        normal = nn.initializers.normal
        wte = nn.Embed(self.vocabulary, self.width, embedding_init=normal(0.02), dtype=self.dtype, name="wte")
        wpe = nn.Embed(self.positions, self.width, embedding_init=normal(0.01), dtype=self.dtype, name="wpe")
        x = wte(tokens) + wpe(jnp.arange(tokens.shape[1]) if position_ids is None else position_ids)
        x = nn.Dropout(dropout, deterministic=False)(x)
        mask = None
        if segment_ids is not None:
            mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]  # [rows, 1, length, length]
        if self.stacked:
            to_all: Any = nn.broadcast  # Any: annotated as a number alone
            of_layers = nn.scan(
                nn.remat(lambda block, x, mask: (block(x, mask), None), prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=to_all,
                length=self.layers,
            )
            x, _ = of_layers(Block(self.heads, dropout, self.dtype, name="h"), x, mask)
        else:
            for i in range(self.layers):
                x = Block(self.heads, dropout, self.dtype, name=f"h_{i}")(x, mask)
        x = nn.LayerNorm(_EPSILON, dtype=self.dtype, use_fast_variance=False, name="ln_f")(x)
        return wte.attend(x).astype(jnp.float32)
