"""The collectives of a compiled program, and its copies between a device and its host."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from jdist.plan.hlo import KINDS, Executed, Instruction, Module, executed, shape_bytes

BETWEEN_SLICES = " between slices"  # ends the kind of what TPU slices exchange among each other
_ARRAY = re.compile(r"\b[a-z]+\d*\w*\[[^\]]*\](?:\{[^}]*\})?")
_ON_HOST = "S(5)"  # marks an array in the host's memory, in its layout


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of a program that are alike."""

    kind: str  # "all-reduce", "all-gather", ...; "all-reduce between slices" for messages over the data-centre network
    axes: str  # the mesh axes of the exchange; "?" if the groups are not those of any axes
    groups: int  # number of groups of devices that exchange among themselves
    group_size: int  # devices in a group
    count: int  # runs in one call of the program, loop trips included
    bytes: int  # payload of all `count` together on one device: the operand of a reduction, the result of a gather
    certain: bool  # False in a loop of an unknown number of trips; one trip is then counted
    per_domain: int | None = None  # devices of a group that fast links join, such as those of a host; None: not known


def collectives(module: Module, mesh_shape: Mapping[str, int], *, domain: int | None = None) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled program, equal ones together, the largest first."""
    # `mesh_shape` has the devices along each mesh axis, in the order of the mesh; fast links join
    # each `domain` of them in a row, such as the GPUs of a host.
    totals: dict[tuple[str, str, int, int, bool, int | None], Counter[str]] = {}
    starts = _starts(module)
    chains = {_chain(module.computations[computation][name]) for computation, name in starts}
    for item in executed(module):
        kind = _kind(item)
        if kind is None:
            continue
        if _chain(item.instruction) in chains and (item.computation, item.instruction.name) not in starts:
            continue  # part of one that is counted where it starts
        groups = replica_groups(item.instruction.attributes, module.num_devices)
        size = module.num_devices if groups is None else max(map(len, groups))
        payload = module.operand_bytes(item.computation, item.instruction)
        if kind == "all-gather":
            payload *= size
        if kind.endswith(BETWEEN_SLICES):
            message, *_ = module.operands(item.computation, item.instruction)  # the others are tokens
            slices = prod(mesh_shape.values()) // module.num_devices
            payload = shape_bytes(message.shape) * (slices if kind == "all-gather" + BETWEEN_SLICES else 1)
            axes, count, size = "between slices", 1, 0
        elif size == 1:
            continue  # a device by itself exchanges nothing
        else:
            axes, count = ("?", 1) if groups is None else (axes_of(groups, mesh_shape), len(groups))
        joined = None if domain is None or groups is None else max(_most_in_a_domain(group, domain) for group in groups)
        total = totals.setdefault((kind, axes, count, size, item.certain, joined), Counter())
        total["count"] += item.times
        total["bytes"] += item.times * payload
    alike = [
        Collective(kind=kind, axes=axes, groups=groups, group_size=size, certain=certain, per_domain=joined, **total)
        for (kind, axes, groups, size, certain, joined), total in totals.items()
    ]
    return tuple(sorted(alike, key=lambda c: -c.bytes))


def _most_in_a_domain(group: tuple[int, ...], domain: int) -> int:
    return max(Counter(device // domain for device in group).values())


def _kind(item: Executed) -> str | None:
    opcode = item.instruction.opcode.removesuffix("-start")
    if opcode in KINDS:
        return opcode
    message = re.search(r'_xla_megascale_transfer_type="(\w+)"', item.instruction.attributes)
    if item.instruction.opcode == "send" and message:  # TPU slices run a program each
        what = message[1].lower().replace("_", "-")
        return ("collective-permute" if what == "one-to-one" else what) + BETWEEN_SLICES
    return None


def _starts(module: Module) -> set[tuple[str, str]]:
    """Finds starts of collectives that a TPU runs next to other work: (computation, name)."""
    # Such a collective becomes a chain of several fusions, and each holds it.
    return {
        (computation, name)
        for computation, known in module.computations.items()
        for instruction in known.values()
        if instruction.opcode == "custom-call" and '"AsyncCollectiveStart"' in instruction.attributes
        for name in instruction.operands
        if name in known and _chain(known[name]) is not None
    }


def _chain(instruction: Instruction) -> tuple[str, str] | None:
    """Names the chain of fusions that a collective belongs to; None for one that is whole."""
    number = re.search(r'chain_id="(\d+)"', instruction.attributes)
    return None if number is None else (instruction.opcode, number[1])


def replica_groups(attributes: str, num_devices: int) -> list[tuple[int, ...]] | None:
    """Reads one collective's groups of places on the flattened mesh; None for an unknown form."""
    # Known forms: `replica_groups={{0,1},{2,3}}`, `[2,2]<=[4]`, with a transpose
    # `[2,2]<=[2,2]T(1,0)`, by axes `mesh['host'=2,'core'=2] {'core'}`, with the devices' order
    # `mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}`, and `source_target_pairs`. `{}` stands
    # for all devices of the program.
    # One branch for each form that XLA writes.
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if pairs:
        return _connected([(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])])
    if "replica_groups=" not in attributes or "replica_groups={}" in attributes:
        return [tuple(range(num_devices))]
    lists = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes)
    if lists:
        return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d, ]+)\}", lists[1])]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        shape = tuple(map(int, iota[1].split(",")))
        return [tuple(group) for group in _iota(iota[2], iota[3]).reshape(shape).tolist()]
    by_axes = re.search(
        r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'\w+',?)+)\}",
        attributes,
    )
    if by_axes:
        mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", by_axes[1])}
        ids = range(prod(mesh.values())) if by_axes[2] is None else _iota(by_axes[2], by_axes[3]).reshape(-1).tolist()
        return [tuple(ids[place] for place in row) for row in _rows(mesh, re.findall(r"'(\w+)'", by_axes[4]))]
    return None


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Makes the array of numbers from 0 that XLA writes as `[4,8]T(1,0)`: of that shape, its dimensions then in this order."""
    shape = tuple(map(int, dims.split(",")))
    ids = np.arange(prod(shape)).reshape(shape)
    return ids if order is None else ids.transpose(tuple(map(int, order.split(","))))


def _connected(pairs: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Groups the devices that reach one another along the pairs."""
    groups: list[set[int]] = []
    for pair in pairs:
        touched = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touched] + [set(pair).union(*touched)]
    return [tuple(sorted(group)) for group in groups]


