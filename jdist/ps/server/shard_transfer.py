"""A shard's whole state as it travels to its backup: that of `protocol.shard`'s machine, the arrays, the programs.

The names of the fields travel too: whoever changes them raises `PROTOCOL` in support/versions.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jdist.errors import WireError
from jdist.ps.program.shard_plan import ShardPlan, program_spec, result_spec
from jdist.ps.protocol.shard import Applied, Shard, Staged
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
class PackedShard:
    """The header with which a shard's arrays travel."""

    shard: Shard
    plan: ShardPlan | None
    # of each closure with arrays: its number, the view of its gradients (-1: it has none), and the bytes of its result
    held: tuple[tuple[int, int, int], ...]
    programs: tuple[int, ...]  # size of each program in bytes


def pack_shard(state: ShardState) -> tuple[Header, list[Any]]:
    """Returns the header and the arrays by which a state travels."""
    shard, held, arrays = state.shard, list[tuple[int, int, int]](), [*state.kept, *state.packed]
    assert not shard.waiting  # they are answered here, and would not be there
    for closure, entry in (*shard.staged.items(), *shard.applied.items()):
        gradients = entry.gradients if isinstance(entry, Staged) else None
        view, pushes = (-1, ()) if gradients is None else state.held[gradients]
        result = b"" if entry.result is None else state.held[entry.result]
        held.append((closure, view, len(result)))
        arrays += [*pushes, *([np.frombuffer(result, np.uint8)] if result else ())]
    sizes = tuple(len(p) for p in state.packed)
    packed = PackedShard(shard=shard, plan=state.plan, held=tuple(held), programs=sizes)
    return {"whole": to_plain(packed)}, arrays


def expected(header: Header) -> list[Spec]:
    """Returns the specs of the arrays that travel with a header."""
    packed = _read(header)
    specs = [*(() if packed.plan is None else packed.plan.kept), *map(program_spec, packed.programs)]
    for _, view, size in packed.held:
        specs += [*_pushes(packed.plan, view), *([result_spec(size)] if size else ())]
    return specs


def unpack_shard(header: Header, arrays: Sequence[np.ndarray]) -> ShardState:
    """Returns the state that was transferred, with names of its own for its arrays."""
    packed, rest, names = _read(header), iter(arrays), itertools.count(1)
    kept = [next(rest) for _ in (() if packed.plan is None else packed.plan.kept)]
    programs = [next(rest) for _ in packed.programs]
    entries: dict[int, Staged | Applied] = {**packed.shard.staged, **packed.shard.applied}
    held: dict[int, Any] = {}
    for closure, view, size in packed.held:
        refs: dict[str, int] = {}
        if view != -1:
            refs["gradients"] = next(names)
            held[refs["gradients"]] = view, [next(rest) for _ in _pushes(packed.plan, view)]
        if size:
            refs["result"] = next(names)
            held[refs["result"]] = next(rest).tobytes()
        entries[closure] = dataclasses.replace(entries[closure], **refs)
    staged = {c: x for c, x in entries.items() if isinstance(x, Staged)}
    applied = {c: x for c, x in entries.items() if isinstance(x, Applied)}
    shard = dataclasses.replace(packed.shard, staged=staged, applied=applied)
    return ShardState(shard=shard, plan=packed.plan, kept=kept, packed=programs, held=held)


def _read(header: Header) -> PackedShard:
    packed: PackedShard = from_plain(PackedShard, header.get("whole"))
    shard, views = packed.shard, 0 if packed.plan is None else len(packed.plan.views)
    if len(packed.programs) != views:
        raise WireError(f"`programs` must have {views} sizes, one for each view of the plan")
    for closure, view, _ in packed.held:
        if not (closure in shard.staged and -1 <= view < views) and not (closure in shard.applied and view == -1):
            raise WireError("`held` names a closure or a view that is not there")
    if shard.waiting:
        raise WireError("nothing may wait at a shard that travels")
    return packed


def _pushes(plan: ShardPlan | None, view: int) -> tuple[Spec, ...]:
    return () if plan is None or view == -1 else plan.views[view].pushes
