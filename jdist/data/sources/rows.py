"""Batches by their numbers: of the rows of arrays or of another library, in an order that seed and epoch give, or its own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import jax
import numpy as np

from jdist.data.leaves import count_rows, to_numpy
from jdist.data.sources.elements import Elements
from jdist.data.sources.protocol import kind_of, refuse_a_row, steps_from
from jdist.errors import DatasetError
from jdist.support import checks
from jdist.support.tensorflow_names import without_tensorflow_keywords
from jdist.typing import PyTree

Shuffle = Literal["permutation", "index"]
_SAMPLED_BYTES = 4096
# Fewer rounds leave small orders uneven: with 6, the 120 orders of 5 rows differ in frequency by a third.
_ROUNDS = 10
_ENDLESS = 1 << 48  # rows; Grain gives a dataset without end a length of about 2**60


def check_step(step: int, num_steps: int | None, what: str = "source") -> None:
    """Raises a `DatasetError` for a step that the source does not have."""
    if step < 0 or (num_steps is not None and step >= num_steps):
        raise DatasetError(f"batch {step} does not exist: the {what} has {num_steps} steps, counted from 0")


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
                f'batch of {self.global_batch}. Use a global batch of at most {self.num_rows}, or partial="pad"'
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

    def _identity(self) -> Mapping[str, str]:
        """Tells these rows from others, in words without spaces by name."""
        raise NotImplementedError

    def _read(self, epoch: int, places: slice, part: slice | np.ndarray) -> PyTree:
        """Reads a part of the rows at some places of an epoch's order."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Identifies the rows and their order: sizes, seed, and hashes of the shapes and of a sample of the content."""
        parts = {
            "rows": self.num_rows,
            "global_batch": self.global_batch,
            "shuffle_seed": self.shuffle_seed,
            "short_batches": "dropped" if self.drop_short else "kept",
            **self._identity(),
        }
        return " ".join(f"{key}={value}" for key, value in parts.items())


@without_tensorflow_keywords
def from_arrays(
    arrays: PyTree,
    *,
    global_batch: int,
    shuffle_seed: int | None = None,
    shuffle: Shuffle = "permutation",
    epochs: int | None = 1,
) -> ArraySource:
    """Makes a source of batches from arrays in memory (or memory-mapped).

    Args:
        arrays: a pytree of arrays [rows, ...] that agree on `rows`. They are not copied: do not change them
            while the source is in use. Batches are copies.
        global_batch: rows of a full batch, over all replicas. The last batch of an epoch has fewer if the
            rows do not divide; batches never reach into the next epoch.
        shuffle_seed: a whole number, 0 or more, draws a new order each epoch; None keeps the rows in order.
            The order depends on the seed and the epoch alone, never on the number of devices.
        shuffle: how an order is drawn. "permutation": all at once when an epoch begins, 8 bytes a row. "index": each batch
            computes its own rows, so that no epoch waits and nothing is held, for hundreds of millions of rows; another
            order, so a position that was saved under the one is refused under the other.
        epochs: how often to go through the rows; None repeats without end.

    Returns:
        A random-access source, for `strategy.distribute_dataset`.

    Raises:
        DatasetError: the arrays have no rows, or an option is out of range.
        BatchError: a leaf is not an array, or the leaves disagree on the number of rows.

    Example:
        >>> import numpy as np
        >>> from jdist.data import from_arrays
        >>> [batch.tolist() for batch in from_arrays(np.arange(5), global_batch=2)]
        [[0, 1], [2, 3], [4]]
    """
    checks.choice("shuffle", shuffle, get_args(Shuffle), DatasetError)
    if shuffle == "index" and shuffle_seed is None:
        raise DatasetError('shuffle="index" needs a `shuffle_seed`: without one the rows keep their own order')
    return ArraySource(arrays=to_numpy(arrays), shuffle=shuffle, **rows_options(global_batch, shuffle_seed, epochs))


