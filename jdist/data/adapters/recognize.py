"""Recognition of other libraries' datasets by the modules of their classes, without importing the libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from jdist.errors import DatasetError
from jdist.support import checks

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
    """Whether a source is another library's dataset."""
    return _adapter(source) is not None


def _adapter(source: Any) -> Callable[[Any, int | None], Any] | None:
    for cls in type(source).__mro__:
        package = cls.__module__.partition(".")[0]
        if (name := _ADAPTERS.get((package, cls.__name__))) is not None:
            return _imported(name)
    if all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict", "__iter__")):
        return _imported("state_dict:state_dict_source")
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
