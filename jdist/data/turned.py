"""Sources whose batches have their rows on another axis than the first, read with their rows first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jdist.data.arrays import ArraySource
from jdist.data.batch_axis import BatchAxis, axes_of_leaves, is_first, rows_first, rows_in_place
from jdist.data.files import FileSource
from jdist.data.leaves import to_numpy
from jdist.data.source import RandomAccessSource, check_source
from jdist.errors import DatasetError

PyTree = Any


@dataclass(frozen=True)
class TurnedSource:
    """A random-access source, turned; see there for the attributes."""

    source: RandomAccessSource
    turn: Callable[[PyTree], PyTree]

    @property
    def num_steps(self) -> int | None:
        return self.source.num_steps

    @property
    def global_batch(self) -> int:
        return self.source.global_batch

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    def batch_at(self, step: int) -> PyTree:
        """See `RandomAccessSource`."""
        return self.turn(self.source.batch_at(step))


@dataclass(frozen=True)
class TurnedBatches:
    """An iterable of batches, turned."""

    source: Iterable[PyTree]
    turn: Callable[[PyTree], PyTree]

    def __iter__(self) -> Iterator[PyTree]:
        return map(self.turn, self.source)


def turn_back(batch: PyTree, batch_axis: BatchAxis, *, lead: int) -> tuple[PyTree, PyTree]:
    """A batch, read from a turned source, with its rows where the step has them.

    Args:
        batch: leaves [rows, ...], or [steps, rows, ...] with `lead=1`; arrays or structs.
        batch_axis: the axis of the rows, see `turned`.
        lead: number of axes before those of a batch.

    Returns:
        The batch, and a tree of the axes that its rows are on, `lead` included.
    """
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype), batch)
    axes = axes_of_leaves((one,), batch_axis)
    leaves, treedef = jax.tree.flatten(batch)
    places = [lead + axis for axis in axes or (0,) * len(leaves)]
    return rows_in_place(batch, axes, lead=lead), jax.tree.unflatten(treedef, places)


def turned(source: Any, batch_axis: BatchAxis) -> Any:
    """A source with the rows of its batches first.

    Args:
        source: what a user passed as a dataset.
        batch_axis: the axis that its batches have their rows on, see `strategy.distribute_dataset`.

    Raises:
        DatasetError: it cuts its rows from the first axis itself.
    """
    if is_first(batch_axis):
        return source
    check_source(source)
    if isinstance(source, ArraySource | FileSource):
        raise DatasetError(
            f"`batch_axis` is {batch_axis!r}, but {source!r} takes rows from the first axis of its arrays. Leave `batch_axis` "
            "out and swap the axes in the step, or pass an iterable of batches"
        )

    def turn(batch: PyTree) -> PyTree:
        batch = to_numpy(batch)
        return rows_first(batch, axes_of_leaves((batch,), batch_axis))

    if isinstance(source, RandomAccessSource):
        return TurnedSource(source, turn)
    return map(turn, source) if isinstance(source, Iterator) else TurnedBatches(source, turn)