@dataclass(frozen=True, kw_only=True, eq=False)
class ArraySource(RowsByNumber):
    """Batches from arrays, each made from its number alone; see `from_arrays`, which builds one.

    Attributes:
        arrays: a pytree of numpy arrays [rows, ...].
        global_batch: rows of a full batch.
        shuffle_seed: seed of the order; None: the rows' own order.
        epochs: how often to go through the rows; None: without end.
        shuffle: how an order is drawn, see `from_arrays`.
        drop_short: leave out the short last batch of each epoch.
        shard: `(num_shards, index)` if the arrays are the rows of one shard, see `jdist.data.shard`; None: all rows.
    """

    is_fresh: ClassVar[bool] = True  # batches share no memory with the source

    arrays: PyTree = field(repr=False)
    shuffle: Shuffle = "permutation"
    shard: tuple[int, int] | None = None
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)  # of the newest epoch

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows of the arrays, which is rows of one epoch."""
        return count_rows(self.arrays)

    def _read(self, epoch: int, places: slice, part: slice | np.ndarray) -> PyTree:
        if self.shuffle_seed is None:
            return jax.tree.map(lambda leaf: np.array(leaf[places][part], order="C"), self.arrays)
        if self.shuffle == "index":
            rows = rows_at(np.arange(places.start, places.stop)[part], self.num_rows, self.shuffle_seed, epoch)
        else:
            rows = self._order(self.shuffle_seed, epoch)[places][part]
        return jax.tree.map(lambda leaf: _take(leaf, rows), self.arrays)

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        """Draws the order of an epoch, or finds it; threads that race only draw it twice."""
        order = self._orders.get(epoch)
        if order is None:
            order = permutation(self.num_rows, seed, epoch)
            self._orders.clear()
            self._orders[epoch] = order
        return order

    def _identity(self) -> dict[str, str]:
        # A sample, so that the price does not grow with the data: changes in the middle go unnoticed.
        leaves = jax.tree_util.tree_flatten_with_path(self.arrays)[0]
        shapes = [(jax.tree_util.keystr(path), leaf.shape[1:], str(leaf.dtype)) for path, leaf in leaves]
        content = hashlib.sha256()
        for _, leaf in leaves:
            count = max(1, _SAMPLED_BYTES // max(1, leaf[:1].nbytes))
            content.update(leaf[:count].tobytes()[:_SAMPLED_BYTES])
            content.update(leaf[-count:].tobytes()[-_SAMPLED_BYTES:])
        identity: dict[str, str] = {
            "leaves": hashlib.sha256(repr(shapes).encode()).hexdigest()[:12],
            "content": content.hexdigest()[:12],
        }
        if self.shuffle != "permutation":
            identity["shuffle"] = self.shuffle
        if self.shard is not None:
            num_shards, index = self.shard
            identity["shard"] = f"{index}/{num_shards}"
        return identity


def _take(leaf: np.ndarray, rows: np.ndarray) -> np.ndarray:
    # `np.take` is up to three times as fast, but copies the whole of an array that is not contiguous, as a shard's is not.
    return np.take(leaf, rows, axis=0) if leaf.flags.c_contiguous else leaf[rows]


@dataclass(frozen=True, kw_only=True, eq=False)
class _OfElements:
    """Rows that another library reads by number."""

    elements: Elements
    workers: int = 1

    @property
    def kind(self) -> str:
        """Its name in messages."""
        return self.elements.kind

    @property
    def is_fresh(self) -> bool:
        """Returns whether batches share no memory with anything else."""
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
        """Identifies the batches and their order."""
        parts = {"batches": len(self.elements), **self.elements.identity}
        return " ".join(f"{key}={value}" for key, value in parts.items())


@contextlib.contextmanager
def _noting(step: int, kind: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while making batch {step:,} (from 0) of a {kind}")
        raise


def permutation(count: int, *seed: int) -> np.ndarray:
    """Draws a random order; the same seeds draw the same one."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).permutation(count)


def rows_at(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Computes the rows at some places of an epoch's random order of `count` rows, as int64."""
    # A Feistel network permutes a grid of `height * width` cells; the first `count` are
    # the rows. It splits a number into two halves, and adds to each in turn a hash of the other. A
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
