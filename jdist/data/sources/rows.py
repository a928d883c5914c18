"""Batches of rows by their numbers, in their own order or a random one; and batches that another library reads by number."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jdist.data.leaves import count_rows, to_numpy
from jdist.data.sources.elements import Elements
from jdist.data.sources.protocol import kind_of, refuse_a_row, steps_from
from jdist.errors import DatasetError
from jdist.support import checks
from jdist.typing import PyTree

# Fewer rounds leave small orders uneven: with 6, the 120 orders of 5 rows differ in frequency by a third.
_ROUNDS = 10
_ENDLESS = 1 << 48  # rows; Grain gives a dataset without end a length of about 2**60


def check_step(step: int, num_steps: int | None, what: str = "source") -> None:
    """Raises a `DatasetError` for a step that the source does not have."""
    if step < 0 or (num_steps is not None and step >= num_steps):
        raise DatasetError(f"there is no batch {step}: the {what} has {num_steps} steps, counted from 0")


def rows_options(global_batch: Any, shuffle_seed: Any, epochs: Any) -> dict[str, Any]:
    """Checks the options that sources of rows have in common."""
    return {
        "global_batch": checks.whole_number("global_batch", global_batch, DatasetError),
        "shuffle_seed": shuffle_seed
        if shuffle_seed is None
        else checks.whole_number("shuffle_seed", shuffle_seed, DatasetError, least=0),
        "epochs": epochs if epochs is None else checks.whole_number("epochs", epochs, DatasetError),
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Epochs:
    """Batches that are made by their numbers, as many in each epoch; each kind of them is a `RandomAccessSource`."""

    epochs: int | None = 1

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches of one epoch; None: the library repeats the data without end."""
        raise NotImplementedError

    @property
    def num_steps(self) -> int | None:
        """Batches of all epochs; None: without end."""
        each = self.steps_per_epoch
        return None if self.epochs is None or each is None else self.epochs * each

    def batch_at(self, step: int) -> PyTree:
        """See `RandomAccessSource`."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[PyTree]:
        return map(self.batch_at, steps_from(self, 0))  # type: ignore[arg-type]  # each subclass is a RandomAccessSource

    def _place(self, step: int) -> tuple[int, int]:
        """Returns a step's epoch and its number therein."""
        check_step(step, self.num_steps)
        each = self.steps_per_epoch
        return (0, step) if each is None else divmod(step, each)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsByNumber(Epochs):
    """Batches of rows that are read by their numbers: of arrays, or of another library's rows."""

    global_batch: int
    shuffle_seed: int | None = None  # None: the rows' own order
    drop_short: bool = False  # leave out the short last batch of each epoch

    def __post_init__(self) -> None:
        if self.num_rows == 0:
            raise DatasetError(
                f"the dataset is empty: the {kind_of(self)} has 0 rows; check the files or filter it came from"
            )
        if self.steps_per_epoch == 0:
            raise DatasetError(
                f"nothing is left of the dataset: the {self.num_rows} rows of the {kind_of(self)} are fewer than the global "
                f"batch of {self.global_batch}, and short batches are left out. Use a global batch of at most {self.num_rows}, "
                'or keep short batches (partial="pad")'
            )

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        raise NotImplementedError

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
        """Makes batch number `step`, from 0 over all epochs, a pytree of arrays [rows, ...]; of its rows those of `part`.

        Example:
            >>> import numpy as np
            >>> from jdist.data import from_arrays
            >>> from_arrays(np.arange(5), global_batch=2, epochs=None).batch_at(3_000_000)
            array([0, 1])
        """
        epoch, within = self._place(step)
        start = within * self.global_batch
        return self._read(epoch, slice(start, min(start + self.global_batch, self.num_rows)), part)

    def without_short(self) -> Self:
        """Makes the same source without the short last batch of each epoch."""
        return dataclasses.replace(self, drop_short=True)

    def _identity(self) -> Mapping[str, str]:
        """Tells these rows from others, in words without spaces by name."""
        raise NotImplementedError

    def _read(self, epoch: int, places: slice, part: slice | np.ndarray) -> PyTree:
        """Reads a part of the rows at some places of an epoch's order."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Which rows in which order: sizes, seed, and hashes of the shapes and of a sample of the content."""
        parts = {
            "rows": self.num_rows,
            "global_batch": self.global_batch,
            "shuffle_seed": self.shuffle_seed,
            "short_batches": "dropped" if self.drop_short else "kept",
            **self._identity(),
        }
        return " ".join(f"{key}={value}" for key, value in parts.items())


