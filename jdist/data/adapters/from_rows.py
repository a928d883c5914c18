"""`from_rows`: batches of the rows of anything that has random access."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jdist.data.adapters.identity import element_bytes
from jdist.data.adapters.recognize import adapted, is_known
from jdist.data.adapters.refusals import refuse_unlike_rows
from jdist.data.sources.protocol import whole_number
from jdist.data.sources.rows import RowSource
from jdist.errors import BatchError, DatasetError
from jdist.support.tensorflow_names import without_tensorflow_keywords

PyTree = Any


@without_tensorflow_keywords
def from_rows(
    rows: Any, *, global_batch: int, shuffle_seed: int | None = None, epochs: int | None = 1, workers: int | None = None
) -> RowSource:
    """Makes a source of batches from rows that are read by their numbers.

    Args:
        rows: a Hugging Face `Dataset`, a grain `MapDataset` without batches, or anything with `len(rows)` and `rows[i]`, such
            as a map-style dataset of PyTorch: each row a tree of arrays and numbers, in which a list is an array.
        global_batch: rows of a full batch, over all replicas. The last batch of an epoch has fewer if the rows do not
            divide; batches never reach into the next epoch.
        shuffle_seed: a whole number, 0 or more, draws a new order each epoch, of which each batch computes its own rows, so
            that nothing is held in memory; None keeps the rows in order.
        epochs: how often to go through the rows; None repeats without end.
        workers: threads that read batches ahead, each a whole one: of use where reading waits for a disk or a network, or
            decodes outside of Python. None: as many as suit the kind of rows.

    Returns:
        A random-access source, for `strategy.distribute_dataset`. Of several processes each reads its own rows alone.

    Raises:
        DatasetError: there are no rows, these are batches already, or an option is out of range.

    Example:
        >>> from jdist.data import from_rows
        >>> rows = [{"x": i, "y": [i, -i]} for i in range(3)]
        >>> [batch["y"].tolist() for batch in from_rows(rows, global_batch=2)]
        [[[0, 0], [1, -1]], [[2, -2]]]
    """
    global_batch = whole_number(global_batch, name="global_batch", least=1)
    if callable(getattr(rows, "__getitem__", None)) and not _is_adapted_as_rows(rows):
        source = RowSource(elements=SequenceElements(rows), global_batch=global_batch)
    else:
        source = adapted(rows, global_batch)
    if not isinstance(source, RowSource):
        raise DatasetError(
            f"a {type(rows).__name__} has no rows that can be read by their numbers: it needs `len(rows)` and `rows[i]`. Give "
            "what goes forward only to `strategy.distribute_dataset` as it is, in batches"
        )
    return dataclasses.replace(
        source,
        shuffle_seed=None if shuffle_seed is None else whole_number(shuffle_seed, name="shuffle_seed", least=0),
        epochs=None if epochs is None else whole_number(epochs, name="epochs", least=1),
        workers=source.workers if workers is None else whole_number(workers, name="workers", least=1),
    )


def _is_adapted_as_rows(rows: Any) -> bool:
    return is_known(rows) and not _is_torch_dataset(rows)


def _is_torch_dataset(rows: Any) -> bool:
    named = [(cls.__module__.partition(".")[0], cls.__name__) for cls in type(rows).__mro__]
    return ("torch", "Dataset") in named and not any(package in ("datasets", "grain") for package, _ in named)


def _stack(*leaves: np.ndarray) -> np.ndarray:
    """Stacks a leaf of several rows; `np.stack` would convert them to one dtype, which another batch then has not."""
    if len({leaf.dtype for leaf in leaves}) > 1:
        raise ValueError("dtypes differ")
    return np.stack(leaves)


class SequenceElements:
    """The rows of anything with `len(rows)` and `rows[i]`."""

    is_fresh = True

    def __init__(self, rows: Any):
        self._rows = rows
        self.kind = type(rows).__name__
        self._identity: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def element(self, number: int, epoch: int) -> PyTree:
        try:
            row = self._rows[int(number)]
            if row is None:
                raise BatchError(
                    f"a row of the {self.kind} is None; it must be a tree of arrays and numbers. Leave such rows out, or let "
                    "`rows[i]` return what it read"
                )
            return jax.tree.map(np.asarray, row, is_leaf=lambda x: isinstance(x, list))
        except Exception as error:
            error.add_note(f"while reading row {int(number):,} (from 0)")
            raise

    def read(self, numbers: np.ndarray, epoch: int) -> PyTree:
        rows = [self.element(number, epoch) for number in numbers]
        try:
            return jax.tree.map(_stack, *rows)
        except ValueError:
            refuse_unlike_rows(rows, [f"row {int(number):,} (from 0)" for number in numbers], self.kind)
            raise

    def identity(self) -> Mapping[str, str]:
        if not self._identity:
            ends = [0, len(self) - 1]
            first, again = ([element_bytes(self.element(number, 0)) for number in ends] for _ in range(2))
            # Rows that are augmented at random are told apart by their number alone.
            content = b"".join(first) if first == again else b""
            self._identity["content"] = hashlib.sha256(content).hexdigest()[:12] if content else "random"
        return self._identity
