"""A shard's whole state as it travels to its backup: what is staged and applied, the arrays, the programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jdist.errors import WireError
from jdist.ps.program.shard_plan import MOST_PROGRAM_BYTES, SHARD_PLAN, ShardPlan
from jdist.ps.protocol.shard import Applied, Counts, Rules, Shard, Staged
from jdist.ps.protocol.wire import Spec, from_plain, to_plain
from jdist.ps.transport.interface import Header


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A closure that is staged, or applied and not settled.

    Attributes:
        closure: its number.
        is_applied: which of the two.
        worker, epoch, attempt, base, weight: as in `shard.Staged`.
        pushed: the name of its arrays among what travels; None if there are none.
        returned: the same of its result.
    """

    closure: int
    is_applied: bool
    worker: int | None
    epoch: int = 0
    attempt: int = 0
    base: int = 0
    weight: float = 1.0
    pushed: int | None = None
    returned: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """A shard, without its arrays; fields as in `shard.Shard`.

    Attributes:
        entries: what is staged or applied.
        held: for each name its view, or -1 for a result, and its bytes if it is one.
        programs: bytes of each program.
    """

    generation: int
    version: int
    settled: int
    frozen: bool
    thawed: int
    fences: tuple[tuple[int, int], ...]
    entries: tuple[Entry, ...]
    counts: Counts
    held: tuple[tuple[int, int, int], ...]
    programs: tuple[int, ...]


WHOLE: dict[str, type] = {kind.__name__: kind for kind in (Whole, Entry, Counts)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """All that a copy of a shard has; of one that was never restored, `plan` is None.

    Attributes:
        shard: the machine; nothing waits at it.
        plan: what it keeps.
        kept: its arrays.
        packed: its programs.
        held: what the machine's names stand for.
    """

    shard: Shard
    plan: ShardPlan | None = None
    kept: Sequence[Any] = ()
    packed: Sequence[np.ndarray] = ()
    held: Mapping[int, Any] = dataclasses.field(default_factory=dict)


def pack_shard(state: State) -> tuple[Header, list[Any]]:
    """The header and the arrays by which a state travels."""
    shard = state.shard
    assert not shard.waiting  # they are answered here, and would not be there
    staged = [
        Entry(
            closure=c,
            is_applied=False,
            worker=x.worker,
            epoch=x.epoch,
            attempt=x.attempt,
            base=x.base,
            weight=x.weight,
            pushed=x.gradients,
            returned=x.result,
        )
        for c, x in shard.staged.items()
    ]
    applied = [Entry(closure=c, is_applied=True, worker=x.worker, returned=x.result) for c, x in shard.applied.items()]
    pushes = {e.pushed: state.held[e.pushed] for e in staged if e.pushed is not None}
    results = {e.returned: state.held[e.returned] for e in (*staged, *applied) if e.returned is not None}
    whole = Whole(
        generation=shard.generation,
        version=shard.version,
        settled=shard.settled,
        frozen=shard.frozen,
        thawed=shard.thawed,
        fences=tuple(shard.fences.items()),
        entries=(*staged, *applied),
        counts=shard.counts,
        held=(*((n, view, 0) for n, (view, _) in pushes.items()), *((n, -1, len(b)) for n, b in results.items())),
        programs=tuple(len(p) for p in state.packed),
    )
    arrays = [*state.kept, *state.packed, *(x for _, given in pushes.values() for x in given)]
    arrays += [np.frombuffer(b, np.uint8) for b in results.values()]
    plan = None if state.plan is None else to_plain(state.plan)
    return {"whole": to_plain(whole), "plan": plan}, arrays


def expected(header: Header) -> list[Spec]:
    """The arrays that travel with it.

    Raises:
        WireError: it is no such header.
    """
    whole, plan = _read(header)
    found = [] if plan is None else list(plan.kept)
    found += [Spec((_size(size),), "uint8") for size in whole.programs]
    for _, view, size in whole.held:
        if plan is None or not -1 <= view < len(plan.views):
            raise WireError("arrays of no step")
        found += [Spec((_size(size),), "uint8")] if view == -1 else plan.views[view].pushes
    return found


def unpack_shard(header: Header, arrays: Sequence[np.ndarray]) -> State:
    """The state that has travelled.

    Raises:
        WireError: it is no such header.
    """
    whole, plan = _read(header)
    rest = iter(arrays)
    kept = [next(rest) for _ in (() if plan is None else plan.kept)]
    packed = [next(rest) for _ in whole.programs]
    held: dict[int, Any] = {}
    for name, view, _ in whole.held:
        assert plan is not None  # what is expected was looked up in it
        held[name] = next(rest).tobytes() if view == -1 else (view, [next(rest) for _ in plan.views[view].pushes])
    if any(name not in held for e in whole.entries for name in (e.pushed, e.returned) if name is not None):
        raise WireError("a closure whose arrays are missing")
    staged = {
        e.closure: Staged(
            worker=e.worker,
            epoch=e.epoch,
            attempt=e.attempt,
            base=e.base,
            gradients=e.pushed,
            weight=e.weight,
            result=e.returned,
        )
        for e in whole.entries
        if not e.is_applied
    }
    shard = Shard(
        rules=Rules() if plan is None else plan.rules,
        generation=whole.generation,
        version=whole.version,
        fences=dict(whole.fences),
        staged=staged,
        applied={e.closure: Applied(worker=e.worker, result=e.returned) for e in whole.entries if e.is_applied},
        settled=whole.settled,
        frozen=whole.frozen,
        thawed=whole.thawed,
        counts=whole.counts,
    )
    return State(shard=shard, plan=plan, kept=kept, packed=packed, held=held)


def _read(header: Header) -> tuple[Whole, ShardPlan | None]:
    whole = from_plain(WHOLE, header.get("whole"))
    if not isinstance(whole, Whole):
        raise WireError("no shard")
    plain = header.get("plan")
    plan = None if plain is None else from_plain(SHARD_PLAN, plain)
    if plan is not None and (not isinstance(plan, ShardPlan) or len(whole.programs) != len(plan.views)):
        raise WireError("not a program for each view")
    return whole, plan


def _size(size: int) -> int:
    if not 0 <= size < MOST_PROGRAM_BYTES:
        raise WireError("bytes of no size")
    return size
