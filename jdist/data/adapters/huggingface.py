"""Hugging Face's datasets: a `Dataset` has random access, an `IterableDataset` a state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from jdist.data.adapters.recognize import refuse_rows
from jdist.data.adapters.torch import StateDictSource
from jdist.data.sources.elements import Elements
from jdist.data.sources.rows import BatchSource, RowSource
from jdist.data.sources.sequential import PlainSource
from jdist.errors import BatchError, DatasetError
from jdist.typing import PyTree

_TABLES = (None, "pandas", "polars", "arrow")  # formats with rows that are not arrays


class HuggingFaceElements(Elements):
    """The rows of a `datasets.Dataset`; those of one that was batched are batches."""

    kind = "Hugging Face Dataset"
    is_fresh = False  # rows in one piece are views of the file

    def __init__(self, dataset: Any):
        self._dataset = _as_arrays(dataset, dataset.format["type"])
        # What a function makes of the columns is not known.
        self._integers = [] if dataset.format["type"] == "custom" else _columns_of_integers(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def name(self, number: int, epoch: int) -> str:
        return f"row {number:,} (from 0) of the dataset{self._files()}"

    def _read(self, number: int, epoch: int) -> PyTree:
        row = self._dataset[number]
        _refuse_nulls(row, self._integers, lambda value: f"value {value}")
        return row

    def read(self, numbers: np.ndarray, epoch: int) -> PyTree:
        """Reads rows by one call of the library; see `Elements.read`."""
        try:
            batch = self._dataset[numbers.tolist()]
        except Exception:
            rows = [self.element(number, epoch) for number in numbers]  # the one that fails is named
            self.refuse_unlike(rows, numbers, epoch)
            raise
        _refuse_nulls(batch, self._integers, lambda row: f"row {numbers[row]:,} (from 0)")
        return batch

    def _identify(self) -> dict[str, str]:
        table = self._dataset.with_format("arrow", columns=self._dataset.format["columns"])
        content = hashlib.sha256()
        for number in sorted({0, len(table) - 1}):
            content.update(repr(table[number].to_pydict()).encode())
        names = repr(sorted(self._dataset.format["columns"]))
        return {"columns": hashlib.sha256(names.encode()).hexdigest()[:12], "content": content.hexdigest()[:12]}

    def _files(self) -> str:
        files = [file["filename"] for file in self._dataset.cache_files]
        if not files:
            return ""
        return f" in {files[0]!r}" + (f" and {len(files) - 1} more files" if len(files) > 1 else "")


def _columns_of_integers(dataset: Any) -> list[str]:
    """Lists the columns of integers, or of lists of them, as far as the types of columns are known."""

    def is_integer(feature: Any) -> bool:
        while hasattr(feature, "feature"):
            feature = feature.feature
        return str(getattr(feature, "dtype", "")).startswith(("int", "uint"))

    return [name for name, feature in (dataset.features or {}).items() if is_integer(feature)]


def _refuse_nulls(batch: Mapping[str, Any], integers: list[str], name_row: Callable[[int], str]) -> None:
    """Raises a `BatchError` for missing integers: the library would make them NaN, and floats of the others."""
    for name in filter(batch.__contains__, integers):
        values = batch[name]
        if "float" in str(getattr(values, "dtype", "")) and (missing := np.isnan(np.atleast_1d(values))).any():
            row = name_row(int(np.argwhere(missing)[0][0]))
            raise BatchError(
                f"the integers of column {name!r} have a null in {row}, which would become NaN and turn the rest of "
                "its batch into floats. Fill in nulls, such as by `dataset.with_format(None).map(lambda row: "
                f"{{{name!r}: -1 if row[{name!r}] is None else row[{name!r}]}})`, or leave their rows out by `filter`"
            )


def _as_arrays(dataset: Any, format_type: Any) -> Any:
    """Has a dataset return arrays, unless it returns those of another library or goes through a function."""
    return dataset.with_format("numpy") if format_type in _TABLES else dataset


def dataset(dataset: Any, global_batch: int | None) -> RowSource | BatchSource:
    """Adapts a `datasets.Dataset`: of batches, or with `global_batch` of rows."""
    elements = HuggingFaceElements(dataset)
    return (
        BatchSource(elements=elements)
        if global_batch is None
        else RowSource(elements=elements, global_batch=global_batch)
    )


class HuggingFaceSource(StateDictSource):
    """Batches of a `datasets.IterableDataset`, which shuffles each pass by its number."""

    how_to_share = "`datasets.distributed.split_dataset_by_node(dataset, rank=process_index, world_size=num_processes)`"

    def __init__(self, dataset: Any):
        self.loader = dataset
        self.kind = "Hugging Face IterableDataset"
        self._initial = None  # a state of None is the beginning
        self.own_part = _own_part(dataset)

    def iterate(self) -> Iterator[PyTree]:
        return _batches(self.loader)

    @property
    def fingerprint(self) -> str:
        names = repr(self.loader.column_names)
        return f"kind=Hugging_Face_IterableDataset columns={hashlib.sha256(names.encode()).hexdigest()[:12]}"


def iterable_dataset(dataset: Any, global_batch: int | None) -> HuggingFaceSource | PlainSource:
    """Adapts a `datasets.IterableDataset`: of batches, or with `global_batch` of rows."""
    formatting = dataset._formatting
    dataset = _as_arrays(dataset, None if formatting is None else formatting.format_type)
    if global_batch is not None:
        if _is_batched(dataset._ex_iterable):
            refuse_rows("Hugging Face IterableDataset", global_batch)
        dataset = dataset.batch(global_batch)
    if not _has_buffer(dataset._ex_iterable):
        return HuggingFaceSource(dataset)

    def begin(epoch: int) -> Any:
        dataset.set_epoch(epoch)
        return _batches(dataset)

    return PlainSource(
        kind="Hugging Face IterableDataset",
        begin=begin,
        advice="its state leaves out the rows in the buffer of `shuffle`, which a resumed run would lose. Without the buffer, "
        "or as a map-style `datasets.Dataset`, it has a position",
        how_to_share=HuggingFaceSource.how_to_share,
        own_part=_own_part(dataset),
    )


def _batches(dataset: Any) -> Iterator[PyTree]:
    integers = _columns_of_integers(dataset)
    for batch in dataset:
        _refuse_nulls(batch, integers, lambda row: f"row {row} (from 0) of the batch")
        yield batch


def _is_batched(examples: Any) -> bool:
    """Returns whether the elements are batches, as far as known: a function of `map` may do anything."""
    while examples is not None:
        if getattr(examples, "batched", False):  # its function, or a partial of it
            function = getattr(examples.function, "func", examples.function)
            return function.__module__.startswith("datasets.") and function.__name__.startswith("_batch")
        examples = getattr(examples, "ex_iterable", None)
    return False


def _own_part(dataset: Any) -> tuple[int, int] | None:
    split = dataset._distributed
    return None if split is None else (split.rank, split.world_size)


def _has_buffer(examples: Any) -> bool:
    """Returns whether a chain of iterables has a shuffle buffer; no state holds the rows in it."""
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    parents = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or [])]
    return any(_has_buffer(parent) for parent in parents if parent is not None)


def splits(dataset: Any, global_batch: int | None) -> NoReturn:
    """Refuses a dict of splits."""
    names = list(dataset)
    raise DatasetError(f"a {type(dataset).__name__} has several splits, {names}; take one: `dataset[{names[0]!r}]`")
