"""What a compiled program moves between a device and its host, besides arguments and results."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jdist.plan.hlo import Instruction, Module, executed, shape_bytes

_ARRAY = re.compile(r"\b[a-z]+\d*\w*\[[^\]]*\](?:\{[^}]*\})?")
_ON_HOST = "S(5)"  # how a layout says that an array is in the host's memory


@dataclass(frozen=True, kw_only=True)
class HostCopies:
    """What one device and its host copy to each other in one call.

    Attributes:
        count: how often.
        bytes: of all copies together, in both directions.
    """

    count: int
    bytes: int


def host_copies(module: Module) -> HostCopies:
    """Every copy between a device and its host, loop trips included.

    Messages between TPU slices, which go by way of the hosts, are none.
    """
    count = total = 0
    for item in executed(module):
        operands = [module.computations[item.computation].get(name) for name in item.instruction.operands]
        moved = _moved(item.instruction, [x for x in operands if x is not None])
        if moved is not None:
            count += item.times
            total += item.times * moved
    return HostCopies(count=count, bytes=total)


def _moved(instruction: Instruction, operands: list[Instruction]) -> int | None:
    """Bytes that an instruction copies between device and host; None for one that copies nothing."""
    opcode, attributes = instruction.opcode, instruction.attributes
    by_message = "is_host_transfer=true" in attributes and "_xla_megascale" not in attributes
    if opcode == "outfeed" or (opcode == "send" and by_message):
        return shape_bytes(operands[0].shape) if operands else 0
    if opcode == "infeed" or (opcode == "recv" and by_message):
        return shape_bytes(instruction.shape)
    if opcode.startswith("custom-call") and "DEVICE_TYPE_HOST" in attributes:  # a program of the host, and its result
        ends = opcode == "custom-call-done"
        return (_on_device(instruction.shape) if ends else sum(_on_device(x.shape) for x in operands)) or None
    if not operands:
        return None
    from_host = _is_on_host(operands[0].shape)
    if opcode in ("copy", "copy-start"):  # what a start makes is (there, here, context)
        return shape_bytes(operands[0].shape) if from_host != _is_on_host(_arrays(instruction.shape)[0]) else None
    if opcode == "dynamic-slice" and from_host and not _is_on_host(instruction.shape):
        return shape_bytes(instruction.shape)
    if opcode == "dynamic-update-slice" and from_host and not _is_on_host(operands[1].shape):
        return shape_bytes(operands[1].shape)
    return None


def _is_on_host(shape: str) -> bool:
    return _ON_HOST in shape


def _on_device(shape: str) -> int:
    """Bytes of those arrays of a shape that are in the device's memory."""
    return sum(shape_bytes(array) for array in _arrays(shape) if not _is_on_host(array))


def _arrays(shape: str) -> list[str]:
    return _ARRAY.findall(shape)
