"""Language modelling of bytes: a decoder-only transformer on text files, measured in bits per byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field

import jdist
from examples.models.transformer import Transformer
from examples.tasks import byte_model, corpus
from jdist.loop.task import Task
from jdist.tasks import options
from jdist.tasks.options import OptionError

BEGIN = 256  # the token before the first byte; tokens 0 to 255 are the bytes
VOCABULARY = 257


@options.checked
def make(
    *,
    files: options.Text | Sequence[options.Text] | None = None,
    length: Annotated[int, Field(ge=2)] = 128,
    layers: options.Count = 3,
    width: options.Count = 128,
    heads: options.Count = 4,
    dropout: options.Fraction = 0.0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    stacked: bool = False,
    eval_context: options.Natural | None = None,
    eval_bytes: options.Count | None = None,
) -> Task:
    """Makes the byte-level language model.

    Args:
        files: glob pattern or list of them, `**` for any depth; None for the `.py` files of the running
            Python's own standard library. One file in ten is held out.
        length: bytes predicted by one training row.
        layers: blocks of the transformer.
        width: features of its residual stream.
        heads: attention heads; `width / heads` is even.
        dropout: share of each branch dropped in training.
        dtype: "float32", or "bfloat16" for activations on GPU and TPU; parameters are float32 always.
        stacked: whether the blocks' parameters are stacked and a `lax.scan` goes over them, each block computed again in the
            backward pass: for models of many layers, which then compile as fast as one of few.
        eval_context: bytes that each evaluated row sees before the first byte it is scored on, less than
            `length`; None for half of `length`. More is better and slower: `length - eval_context` bytes are
            scored a row.
        eval_bytes: held-out bytes to evaluate on, from the start; None for all. Model and baselines always
            use the same bytes.

    Returns:
        A task with batches {"tokens": uint16 [rows, length + 1]}. Its metrics are "loss" (nats per byte),
        "bits_per_byte" and, in evaluation, "accuracy"; its baselines are the bits per byte of an add-one
        order-2 model of all training bytes and of `zlib -9`.

    Raises:
        OptionError: an option is out of range, or the files do not serve.

    Example:
        >>> task = make(files="jdist/**/*.py", length=64)
        >>> task.train_data(8, 0, 1).batch_at(0)["tokens"].shape
        (8, 65)
    """
    context = length // 2 if eval_context is None else eval_context
    if context >= length:
        raise OptionError(
            "eval_context",
            f"{context} is not less than length, which is {length}: a row scores the bytes that are left",
            others=["length"],
        )
    if width % (2 * heads):
        raise OptionError(
            "width",
            f"{width} is not a multiple of twice the heads, which are {heads}: rotary positions turn pairs of features "
            "of each head",
            others=["heads"],
        )
    model = Transformer(VOCABULARY, layers, width, heads, dropout, jnp.dtype(dtype), stacked)
    with options.blaming("files"):
        data = corpus.load([files] if isinstance(files, str) else files)
    train_rows = training_rows(data.train, length=length)
    scored = length - context
    held_out = _held_out_bytes(data.held_out, scored=scored, limit=eval_bytes)
    eval_rows = evaluation_rows(held_out, length=length, scored=scored)

    def create_state(key: jax.Array, tx: optax.GradientTransformation) -> jdist.TrainState:
        init_key, step_key = jax.random.split(key)
        params = model.init(init_key, jnp.zeros((1, length), jnp.int32))["params"]
        return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=tx, rng=step_key)

    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        key = jdist.replica_rng(jax.random.fold_in(state.rng, state.step))
        tokens = batch["tokens"].astype(jnp.int32)

        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, tokens[:, :-1], train=True, rngs={"dropout": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return jdist.mean(losses, batch["mask"])

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "bits_per_byte": loss / np.log(2)}

    def eval_step(state: Any, batch: Any) -> dict[str, jax.Array]:
        tokens = batch["tokens"].astype(jnp.int32)
        logits = state.apply_fn({"params": state.params}, tokens[:, :-1])[:, -scored:]
        targets = tokens[:, -scored:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        loss = jdist.mean(losses, batch["mask"])
        accuracy = jdist.mean(logits.argmax(-1) == targets, batch["mask"])
        return {"loss": loss, "bits_per_byte": loss / np.log(2), "accuracy": accuracy}

    def baselines() -> dict[str, float]:
        return {
            "order2_bits_per_byte": byte_model.fit_order2(data.train).bits_per_byte(held_out),
            "zlib9_bits_per_byte": byte_model.zlib_bits_per_byte(held_out),
        }

    return Task(
        create_state=create_state,
        train_step=train_step,
        eval_step=eval_step,
        train_data=lambda global_batch, seed, epochs: jdist.data.from_arrays(
            {"tokens": train_rows}, global_batch=global_batch, shuffle_seed=seed, epochs=epochs
        ),
        eval_data=lambda global_batch: jdist.data.from_arrays({"tokens": eval_rows}, global_batch=global_batch),
        baselines=baselines,
    )


def training_rows(data: np.ndarray, *, length: int) -> np.ndarray:
    """Cuts bytes into rows [length + 1] that predict each byte once; drops the rest."""
    # Each row starts with the last byte of the row before, the first with BEGIN.
    if data.size < length:
        raise OptionError(
            "length",
            f"{length} bytes a row are more than the {data.size} that the training files hold",
            remedy=" Lower it, or name more files in task.options.files.",
            others=["files"],
        )
    return _windows(data, length=length, scored=length)


def evaluation_rows(data: np.ndarray, *, length: int, scored: int) -> np.ndarray:
    """Cuts bytes into overlapping rows; each byte is among the last `scored` of one row."""
    # `n` is a multiple of `scored`. A row [length + 1] sees `length - scored` bytes before the
    # scored ones; BEGIN stands before the first byte.
    return _windows(data, length=length, scored=scored)


def _windows(data: np.ndarray, *, length: int, scored: int) -> np.ndarray:
    before = np.full(length - scored + 1, BEGIN, np.uint16)
    tokens = np.concatenate([before, data.astype(np.uint16)])
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::scored]


def _held_out_bytes(data: np.ndarray, *, scored: int, limit: int | None) -> np.ndarray:
    """Takes at most `limit` bytes, and a multiple of what one row scores, so that all rows weigh alike."""
    count = data.size if limit is None else min(data.size, limit)
    if count < scored:
        raise OptionError(
            "length" if count == data.size else "eval_bytes",
            f"there are {count} held-out bytes to evaluate on, fewer than the {scored} that one row scores",
            remedy=" Raise task.options.eval_bytes, name more files in task.options.files, or lower "
            "task.options.length.",
            others=["eval_bytes", "files", "length"],
        )
    return data[: count // scored * scored]
