"""A shard's whole state as it travels to its backup: the machine's state, the arrays, the programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jdist.errors import WireError
from jdist.ps.program.shard_plan import MOST_PROGRAM_BYTES, SHARD_PLAN, ShardPlan
from jdist.ps.protocol.shard import Applied, Counts, Rules, Shard, Staged
from jdist.ps.protocol.wire import Spec, from_plain, to_plain
from jdist.ps.transport.interface import Header


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardState:
    """A shard's full state; `plan` is None if it was never restored."""

    shard: Shard  # the machine's state; nothing waits there
    plan: ShardPlan | None = None
    kept: Sequence[Any] = ()
    packed: Sequence[np.ndarray] = ()
    # the values of the machine's names
    held: Mapping[int, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedClosure:
    """A closure that is staged, or applied and not settled; other fields as in `shard.Staged`."""

    WIRE_NAME: ClassVar = "Entry"

    closure: int
    is_applied: bool  # else staged
    worker: int | None
    epoch: int = 0
    attempt: int = 0
    base: int = 0
    weight: float = 1.0
    pushed: int | None = None  # names its arrays in the transfer; None: it has none
    returned: int | None = None  # names its result, in the same way


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedShard:
    """The header with which a shard's arrays travel; other fields as in `shard.Shard`."""

    WIRE_NAME: ClassVar = "Whole"

    generation: int
    version: int
    settled: int
    frozen: int
    thawed: int
    fences: tuple[tuple[int, int], ...]
    entries: tuple[PackedClosure, ...]
    counts: Counts
    # for each name its view, or -1 for a result, and a result's bytes
    held: tuple[tuple[int, int, int], ...]
    programs: tuple[int, ...]  # size of each program in bytes


def pack_shard(state: ShardState) -> tuple[Header, list[Any]]:
    """Returns the header and the arrays by which a state travels."""
    shard = state.shard
    assert not shard.waiting  # they are answered here, and would not be there
    staged = [
        PackedClosure(
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
    applied = [
        PackedClosure(closure=c, is_applied=True, worker=x.worker, returned=x.result) for c, x in shard.applied.items()
    ]
    pushes = {e.pushed: state.held[e.pushed] for e in staged if e.pushed is not None}
    results = {e.returned: state.held[e.returned] for e in (*staged, *applied) if e.returned is not None}
    packed = PackedShard(
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
    arrays = [*state.kept, *state.packed, *(x for _, gradients in pushes.values() for x in gradients)]
    arrays += [np.frombuffer(b, np.uint8) for b in results.values()]
    plan = None if state.plan is None else to_plain(state.plan)
    return {"whole": to_plain(packed), "plan": plan}, arrays


def expected(header: Header) -> list[Spec]:
    """Returns the specs of the arrays that travel with a header."""
    packed, plan = _read(header)
    specs = [] if plan is None else list(plan.kept)
    specs += [_bytes(size) for size in packed.programs]
    for _, view, size in packed.held:
        if plan is None or not -1 <= view < len(plan.views):
            raise WireError("`held` names a view that the plan lacks")
        specs += [_bytes(size)] if view == -1 else plan.views[view].pushes
    return specs


def unpack_shard(header: Header, arrays: Sequence[np.ndarray]) -> ShardState:
    """Returns the state that was transferred."""
    packed, plan = _read(header)
    rest = iter(arrays)
    kept = [next(rest) for _ in (() if plan is None else plan.kept)]
    programs = [next(rest) for _ in packed.programs]
    held: dict[int, Any] = {}
    for name, view, _ in packed.held:
        assert plan is not None  # `expected` has refused it
        held[name] = next(rest).tobytes() if view == -1 else (view, [next(rest) for _ in plan.views[view].pushes])
    if any(name not in held for e in packed.entries for name in (e.pushed, e.returned) if name is not None):
        raise WireError("a closure's arrays are missing in `held`")
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
        for e in packed.entries
        if not e.is_applied
    }
    shard = Shard(
        rules=Rules() if plan is None else plan.rules,
        generation=packed.generation,
        version=packed.version,
        fences=dict(packed.fences),
        staged=staged,
        applied={e.closure: Applied(worker=e.worker, result=e.returned) for e in packed.entries if e.is_applied},
        settled=packed.settled,
        frozen=packed.frozen,
        thawed=packed.thawed,
        counts=packed.counts,
    )
    return ShardState(shard=shard, plan=plan, kept=kept, packed=programs, held=held)


def _read(header: Header) -> tuple[PackedShard, ShardPlan | None]:
    packed = from_plain({PackedShard.WIRE_NAME: PackedShard}, header.get("whole"))
    plain = header.get("plan")
    plan = None if plain is None else from_plain(SHARD_PLAN, plain)
    if plan is not None and len(packed.programs) != len(plan.views):
        raise WireError(f"`programs` must have {len(plan.views)} sizes, one for each view of the plan")
    return packed, plan


def _bytes(size: int) -> Spec:
    if not 0 <= size < MOST_PROGRAM_BYTES:
        raise WireError(f"a size in bytes is {size}; it must be from 0 to {MOST_PROGRAM_BYTES - 1:,}")
    return Spec((size,), "uint8")
