"""A picture of a state on its parameter servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist.core.state_picture import Division, Group, Holding, Place, StatePicture
from jdist.core.state_report import itemsize_of
from jdist.ps.program.layout import Layout
from jdist.ps.protocol.wire import Spec
from jdist.support.units import counted, size

_WHOLE = ((0.0, 1.0),)


def draw_servers(
    workers: Sequence[str],
    ps: Sequence[str],
    *,
    shapes: object = None,
    here: Sequence[int] = (),
    layout: Layout | None = None,
    backups: bool = False,
) -> StatePicture:
    """Draws the processes of a parameter server, and the parts of a state that each has."""
    # `here`: numbers of the leaves that this process keeps. `backups`: each server keeps a backup
    # of the shard of the server before it.
    title = f"parameter_server: {counted(len(workers), 'worker')}, {counted(len(ps), 'server')}"
    paths = [
        (jax.tree_util.keystr(path).removeprefix(".") or "itself", x) for path, x in jax.tree.leaves_with_path(shapes)
    ]
    leaves = [(path, math.prod(x.shape) * itemsize_of(x.dtype)) for path, x in paths]
    divisions: list[Division] = []
    chief: tuple[Holding, ...] = ()
    held: list[tuple[Holding, ...]] = [()] * len(ps)
    pulls = "each pulls what a step reads"
    if layout is not None:
        divisions, held = _on_servers(layout, leaves, len(ps), backups)
        most = max(sum(map(_num_bytes_of, layout.inputs(i))) for i in range(len(layout.steps)))
        pulls = f"each pulls {size(most)} for a step"
    if here:
        chief = (Holding(len(divisions), _WHOLE, "whole", sum(leaves[i][1] for i in here)),)
        divisions.append(_division("whole in this process", [leaves[i] for i in here]))
    total = sum(num_bytes for _, num_bytes in leaves)
    summary = "give it a state to see what each server holds"
    if shapes is not None:
        where = (
            "on the servers" if layout is not None else "here until the first step that is given it, which cuts it up"
        )
        summary = f"a state of {counted(len(leaves), 'array')}, {size(total)}, {where}"
    groups = (
        Group("this process, the chief", (Place("coordinator", "the program itself", chief),)),
        Group(f"workers: {pulls}", tuple(Place(f"worker {i}", at) for i, at in enumerate(workers))),
        Group(
            "parameter servers",
            tuple(Place(f"ps {i}", at, h) for i, (at, h) in enumerate(zip(ps, held, strict=True))),
        ),
    )
    return StatePicture(title, summary, tuple(divisions), groups)


def _on_servers(
    layout: Layout, leaves: Sequence[tuple[str, int]], num_ps: int, backups: bool
) -> tuple[list[Division], list[tuple[Holding, ...]]]:
    """Sorts what servers keep: leaves in pieces, each on one server, leaves of which each has a copy, and backups."""
    everywhere = {*layout.groups.everywhere, *layout.groups.constant}
    pieces = [0] * num_ps
    counts = [0] * num_ps
    copies: list[set[int]] = [set() for _ in range(num_ps)]
    in_pieces: set[int] = set()
    for shard in layout.shards:
        for rows, spec in zip(shard.rows, shard.kept, strict=True):
            if rows.of in everywhere:
                copies[shard.server].add(rows.of)
            else:
                pieces[shard.server] += _num_bytes_of(spec)
                counts[shard.server] += 1
                in_pieces.add(rows.of)
    divisions = [_division("in pieces, each on one server", [leaves[i] for i in sorted(in_pieces)])]
    total, before = max(1, sum(pieces)), 0
    held: list[list[Holding]] = [[] for _ in range(num_ps)]
    spans: list[tuple[tuple[float, float], ...]] = []
    for i, num_bytes in enumerate(pieces):
        spans.append(((before / total, (before + num_bytes) / total),))
        before += num_bytes
        if num_bytes:
            held[i].append(Holding(0, spans[i], counted(counts[i], "piece"), num_bytes))
    if any(copies):
        divisions.append(_division("whole on every server", [leaves[i] for i in sorted(set().union(*copies))]))
        for i, of_server in enumerate(copies):
            if of_server:
                held[i].append(Holding(1, _WHOLE, "whole", sum(leaves[k][1] for k in of_server)))
    if backups:
        number = len(divisions)
        shards = [(shard.server, sum(map(_num_bytes_of, shard.kept))) for shard in layout.shards]
        names = tuple(f"ps {server}'s" for server, _ in shards)
        divisions.append(Division("a backup of another server's shard", names, sum(n for _, n in shards), noun="shard"))
        for server, num_bytes in shards:
            held[(server + 1) % num_ps].append(Holding(number, spans[server], f"of ps {server}", num_bytes))
    return divisions, [tuple(each) for each in held]


def _division(how: str, leaves: Sequence[tuple[str, int]]) -> Division:
    largest = sorted(leaves, key=lambda leaf: -leaf[1])
    return Division(how, tuple(path for path, _ in largest), sum(num_bytes for _, num_bytes in leaves))


def _num_bytes_of(spec: Any) -> int:
    dtype = spec.numpy if isinstance(spec, Spec) else np.dtype(spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize
