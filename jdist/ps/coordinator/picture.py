"""A report of a state on its parameter servers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jdist.core.state_report import WHOLE, Holding, Place, StateReport, in_words
from jdist.ps.program.layout import Layout
from jdist.ps.protocol.wire import Spec
from jdist.support.leaves import Leaf, leaves_of
from jdist.support.units import counted, size

_PIECES, _COPIES, _HERE = "in pieces, each on one server", "whole on every server", "whole in this process"


def report_servers(
    workers: Sequence[str],
    ps: Sequence[str],
    *,
    shapes: object = None,
    here: Sequence[int] = (),
    layout: Layout | None = None,
    backups: bool = False,
) -> StateReport:
    """Shows the processes of a parameter server, and the parts of a state that each has."""
    # `here`: numbers of the leaves that this process keeps. `backups`: each server keeps a backup
    # of the shard of the server before it.
    leaves = leaves_of(shapes)
    ways: list[str] = []
    chief: list[Holding] = []
    held: list[list[Holding]] = [[] for _ in ps]
    pulls, summary = "each pulls what a step reads", "give it a state to see what each server holds"
    if shapes is not None:
        where = "here until the first step that is given it, which cuts it up"
        if layout is not None:
            leaves, ways = _on_servers(layout, leaves, held, backups=backups)
            where = "on the servers"
            most = max(sum(map(_num_bytes_of, layout.inputs(i))) for i in range(len(layout.steps)))
            pulls = f"each pulls {size(most)} for a step"
        summary = f"a state of {counted(len(leaves), 'array')}, {size(sum(x.num_bytes for x in leaves))}, {where}"
    leaves = [replace(leaf, kept=_HERE) if i in here else leaf for i, leaf in enumerate(leaves)]
    if here:
        chief.append(Holding(len(ways), WHOLE, "whole", sum(leaves[i].num_bytes for i in here)))
        ways.append(in_words(_HERE, [leaves[i] for i in here]))
    servers = [Place(f"ps {i}", at, tuple(each)) for i, (at, each) in enumerate(zip(ps, held, strict=True))]
    places = (
        Place("this process, the chief", places=(Place("coordinator", "the program itself", tuple(chief)),)),
        Place(f"workers: {pulls}", places=tuple(Place(f"worker {i}", at) for i, at in enumerate(workers))),
        Place("parameter servers", places=tuple(servers)),
    )
    title = f"parameter_server: {counted(len(workers), 'worker')}, {counted(len(ps), 'server')}"
    return StateReport(title, summary, tuple(leaves), tuple(ways), places)


def _on_servers(
    layout: Layout, leaves: Sequence[Leaf], held: list[list[Holding]], *, backups: bool
) -> tuple[list[Leaf], list[str]]:
    """Sorts what servers keep: leaves in pieces, each on one server, leaves of which each has a copy, and backups."""
    everywhere = {*layout.groups.everywhere, *layout.groups.constant}
    pieces, copies, kept = [list[int]() for _ in held], [set[int]() for _ in held], dict[int, str]()
    for shard in layout.shards:
        for rows, spec in zip(shard.rows, shard.kept, strict=True):
            kept[rows.of] = _COPIES if rows.of in everywhere else _PIECES
            if rows.of in everywhere:
                copies[shard.server].add(rows.of)
            else:
                pieces[shard.server].append(_num_bytes_of(spec))
    leaves = [replace(leaf, kept=kept.get(i, leaf.kept)) for i, leaf in enumerate(leaves)]
    ends = [0, *itertools.accumulate(map(sum, pieces))]
    spans = [((a / max(1, ends[-1]), b / max(1, ends[-1])),) for a, b in itertools.pairwise(ends)]
    ways = [in_words(how, [x for x in leaves if x.kept == how]) for how in dict.fromkeys((_PIECES, *kept.values()))]
    for holdings, own, span, whole in zip(held, pieces, spans, copies, strict=True):
        holdings += [Holding(0, span, counted(len(own), "piece"), sum(own))] if own else []
        holdings += [Holding(1, WHOLE, "whole", sum(leaves[i].num_bytes for i in whole))] if whole else []
    if backups:
        sizes = [sum(map(_num_bytes_of, shard.kept)) for shard in layout.shards]
        for shard, num_bytes in zip(layout.shards, sizes, strict=True):
            backup = Holding(len(ways), spans[shard.server], f"of ps {shard.server}", num_bytes)
            held[(shard.server + 1) % len(held)].append(backup)
        ways.append(f"a backup of another server's shard: {counted(len(sizes), 'shard')}, {size(sum(sizes))}")
    return leaves, ways


def _num_bytes_of(spec: Any) -> int:
    dtype = spec.numpy if isinstance(spec, Spec) else np.dtype(spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize
