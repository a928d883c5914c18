"""`from_rows`: batches of the rows of anything that has random access."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np

from jdist.data.adapters.recognize import adapted, is_known
from jdist.data.sources.elements import Elements, element_bytes
from jdist.data.sources.rows import RowSource, rows_options
from jdist.errors import BatchError, DatasetError
from jdist.support import checks
from jdist.support.tensorflow_names import without_tensorflow_keywords
from jdist.typing import PyTree


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
    options = rows_options(global_batch, shuffle_seed, epochs)
    if callable(getattr(rows, "__getitem__", None)) and not _is_adapted_as_rows(rows):
        source = RowSource(elements=SequenceElements(rows), global_batch=options["global_batch"])
    else:
        source = adapted(rows, global_batch)
    if not isinstance(source, RowSource):
        raise DatasetError(
            f"a {type(rows).__name__} has no rows that can be read by their numbers: it needs `len(rows)` and `rows[i]`. Give "
            "what goes forward only to `strategy.distribute_dataset` as it is, in batches"
        )
    workers = source.workers if workers is None else checks.whole_number("workers", workers, DatasetError)
    return dataclasses.replace(source, workers=workers, **options)


def _is_adapted_as_rows(rows: Any) -> bool:
    return is_known(rows) and not _is_torch_dataset(rows)


def _is_torch_dataset(rows: Any) -> bool:
    named = [(cls.__module__.partition(".")[0], cls.__name__) for cls in type(rows).__mro__]
    return ("torch", "Dataset") in named and not any(package in ("datasets", "grain") for package, _ in named)


class SequenceElements(Elements):
    """The rows of anything with `len(rows)` and `rows[i]`."""

    is_fresh = True

    def __init__(self, rows: Any):
        self._rows = rows
        self.kind = type(rows).__name__

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, number: int, epoch: int) -> str:
        return f"row {number:,} (from 0)"

    def _read(self, number: int, epoch: int) -> PyTree:
        row = self._rows[number]
        if row is None:
            raise BatchError(
                f"a row of the {self.kind} is None; it must be a tree of arrays and numbers. Leave such rows out, or let "
                "`rows[i]` return what it read"
            )
        return jax.tree.map(np.asarray, row, is_leaf=lambda x: isinstance(x, list))

    def _identify(self) -> dict[str, str]:
        ends = [0, len(self) - 1]
        first, again = ([element_bytes(self.element(number, 0)) for number in ends] for _ in range(2))
        # Rows that are augmented at random are told apart by their number alone.
        content = b"".join(first) if first == again else b""
        return {"content": hashlib.sha256(content).hexdigest()[:12] if content else "random"}