@dataclass(frozen=True, kw_only=True, eq=False)
class _OfElements:
    """What another library reads by number, and how."""

    elements: Elements
    workers: int = 1

    @property
    def kind(self) -> str:
        """Its name in messages."""
        return self.elements.kind

    @property
    def is_fresh(self) -> bool:
        """Whether batches share no memory with anything else."""
        return self.elements.is_fresh


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSource(_OfElements, RowsByNumber):
    """Batches of rows that are read by number; see `jdist.data.from_rows`."""

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self.elements)

    def _identity(self) -> Mapping[str, str]:
        return self.elements.identity

    def _read(self, epoch: int, places: slice, part: slice | np.ndarray) -> PyTree:
        numbers = np.arange(places.start, places.stop)[part]
        if self.shuffle_seed is not None:
            numbers = rows_at(numbers, self.num_rows, self.shuffle_seed, epoch)
        return self.elements.read(numbers, epoch)

    def batch_at(self, step: int, part: slice | np.ndarray = slice(None)) -> PyTree:
        """Reads the rows of a batch that `part` selects; notes the row in the library's errors."""
        with _noting(step, self.kind):
            return super().batch_at(step, part)


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchSource(_OfElements, Epochs):
    """Batches that a library reads by number, whole; see `RandomAccessSource`."""

    def __post_init__(self) -> None:
        if len(self.elements) == 0:
            raise DatasetError(f"the dataset is empty: the {self.kind} has 0 batches; check where it came from")

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches of one epoch; None: the library repeats the data without end."""
        return None if len(self.elements) >= _ENDLESS else len(self.elements)

    @functools.cached_property
    def global_batch(self) -> int:
        """Rows of a full batch, which is the first: it is read once for this."""
        batch = self.batch_at(0)
        refuse_a_row(batch, self.kind)
        return count_rows(to_numpy(batch))

    def batch_at(self, step: int) -> PyTree:
        """Reads a batch; notes the batch in the library's errors."""
        epoch, within = self._place(step)
        with _noting(step, self.kind):
            return self.elements.element(within, epoch)

    @property
    def fingerprint(self) -> str:
        """Which batches in which order."""
        parts = {"batches": len(self.elements), **self.elements.identity}
        return " ".join(f"{key}={value}" for key, value in parts.items())


@contextlib.contextmanager
def _noting(step: int, kind: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while making batch {step:,} (from 0) of a {kind}")
        raise


def rows_at(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Computes the rows at some places of an epoch's random order of `count` rows, as int64."""
    # A Feistel network permutes a grid of `height * width` cells, of which the first `count` are
    # the rows: it splits a number into two halves, and adds to each in turn a hash of the other. A
    # cell behind the rows is permuted again until it is a row, which is rare: the grid has at most
    # one row of cells too many. Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    # CT-RSA 2002: the generalized Feistel cipher.
    width = math.isqrt(count - 1) + 1
    height = -(-count // width)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    rows = _permute(np.asarray(places, np.uint64), np.uint64(height), np.uint64(width), keys)
    while (outside := rows >= np.uint64(count)).any():
        rows[outside] = _permute(rows[outside], np.uint64(height), np.uint64(width), keys)
    return rows.astype(np.int64)


def _permute(cells: np.ndarray, height: np.uint64, width: np.uint64, keys: np.ndarray) -> np.ndarray:
    upper, lower = np.divmod(cells, width)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            upper = (upper + _hash(lower ^ key) % height) % height
        else:
            lower = (lower + _hash(upper ^ key) % width) % width
    return upper * width + lower


def _hash(values: np.ndarray) -> np.ndarray:
    """Mixes the bits of uint64 values, as SplitMix64 does at its end; products wrap around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
