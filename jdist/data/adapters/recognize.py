"""Sources of the datasets of other libraries, told by the modules of their classes, and of rows read by number.

Imports none of the libraries by itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdist.data.sources.elements import Elements, element_bytes
from jdist.data.sources.rows import RowSource, rows_options
from jdist.errors import BatchError, DatasetError
from jdist.support import checks
from jdist.support.tensorflow_names import without_tensorflow_keywords
from jdist.typing import PyTree

# By the package and the name of a class: the function that adapts it, `(dataset, global_batch) -> source`.
_ADAPTERS = {
    ("grain", "MapDataset"): "grain:map_dataset",
    ("grain", "IterDataset"): "grain:iter_dataset",
    ("grain", "DatasetIterator"): "grain:iterator",
    ("grain", "DataLoader"): "grain:data_loader",
    ("grain", "DataLoaderIterator"): "grain:iterator",
    ("datasets", "Dataset"): "huggingface:dataset",
    ("datasets", "IterableDataset"): "huggingface:iterable_dataset",
    ("datasets", "DatasetDict"): "huggingface:splits",
    ("datasets", "IterableDatasetDict"): "huggingface:splits",
    ("torchdata", "StatefulDataLoader"): "torch:stateful_data_loader",
    ("torch", "DataLoader"): "torch:data_loader",
    ("torch", "Dataset"): "torch:dataset",
    ("tensorflow", "DatasetV2"): "tensorflow:dataset",
}


def adapted(source: Any, global_batch: int | None = None) -> Any:
    """Makes a source of another library's dataset; returns anything else unchanged."""
    # `global_batch` is given if the dataset's elements are rows; None: they are batches.
    adapt = _adapter(source)
    if adapt is None:
        return source
    return adapt(
        source, None if global_batch is None else checks.whole_number("global_batch", global_batch, DatasetError)
    )


def is_known(source: Any) -> bool:
    """Returns whether a source is another library's dataset."""
    return _adapter(source) is not None


def _adapter(source: Any) -> Callable[[Any, int | None], Any] | None:
    for cls in type(source).__mro__:
        package = cls.__module__.partition(".")[0]
        if (name := _ADAPTERS.get((package, cls.__name__))) is not None:
            return _imported(name)
    if all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict", "__iter__")):
        return _imported("torch:state_dict_source")
    return None


def _imported(name: str) -> Callable[[Any, int | None], Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"jdist.data.adapters.{module}"), function)


def refuse_rows(kind: str, global_batch: int | None) -> None:
    """Raises a `DatasetError` for a `global_batch` of a dataset that has batches of its own."""
    if global_batch is not None:
        raise DatasetError(
            f"`global_batch` is {global_batch}, but `data` is a {kind}, which has batches of its own. Leave `global_batch` "
            "out: it makes batches of a dataset of rows, without a loader and without `.batch`."
        )


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
        shuffle_seed: a whole number, 0 or more, draws a new order each epoch. Each batch computes its own rows, so
            nothing is held in memory; None keeps the rows in order.
        epochs: how often to go through the rows; None repeats without end.
        workers: threads that read batches ahead, each a whole one: of use where reading waits for a disk or a network, or
            decodes outside of Python. None: as many as suit the kind of rows.

    Returns:
        A random-access source, for `strategy.distribute_dataset`. Of several processes each reads its own rows alone.

    Raises:
        DatasetError: the data has no rows or is batches already, or an option is out of range.

    Example:
        >>> from jdist.data import from_rows
        >>> rows = [{"x": i, "y": [i, -i]} for i in range(3)]
        >>> [batch["y"].tolist() for batch in from_rows(rows, global_batch=2)]
        [[[0, 0], [1, -1]], [[2, -2]]]
    """
    options = rows_options(global_batch, shuffle_seed, epochs)
    named = [(cls.__module__.partition(".")[0], cls.__name__) for cls in type(rows).__mro__]
    is_of_torch = ("torch", "Dataset") in named and not any(package in ("datasets", "grain") for package, _ in named)
    if callable(getattr(rows, "__getitem__", None)) and (is_of_torch or not is_known(rows)):
        source = RowSource(elements=SequenceElements(rows), global_batch=options["global_batch"])
    else:
        source = adapted(rows, global_batch)
    if not isinstance(source, RowSource):
        raise DatasetError(
            f"a {type(rows).__name__} has no rows that can be read by their numbers: it needs `len(rows)` and `rows[i]`. Give "
            "data that only goes forward to `strategy.distribute_dataset`, in batches"
        )
    workers = source.workers if workers is None else checks.whole_number("workers", workers, DatasetError)
    return dataclasses.replace(source, workers=workers, **options)


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
