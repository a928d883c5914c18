"""Global batches joined of per-replica ones: each replica's is the next element of its input pipeline."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jdist.data.leaves import count_rows, join, to_numpy
from jdist.data.options import InputContext
from jdist.data.sources.protocol import RandomAccessSource, check_source, check_step, steps_from
from jdist.errors import BatchError, DatasetError

PyTree = Any


def from_function(
    fn: Callable[[InputContext], Any], contexts: Sequence[InputContext], *, num_replicas: int
) -> RandomAccessReplicaBatches | ReplicaBatches:
    """Calls a dataset function once a pipeline, and joins per-replica batches to global ones."""
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
        source = fn(context)
        try:
            check_source(source)
        except DatasetError as error:
            raise DatasetError(f"the dataset function's result for {context}: {error}") from error
        pipelines.append(source)
    turns = num_replicas // len(contexts)
    random_access = [source for source in pipelines if isinstance(source, RandomAccessSource)]
    if len(random_access) == len(pipelines):
        return RandomAccessReplicaBatches(random_access, turns)
    once = any(isinstance(source, Iterator) for source in pipelines)
    return (ReplicaBatchesOnce if once else ReplicaBatches)(pipelines, turns)


class RandomAccessReplicaBatches:
    """Global batches of random-access pipelines, each of which feeds `turns` replicas; see `RandomAccessSource`."""

    def __init__(self, pipelines: Sequence[RandomAccessSource], turns: int):
        self._pipelines = tuple(pipelines)
        self._turns = turns

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
            _copied(source.batch_at(number))
            for source in self._pipelines
            for number in range(step * self._turns, (step + 1) * self._turns)
            if source.num_steps is None or number < source.num_steps
        ]
        return join(elements)


class ReplicaBatches(Iterable[PyTree]):
    """Global batches of pipelines that only go forward, each of which feeds `turns` replicas."""

    def __init__(self, pipelines: Sequence[Iterable[PyTree] | RandomAccessSource], turns: int):
        self._pipelines = tuple(pipelines)
        self._turns = turns
        self._rows: int | None = None

    @property
    def global_batch(self) -> int | None:
        """Rows of a full batch; None before the first element with rows was read."""
        return None if self._rows is None else self._rows * self._turns * len(self._pipelines)

    def __iter__(self) -> Iterator[PyTree]:
        iterators = [
            map(source.batch_at, steps_from(source, 0)) if isinstance(source, RandomAccessSource) else iter(source)
            for source in self._pipelines
        ]
        while True:
            elements = [
                self._check(element) for iterator in iterators for element in itertools.islice(iterator, self._turns)
            ]
            if not elements:
                return
            yield join(elements)

    def _check(self, element: PyTree) -> PyTree:
        element = _copied(element)
        rows = count_rows(element)
        self._rows = self._rows or rows or None
        if self._rows is not None and rows > self._rows:
            raise BatchError(
                f"a per-replica batch has {rows} rows, but the first had {self._rows}; a larger one would compile the "
                "step again. Let the source give its largest batch first, or split this one"
            )
        return element


class ReplicaBatchesOnce(ReplicaBatches, Iterator[PyTree]):
    """`ReplicaBatches` of which a pipeline is an iterator, which cannot start again."""

    @functools.cached_property
    def _batches(self) -> Iterator[PyTree]:
        return super().__iter__()

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        return next(self._batches)


def _copied(element: PyTree) -> PyTree:
    # The source may refill the same memory with the next replica's batch.
    return jax.tree.map(lambda leaf: np.array(leaf, order="C"), to_numpy(element))
