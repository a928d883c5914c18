"""Global batches joined of per-replica ones: each replica's is the next element of its input pipeline."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jdist.data.adapters.recognize import adapted
from jdist.data.batch_axis import BatchAxis, Take, is_first, taker
from jdist.data.leaves import check_rows, count_rows, join
from jdist.data.options import InputContext
from jdist.data.sources.files import FileSource
from jdist.data.sources.protocol import RandomAccessSource, check_source, steps_from
from jdist.data.sources.rows import RowsByNumber, check_step
from jdist.data.sources.sequential import Batches, SequentialSource
from jdist.errors import DatasetError
from jdist.typing import PyTree


def from_function(
    fn: Callable[[InputContext], Any], contexts: Sequence[InputContext], *, num_replicas: int, batch_axis: BatchAxis = 0
) -> RandomAccessReplicaBatches | ReplicaBatches:
    """Calls a dataset function once a pipeline, and joins per-replica batches to global ones, with the rows first."""
    # `contexts` has one for each pipeline that feeds replicas of this process; their number divides
    # `num_replicas`, the replicas that they feed. Pipeline 0 feeds the first replicas, and so on.
    # The result has random access if all pipelines have. Source:
    # `tf.distribute.Strategy.distribute_datasets_from_function`.
    if not callable(fn):
        raise DatasetError(
            f"a {type(fn).__name__} is not a dataset function; pass a function from an `jdist.InputContext` to a "
            "source of per-replica batches, or give the source itself to `strategy.distribute_dataset`"
        )
    pipelines = []
    for context in contexts:
        source = adapted(fn(context))
        try:
            check_source(source)
            check_turns(source, batch_axis)
        except DatasetError as error:
            raise DatasetError(f"the dataset function's result for {context}: {error}") from error
        pipelines.append(source)
    turns, take = num_replicas // len(contexts), taker(batch_axis)
    random_access = [source for source in pipelines if isinstance(source, RandomAccessSource)]
    if len(random_access) == len(pipelines):
        return RandomAccessReplicaBatches(random_access, turns, take)
    return ReplicaBatches(pipelines, turns, take)


def check_turns(source: Any, batch_axis: BatchAxis) -> None:
    """Refuses another axis of rows for a source that cuts rows itself."""
    if not is_first(batch_axis) and isinstance(source, RowsByNumber | FileSource):
        raise DatasetError(
            f"`batch_axis` is {batch_axis!r}, but {source!r} takes rows from the first axis of its arrays. Leave "
            "`batch_axis` out and swap the axes in the step, or pass an iterable of batches"
        )


class RandomAccessReplicaBatches:
    """Global batches of random-access pipelines; each feeds `turns` replicas. See `RandomAccessSource`."""

    is_fresh = True

    def __init__(self, pipelines: Sequence[RandomAccessSource], turns: int, take: Take):
        self._pipelines = tuple(pipelines)
        self._turns = turns
        self._take = take

    @property
    def num_steps(self) -> int | None:
        """Batches until every pipeline has ended; None: one never does."""
        steps = [source.num_steps for source in self._pipelines]
        return None if None in steps else max(-(-count // self._turns) for count in steps if count is not None)

    @property
    def global_batch(self) -> int:
        return sum(self._turns * source.global_batch for source in self._pipelines)

    @property
    def fingerprint(self) -> str:
        parts = [f"replicas_each={self._turns}"]
        for number, source in enumerate(self._pipelines):
            parts += [f"pipeline_{number}.{part}" for part in source.fingerprint.split()]
        return " ".join(parts)

    def batch_at(self, step: int) -> PyTree:
        """Makes the global batch number `step`, from 0."""
        check_step(step, self.num_steps)
        elements = [
            _copied(self._take(source.batch_at(number)))
            for source in self._pipelines
            for number in range(step * self._turns, (step + 1) * self._turns)
            if source.num_steps is None or number < source.num_steps
        ]
        return join(elements)


class ReplicaBatches(SequentialSource):
    """Global batches of pipelines that only go forward; each feeds `turns` replicas."""

    kind = "ReplicaBatches"
    advice = (
        "a pipeline of the dataset function only goes forward, so resuming would mean reading everything again up to there. "
        "Let it return `jdist.data.from_arrays(...)`, or a source object with `num_steps`, `global_batch`, `fingerprint` and "
        "`batch_at(step)`"
    )
    is_fresh = True

    def __init__(self, pipelines: Sequence[Iterable[PyTree] | RandomAccessSource], turns: int, take: Take):
        self._pipelines = tuple(pipelines)
        self._turns = turns
        self._take = take
        self._rows: int | None = None
        self.is_stream = any(isinstance(source, Iterator) for source in pipelines)

    @property
    def full_batch(self) -> int | None:
        """Rows of a full batch; None before the first element with rows was read."""
        return None if self._rows is None else self._rows * self._turns * len(self._pipelines)

    def open(self, epoch: int, state: Any) -> Batches:
        return self._stream if self.is_stream else self._joined()

    @functools.cached_property
    def _stream(self) -> Batches:
        return self._joined()

    def _joined(self) -> Batches:
        iterators = [
            map(source.batch_at, steps_from(source, 0)) if isinstance(source, RandomAccessSource) else iter(source)
            for source in self._pipelines
        ]
        while elements := [
            self._check(element) for iterator in iterators for element in itertools.islice(iterator, self._turns)
        ]:
            yield join(elements), None

    def _check(self, element: PyTree) -> PyTree:
        element = _copied(self._take(element))
        rows = count_rows(element)
        self._rows = self._rows or rows or None
        if self._rows is not None:
            check_rows(rows, self._rows, "the first per-replica batch")
        return element


def _copied(element: PyTree) -> PyTree:
    # The source may refill the same memory with the next replica's batch.
    return jax.tree.map(lambda leaf: np.array(leaf, order="C"), element)
