"""Batches from arrays in memory, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import jax
import numpy as np

from jdist.data.leaves import count_rows, to_numpy
from jdist.data.sources.rows import RowsByNumber, rows_at, rows_options
from jdist.errors import DatasetError
from jdist.support import checks
from jdist.support.tensorflow_names import without_tensorflow_keywords
from jdist.typing import PyTree

Shuffle = Literal["permutation", "index"]
_SAMPLED_BYTES = 4096


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
        DatasetError: there are no rows, or an option is out of range.
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
            bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
            order = np.random.Generator(bits).permutation(self.num_rows)
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
