"""Batches of rows, or of batches, that another library reads by their numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jdist.data.leaves import count_rows, to_numpy
from jdist.data.sources.index_order import rows_at
from jdist.data.sources.protocol import check_step, refuse_a_row, steps_from
from jdist.errors import DatasetError

PyTree = Any
_ENDLESS = 1 << 48  # rows; Grain gives a dataset without end a length of about 2**60


class Elements(Protocol):
    """Elements that a library reads by number: rows, or full batches."""

    kind: str  # its name in messages, "grain MapDataset"
    is_fresh: bool  # nobody else has or reuses the memory of what `read` and `element` return

    def __len__(self) -> int:
        """Counts those of one epoch."""
        ...

    def read(self, numbers: np.ndarray, epoch: int) -> PyTree:
        """Reads elements and joins them along a new first axis."""
        ...

    def element(self, number: int, epoch: int) -> PyTree:
        """Reads one element as it is."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Tells these data from others, in words without spaces by name."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class _Epochs:
    """What batches of rows and batches that are there have in common: so many of `elements` in each epoch."""

    elements: Elements
    epochs: int | None = 1
    workers: int = 1

    @property
    def kind(self) -> str:
        """Its name in messages."""
        return self.elements.kind

    @property
    def is_fresh(self) -> bool:
        """Whether batches share no memory with anything else."""
        return self.elements.is_fresh

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches of one epoch; None: the library repeats the data without end."""
        raise NotImplementedError

    @property
    def num_steps(self) -> int | None:
        """Batches of all epochs; None: without end."""
        each = self.steps_per_epoch
        return None if self.epochs is None or each is None else self.epochs * each

    def _place(self, step: int) -> tuple[int, int]:
        """Returns a step's epoch and its number therein."""
        check_step(step, self.num_steps)
        each = self.steps_per_epoch
        return (0, step) if each is None else divmod(step, each)

    def batch_at(self, step: int) -> PyTree:
        """See `RandomAccessSource`."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[PyTree]:
        return map(self.batch_at, steps_from(self, 0))  # type: ignore[arg-type]  # each subclass is a RandomAccessSource


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSource(_Epochs):
    """Batches of rows that are read by number; see `jdist.data.from_rows`."""

    global_batch: int
    shuffle_seed: int | None = None  # None: the rows' own order
    drop_short: bool = False  # leave out the short last batch of each epoch

    def __post_init__(self) -> None:
        if self.num_rows == 0:
            raise DatasetError(
                f"the dataset is empty: the {self.kind} has 0 rows; check the files or filter it came from"
            )
        if self.steps_per_epoch == 0:
            raise DatasetError(
                f"nothing is left of the dataset: the {self.num_rows} rows of the {self.kind} are fewer than the global batch "
                f"of {self.global_batch}, and short batches are left out. Use a global batch of at most {self.num_rows}, or "
                'keep short batches (partial="pad")'
            )

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self.elements)

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches of one epoch; None: the library repeats the data without end."""
        if self.num_rows >= _ENDLESS:
            return None
        full = self.num_rows // self.global_batch
        return full if self.drop_short else -(-self.num_rows // self.global_batch)

    def rows_of(self, step: int) -> int:
        """Counts the rows of batch number `step`."""
        _, within = self._place(step)
        return min(self.global_batch, self.num_rows - within * self.global_batch)

    def batch_at(self, step: int, part: slice | np.ndarray = slice(None)) -> PyTree:
        """Reads the rows of a batch that `part` selects; notes the row in the library's errors."""
        epoch, within = self._place(step)
        start = within * self.global_batch
        numbers = np.arange(start, min(start + self.global_batch, self.num_rows))[part]
        if self.shuffle_seed is not None:
            numbers = rows_at(numbers, self.num_rows, self.shuffle_seed, epoch)
        return _noting(step, self.kind, lambda: self.elements.read(numbers, epoch))

    @property
    def fingerprint(self) -> str:
        """Which rows in which order."""
        parts = {
            "rows": self.num_rows,
            "global_batch": self.global_batch,
            "shuffle_seed": self.shuffle_seed,
            "short_batches": "dropped" if self.drop_short else "kept",
            **self.elements.identity(),
        }
        return " ".join(f"{key}={value}" for key, value in parts.items())

    def without_short(self) -> RowSource:
        """Makes the same source without the short last batch of each epoch."""
        return dataclasses.replace(self, drop_short=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchSource(_Epochs):
    """Batches that a library reads by number, whole; see `RandomAccessSource`."""

    def __post_init__(self) -> None:
        if len(self.elements) == 0:
            raise DatasetError(f"the dataset is empty: the {self.kind} has 0 batches; check where it came from")
        object.__setattr__(self, "_first_rows", [])

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches of one epoch; None: the library repeats the data without end."""
        return None if len(self.elements) * 1.0 >= _ENDLESS else len(self.elements)

    @property
    def global_batch(self) -> int:
        """Rows of a full batch, which is the first: it is read once for this."""
        known: list[int] = self._first_rows  # type: ignore[attr-defined]  # set by `__post_init__`, no field
        if not known:
            batch = self.batch_at(0)
            refuse_a_row(batch, self)
            known.append(count_rows(to_numpy(batch)))
        return known[0]

    def batch_at(self, step: int) -> PyTree:
        """Reads a batch; notes the batch in the library's errors."""
        epoch, within = self._place(step)
        return _noting(step, self.kind, lambda: self.elements.element(within, epoch))

    @property
    def fingerprint(self) -> str:
        """Which batches in which order."""
        parts = {"batches": len(self.elements), **self.elements.identity()}
        return " ".join(f"{key}={value}" for key, value in parts.items())


EpochSource = RowSource | BatchSource


def _noting(step: int, kind: str, read: Any) -> PyTree:
    try:
        return read()
    except Exception as error:
        error.add_note(f"while making batch {step:,} (from 0) of a {kind}")
        raise
