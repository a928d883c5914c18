"""What a worker is told of a step, once: the function, where its inputs come from, where its results go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jdist.ps.keeper import Keeping
from jdist.ps.layout import Layout, Rows, ShardLayout
from jdist.ps.shard import Rules
from jdist.ps.wire import Spec

Described = tuple[tuple[int, ...], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Some rows of a numbered array; see `layout.Rows`."""

    of: int
    start: int
    stop: int | None

    def cut(self, array: Any) -> Any:
        """These rows of the array."""
        return array if self.stop is None else array[self.start : self.stop]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardOfJob:
    """A shard, as a worker needs it.

    Attributes:
        address: of its server.
        pulled: for each array that is pulled when the version has changed, which rows of which input it is.
        pulled_once: the same of what is pulled besides at first.
        pushes: which rows of which pushed array go there; the scalars come behind.
    """

    address: str
    pulled: tuple[Place, ...]
    pulled_once: tuple[Place, ...]
    pushes: tuple[Place, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A step, as a worker needs it. The function takes inputs, then arguments; it returns pushed arrays, scalars, whether all
    gradients are finite, and outputs.

    Attributes:
        inputs: the leaves that it reads, whole.
        arguments: batch and other arguments of a closure.
        outputs: what a closure returns.
        num_pushed: how many arrays it pushes.
        num_scalars: how many scalars.
        shards: where they go.
        non_finite: what happens to gradients that are not finite, as in `shard.Rules`.
    """

    inputs: tuple[Described, ...]
    arguments: tuple[Described, ...]
    outputs: tuple[Described, ...]
    num_pushed: int
    num_scalars: int
    shards: tuple[ShardOfJob, ...]
    non_finite: str


KINDS: dict[str, type] = {kind.__name__: kind for kind in (Job, ShardOfJob, Place, Keeping)}


def described(arrays: Sequence[Any]) -> tuple[Described, ...]:
    """Shapes and dtypes of arrays, or of structs that have them."""
    return tuple((tuple(x.shape), np.dtype(x.dtype).name) for x in arrays)


def keeping_of(layout: Layout, shard: ShardLayout, rules: Rules) -> Keeping:
    """What a server is told of its shard."""
    return Keeping(
        kept=_described(layout.kept_specs(shard)),
        changing=shard.changing,
        pushes=_described(layout.push_specs(shard)),
        pulled=shard.pulled,
        pulled_once=shard.pulled_once,
        max_staleness=rules.max_staleness,
        on_stale=rules.on_stale,
        non_finite=rules.non_finite,
    )


def job_of(
    layout: Layout, addresses: Sequence[str], arguments: Sequence[Any], outputs: Sequence[Any], rules: Rules
) -> Job:
    """What a worker is told of a step.

    Args:
        layout: the state over its servers.
        addresses: of all servers, by number.
        arguments: arrays or structs of a closure's arguments.
        outputs: of what it returns.
        rules: about late and non-finite gradients.
    """
    read, pushed = ({i: n for n, i in enumerate(numbers)} for numbers in (layout.read, layout.pushed))

    def places(rows: Sequence[Rows], numbers: dict[int, int]) -> tuple[Place, ...]:
        return tuple(Place(of=numbers[r.of], start=r.start, stop=r.stop) for r in rows)

    return Job(
        inputs=described([layout.update.shapes[i] for i in layout.read]),
        arguments=described(arguments),
        outputs=described(outputs),
        num_pushed=len(layout.pushed),
        num_scalars=len(layout.update.scalar_shapes),
        shards=tuple(
            ShardOfJob(
                address=addresses[shard.ps],
                pulled=places([shard.kept[k] for k in shard.pulled], read),
                pulled_once=places([shard.kept[k] for k in shard.pulled_once], read),
                pushes=places(shard.pushes, pushed),
            )
            for shard in layout.shards
        ),
        non_finite=rules.non_finite,
    )


def _described(specs: Sequence[Spec]) -> tuple[Described, ...]:
    return tuple((s.shape, s.dtype) for s in specs)