def _rows(mesh_shape: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    """Lists places on the flattened mesh, a row for each group of devices that differ along `axes` alone."""
    names = list(mesh_shape)
    ids = np.arange(prod(mesh_shape.values())).reshape(tuple(mesh_shape.values()))
    order = [i for i, name in enumerate(names) if name not in axes] + [names.index(name) for name in axes]
    return ids.transpose(order).reshape(-1, prod(mesh_shape[name] for name in axes)).tolist()


def axes_of(groups: list[tuple[int, ...]], mesh_shape: Mapping[str, int]) -> str:
    """Names the mesh axes with devices that form `groups`, joined by " x ", or returns "?"."""
    distinct = {frozenset(group) for group in groups}
    # Each of several slices runs the program on its own, counted from 0.
    slice_size = 1 + max(itertools.chain(*groups))
    if set(itertools.chain(*groups)) != set(range(slice_size)) or prod(mesh_shape.values()) % slice_size:
        return "?"
    for size in range(1, len(mesh_shape) + 1):
        for axes in itertools.combinations(mesh_shape, size):
            rows = {frozenset(row) for row in _rows(mesh_shape, axes)}
            if {row & set(range(slice_size)) for row in rows} - {frozenset()} == distinct:
                return " x ".join(axes) + ("" if distinct <= rows else " within a slice")
    return "?"


def host_copies(module: Module) -> tuple[int, int]:
    """Counts a call's copies between a device and its host, loop trips included, and their bytes; not TPU slices' messages."""
    count = total = 0
    for item in executed(module):
        copied = _copied_bytes(item.instruction, module.operands(item.computation, item.instruction))
        if copied is not None:
            count += item.times
            total += item.times * copied
    return count, total


def _copied_bytes(instruction: Instruction, operands: list[Instruction]) -> int | None:
    """Counts the bytes that an instruction copies between device and host; None for one that copies nothing."""
    opcode, attributes = instruction.opcode, instruction.attributes
    by_message = "is_host_transfer=true" in attributes and "_xla_megascale" not in attributes
    if opcode == "outfeed" or (opcode == "send" and by_message):
        return shape_bytes(operands[0].shape) if operands else 0
    if opcode == "infeed" or (opcode == "recv" and by_message):
        return shape_bytes(instruction.shape)
    if opcode.startswith("custom-call") and "DEVICE_TYPE_HOST" in attributes:  # a program of the host, and its result
        copied = [instruction] if opcode == "custom-call-done" else operands
        return sum(_device_bytes(each.shape) for each in copied) or None
    if not operands:
        return None
    from_host = _is_on_host(operands[0].shape)
    if opcode in ("copy", "copy-start"):  # the shape of a start is (destination, source, context)
        to_host = _is_on_host(_ARRAY.findall(instruction.shape)[0])
        return shape_bytes(operands[0].shape) if from_host != to_host else None
    if opcode == "dynamic-slice" and from_host and not _is_on_host(instruction.shape):
        return shape_bytes(instruction.shape)
    if opcode == "dynamic-update-slice" and from_host and not _is_on_host(operands[1].shape):
        return shape_bytes(operands[1].shape)
    return None


def _is_on_host(shape: str) -> bool:
    return _ON_HOST in shape


def _device_bytes(shape: str) -> int:
    """Counts the bytes of those arrays of a shape that are in the device's memory."""
    return sum(shape_bytes(array) for array in _ARRAY.findall(shape) if not _is_on_host(array))
