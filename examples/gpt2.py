"""GPT-2 of 124 million parameters, from the beginning, on texts that Grain packs into rows without padding.

`python -m examples.gpt2 PATTERN FOLDER` writes text files as records of tokens: FOLDER/train.arrayrecord and, of one text in
ten, FOLDER/test.arrayrecord. Each byte is a token there; for GPT-2's own tokens let `encode` call a tokeniser.
"""

from __future__ import annotations

import glob
import sys
from pathlib import Path
from typing import Literal

import grain
import jax.numpy as jnp
import numpy as np
import optax
from array_record.python.array_record_module import ArrayRecordWriter

import jdist
from examples.models.gpt2 import GPT2
from jdist.tasks import Task, options

END = 50_256  # of a text


def make(
    *,
    train: str,
    test: str,
    vocabulary: int = 50_257,
    length: int = 1024,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> Task:
    """Makes the task.

    Args:
        train: glob pattern of the ArrayRecord files to train on, a text's tokens a record.
        test: of those to evaluate on.
        vocabulary: number of different tokens.
        length: tokens of a row.
        layers: of the model.
        width: of the model.
        heads: of each layer's attention.
        dtype: of the activations; parameters are float32.
    """
    activations = jnp.dtype(dtype)
    model = GPT2(vocabulary, length, layers, width, heads, dropout=0.0, dtype=activations, stacked=True)

    def create_state(key, tx):
        params = model.init(key, jnp.zeros((1, length), jnp.int32))["params"]
        return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_of(state, params, batch):
        tokens, texts = batch["tokens"], batch["tokens_segment_ids"]
        logits = state.apply_fn({"params": params}, tokens, segment_ids=texts, position_ids=batch["tokens_positions"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        # The next token counts if it is of the same text, and not filling, which has segment 0.
        counted = (texts[:, 1:] == texts[:, :-1]) & (texts[:, 1:] > 0)
        return jdist.mean(losses, counted & batch["mask"][:, None])

    def train_step(state, batch):
        loss, grads = jdist.value_and_grad(lambda params: loss_of(state, params, batch))(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def rows(texts, global_batch):
        tokens = texts.map(lambda record: {"tokens": np.frombuffer(record, np.uint16).astype(np.int32)})
        packed = grain.experimental.ConcatThenSplitIterDataset(
            tokens.to_iter_dataset(), length_struct={"tokens": length}
        )
        return packed.batch(global_batch)

    return Task(
        create_state=create_state,
        train_step=train_step,
        eval_step=lambda state, batch: {"loss": loss_of(state, state.params, batch)},
        train_data=lambda global_batch, seed, epochs: rows(
            records("train", train).seed(seed).shuffle().repeat(epochs), global_batch
        ),
        eval_data=lambda global_batch: rows(records("test", test), global_batch),
        baselines=lambda: {"loss of a guess": float(np.log(vocabulary))},
    )


def records(option: str, pattern: str) -> grain.MapDataset:
    """Opens the ArrayRecord files that an option's pattern matches."""
    if not (paths := sorted(glob.glob(pattern))):
        raise options.OptionError(option, f"{pattern!r} matches no file")
    return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))


def encode(text: str) -> list[int]:
    """Returns a text's tokens, here its bytes, and the end."""
    return [*text.encode(), END]


def write(pattern: str, folder: str) -> None:
    """Writes the texts that a pattern matches, `**` for any depth."""
    paths = sorted(glob.glob(pattern, recursive=True))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, is_held_out in (("train", False), ("test", True)):
        writer = ArrayRecordWriter(f"{folder}/{name}.arrayrecord", "group_size:1")
        for number, path in enumerate(paths):
            if (number % 10 == 9) is is_held_out:
                text = Path(path).read_text(encoding="utf-8", errors="replace")
                writer.write(np.array(encode(text), np.uint16).tobytes())
        writer.close()


if __name__ == "__main__":
    write(*sys.argv[1:])
