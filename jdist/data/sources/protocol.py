"""Sources of batches by their numbers, and checks of what is given as a source."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jdist.errors import DatasetError
from jdist.typing import PyTree


@runtime_checkable
class RandomAccessSource(Protocol):
    """A source that makes any batch by its number, and so resumes at any step for the same price.

    Attributes:
        num_steps: how many batches there are; None: without end.
        global_batch: rows of a full batch.
        fingerprint: identifies the data and its order; a saved position only fits the same fingerprint.
            Written as "name=value name=value ...", so that an error can name the mismatch.
    """

    @property
    def num_steps(self) -> int | None: ...

    @property
    def global_batch(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def batch_at(self, step: int) -> PyTree:
        """Makes batch number `step`, from 0: a pure function, which may be called from a background thread."""
        ...


@dataclass(frozen=True, kw_only=True)
class JointSource:
    """The random-access sources of all processes, seen as one; see `RandomAccessSource`."""

    num_steps: int | None
    global_batch: int
    fingerprint: str


Resumable = RandomAccessSource | JointSource  # what a saved position refers to


def steps_from(source: Resumable, step: int) -> Iterator[int]:
    """Counts the numbers of a random-access source's batches from `step` on."""
    return iter(itertools.count(step) if source.num_steps is None else range(step, source.num_steps))


def check_source(source: Any) -> None:
    """Refuses an object that is not a source, such as a dict, an array or no iterable."""
    if isinstance(source, RandomAccessSource):
        if source.num_steps is not None and source.num_steps < 1:
            raise DatasetError(
                f"the dataset is empty: {source!r} has num_steps={source.num_steps}; "
                "check its rows, its filters, and that its global batch is not larger than its data"
            )
        if source.global_batch < 1:
            raise DatasetError(f"a source needs `global_batch` of at least 1, but {source!r} has {source.global_batch}")
        return
    if isinstance(source, Mapping | np.ndarray | jax.Array | str | bytes):
        raise DatasetError(
            f"a {type(source).__name__} is not a source of batches; make one with "
            "`jdist.data.from_arrays(arrays, global_batch=...)`, or pass an iterable of batches"
        )
    are_arrays = isinstance(source, tuple) and all(isinstance(x, np.ndarray | jax.Array) for x in source)
    if are_arrays and len({(np.shape(x)[1:], x.dtype) for x in source}) > 1:
        raise DatasetError(
            f"a tuple is taken as a list of batches, and this is a tuple of {len(source)} arrays of different kinds. Make "
            "batches of their rows by `jdist.data.from_arrays((x, y), global_batch=...)`"
        )
    if not isinstance(source, Iterable):
        raise DatasetError(
            f"a {type(source).__name__} is not a source of batches; pass `jdist.data.from_arrays(...)`, or "
            "any iterable of numpy pytrees, one global batch each"
        )


def refuse_a_row(element: PyTree, kind: str) -> None:
    """Raises a `DatasetError` for an element of another library's dataset that is one row, where it should be a batch."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(element):
        if isinstance(leaf, bool | int | float) or getattr(leaf, "ndim", 1) == 0:
            name = jax.tree_util.keystr(path) or "its top"
            if path and isinstance(path[-1], jax.tree_util.SequenceKey):
                name += " (if that is a list of one number a row, make it an array: `np.asarray`)"
            raise DatasetError(
                f"the elements of a {kind} are taken as batches, but one has a single number at {name}, so it is a row. Batch "
                "them by the library, `dataset.batch(...)` or a loader's batch size, or give the rows a step takes: "
                "`jdist.data.from_rows(dataset, global_batch=...)`, or the `global_batch` of `jdist.fit`"
            )


def kind_of(source: Any) -> str:
    """Names a source in messages."""
    return getattr(source, "kind", type(source).__name__)


def fields(fingerprint: str) -> dict[str, str]:
    """Parses the names and values of a fingerprint; leaves out other text."""
    return dict(part.split("=", 1) for part in fingerprint.split() if "=" in part)
