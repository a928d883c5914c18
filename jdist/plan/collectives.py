"""What the devices of a compiled program exchange."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jdist.plan.hlo import Executed, Module, executed, shape_bytes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
BETWEEN_SLICES = "all-reduce between slices"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program, or several that are alike.

    Attributes:
        kind: "all-reduce", "all-gather", ...
        axes: the mesh axes that the exchange is over; "?" if the groups are not those of any axes.
        groups: number of groups of devices that exchange among themselves.
        group_size: devices in a group.
        count: how often one call of the program runs it, loop trips included.
        bytes: payload of all `count` together on one device: of what is reduced, or of what a gather results in.
        certain: False if it stands in a loop whose number of trips cannot be read; one trip is then counted.
    """

    kind: str
    axes: str
    groups: int
    group_size: int
    count: int
    bytes: int
    certain: bool


def collectives(module: Module, mesh_shape: Mapping[str, int]) -> tuple[Collective, ...]:
    """Every collective of a compiled program, equal ones together.

    Args:
        module: the program.
        mesh_shape: devices along each mesh axis, in the order of the mesh.

    Returns:
        The collectives, the largest first.
    """
    found: dict[tuple[str, str, int, int, bool], list[int]] = {}
    for item in executed(module):
        kind = _kind(item)
        if kind is None:
            continue
        groups = replica_groups(item.instruction.attributes, module.num_devices)
        size = len(groups[0])
        payload = module.operand_bytes(item.computation, item.instruction)
        if kind == "all-gather":
            payload *= size
        if kind == BETWEEN_SLICES:
            sent = module.computations[item.computation].get(item.instruction.operands[0])
            payload = 0 if sent is None else shape_bytes(sent.shape)
            axes, count, size = "between slices", 1, 0
        elif size == 1:
            continue  # a device by itself exchanges nothing
        else:
            axes, count = axes_of(groups, mesh_shape), len(groups)
        total = found.setdefault((kind, axes, count, size, item.certain), [0, 0])
        total[0] += item.times
        total[1] += item.times * payload
    made = [
        Collective(kind=kind, axes=axes, groups=groups, group_size=size, count=count, bytes=total, certain=certain)
        for (kind, axes, groups, size, certain), (count, total) in found.items()
    ]
    return tuple(sorted(made, key=lambda c: -c.bytes))


def _kind(item: Executed) -> str | None:
    opcode = item.instruction.opcode.removesuffix("-start")
    if opcode in KINDS:
        return opcode
    if item.instruction.opcode == "send" and "_xla_megascale_transfer_type" in item.instruction.attributes:
        return BETWEEN_SLICES  # TPU slices reduce among each other by messages over the data-centre network
    return None


def replica_groups(attributes: str, num_devices: int) -> list[tuple[int, ...]]:
    """The groups of devices of one collective.

    Args:
        attributes: of the instruction; holds `replica_groups={{0,1},{2,3}}`, or as `[2,2]<=[4]`, or with a transpose
            `[2,2]<=[2,2]T(1,0)`, or `source_target_pairs`.
        num_devices: devices of the program, for `{}`, which means all of them.

    Returns:
        Places of devices on the flattened mesh, group by group.

    Example:
        >>> replica_groups(", replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", 4)
        [(0, 2), (1, 3)]
    """
    listed = re.search(r"replica_groups=\{(\{[\d,{} ]*\})?\}", attributes)
    if listed and listed[1]:
        return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d, ]+)\}", listed[1])]
    counted = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if counted:
        shape, dims = (tuple(map(int, counted[i].split(","))) for i in (1, 2))
        ids = np.arange(int(np.prod(dims))).reshape(dims)
        if counted[3]:
            ids = ids.transpose(tuple(map(int, counted[3].split(","))))
        return [tuple(int(i) for i in group) for group in ids.reshape(shape)]
    return [tuple(range(num_devices))]


def axes_of(groups: list[tuple[int, ...]], mesh_shape: Mapping[str, int]) -> str:
    """The mesh axes whose devices form `groups`, joined by " x "; "?" if none do.

    Example:
        >>> axes_of([(0, 2), (1, 3)], {"host": 2, "core": 2})
        'host'
    """
    wanted = {frozenset(group) for group in groups}
    ids = np.arange(int(np.prod(list(mesh_shape.values())))).reshape(tuple(mesh_shape.values()))
    names = list(mesh_shape)
    for size in range(1, len(names) + 1):
        for axes in itertools.combinations(range(len(names)), size):
            rest = [i for i in range(len(names)) if i not in axes]
            rows = ids.transpose((*rest, *axes)).reshape(-1, int(np.prod([ids.shape[i] for i in axes])))
            if {frozenset(row.tolist()) for row in rows} == wanted:
                return " x ".join(names[i] for i in axes)
    if len(wanted) == 1 and len(names) == 1 and ids.size % len(groups[0]) == 0:
        return f"{names[0]} within a slice"  # every slice runs the program on its own devices, counted from 0
    return "?"


def host_transfers(module: Module) -> int:
    """How often one call of a program moves data between a device and its host, besides arguments and results."""
    total = 0
    for item in executed(module):
        opcode, attributes = item.instruction.opcode, item.instruction.attributes
        by_message = opcode in ("send", "recv") and "is_host_transfer=true" in attributes
        if opcode in ("infeed", "outfeed") or (by_message and "_xla_megascale" not in attributes):
            total += item.times
        elif opcode in ("copy-start", "dynamic-update-slice", "dynamic-slice") and "S(5)" in item.instruction.shape:
            total += item.times  # memory space 5 is the host's
    return total
