"""The text of a compiled program -> its instructions, and how often one call runs each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
# Bits of an element, as XLA names its types.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "bf16": 16}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_SEVERAL = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation."""

    name: str  # as other lines refer to it
    shape: str  # of its result as XLA writes it, a tuple in parentheses
    opcode: str  # "all-reduce"
    operands: tuple[str, ...]  # names of the instructions it reads
    arguments: str  # the text in the parentheses after the opcode
    attributes: str  # the rest of the line


@dataclass(kw_only=True)
class Module:
    """A compiled program."""

    header: str = ""  # the line with its aliases and layout
    entry: str = ""  # name of the computation that a call runs
    # instructions by name, by computation
    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    roots: dict[str, Instruction] = field(default_factory=dict)  # each computation's result

    @property
    def num_devices(self) -> int:
        """Devices that run the program together: partitions times replicas."""
        counts = [re.search(rf"\b{name}=(\d+)", self.header) for name in ("num_partitions", "replica_count")]
        return prod(int(match[1]) for match in counts if match)

    def operands(self, computation: str, instruction: Instruction) -> list[Instruction]:
        """Finds the instructions that one reads."""
        known = self.computations[computation]
        return [known[name] for name in instruction.operands if name in known]

    def operand_bytes(self, computation: str, instruction: Instruction) -> int:
        """Counts the bytes of all that an instruction reads."""
        return sum(shape_bytes(operand.shape) for operand in self.operands(computation, instruction))


@dataclass(frozen=True, kw_only=True)
class Executed:
    """An instruction and how often one call of the program runs it."""

    computation: str  # the one that it is in
    instruction: Instruction
    times: int  # how often; in a branch of a conditional as if the branch were taken
    certain: bool  # False in a loop of an unknown number of trips: `times` then takes one


def parse(text: str) -> Module:
    """Reads a compiled program, as `jax.stages.Compiled.as_text()` writes it."""
    module, current = Module(), ""
    for line in text.splitlines():
        if line.startswith("HloModule"):
            module.header = line
        elif not line.startswith(" "):
            header = _HEADER.match(line)
            if header:
                current = header[2]
                module.computations[current] = {}
                module.entry = current if header[1] else module.entry
        elif current and " = " in line:
            instruction = _instruction(line)
            if instruction is not None:
                module.computations[current][instruction.name] = instruction
                if line.lstrip().startswith("ROOT "):
                    module.roots[current] = instruction
    return module


def _instruction(line: str) -> Instruction | None:
    line = re.sub(r"/\*.*?\*/", "", line)  # long lists hold comments such as /*index=5*/
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    shape, rest = _until_closed(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, paren, _ = rest.strip().partition("(")
    if not paren:
        return None
    inside, attributes = _until_closed(rest.strip()[len(opcode) :])
    return Instruction(
        name=name.lstrip("%"),
        shape=shape,
        opcode=opcode,
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        arguments=inside[1:-1],
        attributes=attributes,
    )


def _until_closed(text: str) -> tuple[str, str]:
    """Splits a text after the parenthesis that closes its first one."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""


def shape_bytes(shape: str) -> int:
    """Counts the bytes of a shape or tuple, without the padding of the layout."""
    total = 0
    for kind, dims in re.findall(r"\b([a-z]+\d*\w*)\[([^\]]*)\]", shape):
        digits = re.search(r"\d+", kind)
        bits = _BITS.get(kind, int(digits[0]) if digits else 0)
        # A bound such as "<=8" marks a dynamic dimension; the buffer is as large as its bound.
        total += (prod(int(d.lstrip("<=")) for d in dims.split(",") if d) * bits + 7) // 8
    return total


def executed(module: Module) -> Iterator[Executed]:
    """Lists every instruction that one call runs, in loops and called computations too."""
    # Only fusions that stand for a collective are followed, as TPU fuses a slice into an
    # all-reduce.
    yield from _executed(module, module.entry, 1, True)


def _executed(module: Module, computation: str, times: int, certain: bool) -> Iterator[Executed]:
    for instruction in module.computations.get(computation, {}).values():
        yield Executed(computation=computation, instruction=instruction, times=times, certain=certain)
        called = dict(_CALLED.findall(instruction.attributes))
        if instruction.opcode == "while":
            trips = trip_count(module, computation, instruction)
            loops = 1 if trips is None else trips
            yield from _executed(module, called["body"], times * loops, certain and trips is not None)
        elif instruction.opcode in ("call", "conditional", "async-start", "custom-call", "fusion"):
            names = [name for key, name in called.items() if key != "condition"]
            for several in _CALLED_SEVERAL.findall(instruction.attributes):
                names += [name.strip().lstrip("%") for name in several.split(",") if name.strip()]
            for name in names:
                if instruction.opcode != "fusion" or _is_collective(module, name):
                    yield from _executed(module, name, times, certain)


def _is_collective(module: Module, computation: str) -> bool:
    return any(i.opcode.startswith(KINDS) for i in module.computations.get(computation, {}).values())


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """Reads the number of trips of a loop; None if that is impossible."""
    # XLA writes it down on CPU and GPU. On TPU it is read from the loop: a counter that starts at a
    # constant and is compared with one. JAX's loops count up by one.
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known[1])
    condition = dict(_CALLED.findall(loop.attributes))["condition"]
    inside, test = module.computations.get(condition, {}), module.roots.get(condition)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.attributes or len(test.operands) != 2:
        return None
    counter, bound = (inside[name] for name in test.operands)
    outside = module.computations[computation]
    initial = outside.get(loop.operands[0])
    start = _element(outside, initial, counter)
    if bound.opcode == "get-tuple-element":  # a bound that the loop carries along
        end = _element(outside, initial, bound)
    else:
        end = _constant(inside, bound)
    return None if start is None or end is None else max(0, end - start)


def _element(outside: dict[str, Instruction], initial: Instruction | None, read: Instruction) -> int | None:
    """Finds the constant of a loop's initial state at the index that `read` reads."""
    index = re.search(r"index=(\d+)", read.attributes)
    if initial is None or initial.opcode != "tuple" or index is None:
        return None
    return _constant(outside, outside.get(initial.operands[int(index[1])]))


def _constant(known: dict[str, Instruction], instruction: Instruction | None) -> int | None:
    """Reads the whole number of a constant, followed through copies; None for other instructions."""
    while instruction is not None and instruction.opcode in ("copy", "bitcast", "copy-start", "copy-done"):
        instruction = known.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.arguments) if re.fullmatch(r"-?\d+", instruction.arguments) else None


# Instructions that name or join what is there, and those that leave their work to other computations.
_MOVES_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota")
_CALLS = ("while", "call", "conditional", "async-start", "async-done", "async-update")
# Instructions that read no more than they give, and those that write into an array in place, with the operand that they write.
_TAKES_ROWS = ("slice", "dynamic-slice", "gather")
_PUTS_ROWS = {"dynamic-update-slice": 1, "scatter": 2}
_STARTS_OF_BOTH = ("all-gather-start", "collective-permute-start", "copy-start")  # their shape holds the operands too


def bytes_accessed(module: Module, *, loops_once: bool = False) -> int:
    """Counts the bytes that one call's instructions move between a device and its memory."""
    # If an instruction reads or writes a slice or some rows of an array, only these count. With
    # `loops_once` the body of each loop counts once.
    total = 0
    for item in executed(module):
        instruction = item.instruction
        opcode = instruction.opcode
        if opcode in _MOVES_NOTHING or opcode in _CALLS or opcode.endswith("-done"):
            continue
        moved = _fusion_bytes(module, item) if opcode == "fusion" else _moved_bytes(module, item)
        total += moved if loops_once else item.times * moved
    return total


def _moved_bytes(module: Module, item: Executed) -> int:
    """Counts the bytes that an instruction other than a fusion reads and writes."""
    instruction = item.instruction
    result, operands = shape_bytes(instruction.shape), module.operands(item.computation, instruction)
    if instruction.opcode in _TAKES_ROWS:
        return 2 * result
    if instruction.opcode in _PUTS_ROWS and len(operands) > _PUTS_ROWS[instruction.opcode]:
        return 2 * shape_bytes(operands[_PUTS_ROWS[instruction.opcode]].shape)
    if instruction.opcode in _STARTS_OF_BOTH or instruction.shape.startswith("(("):
        return result  # a tuple of what it reads and what it writes
    return sum(shape_bytes(operand.shape) for operand in operands) + result


def _fusion_bytes(module: Module, item: Executed) -> int:
    """Counts what a fusion reads and writes."""
    computation = dict(_CALLED.findall(item.instruction.attributes))["calls"]
    inside = module.computations[computation]
    users: dict[str, list[Instruction]] = {}
    for instruction in inside.values():
        for name in dict.fromkeys(instruction.operands):
            users.setdefault(name, []).append(instruction)
    moved = shape_bytes(item.instruction.shape)
    for instruction in inside.values():
        if instruction.opcode == "parameter":
            moved += _parameter_bytes(inside, users, instruction)
    return max(0, moved)


def _parameter_bytes(
    inside: dict[str, Instruction], users: dict[str, list[Instruction]], parameter: Instruction
) -> int:
    """Counts what a fusion reads of a parameter, less what it does not write of a result that is the parameter updated."""
    whole = shape_bytes(parameter.shape)
    read = put = 0
    names, is_result = [parameter.name], False
    while names:
        name = names.pop()
        is_result = is_result or not users.get(name)
        for user in users.get(name, ()):
            first_alone = user.operands[0] == name and name not in user.operands[1:]
            written = _PUTS_ROWS.get(user.opcode, len(user.operands))
            if user.opcode == "bitcast":
                names.append(user.name)
            elif user.opcode == "tuple":
                is_result = True
            elif first_alone and user.opcode in _TAKES_ROWS:
                read += shape_bytes(user.shape)
            elif first_alone and written < len(user.operands) and user.operands[written] in inside:
                put += shape_bytes(inside[user.operands[written]].shape)
                names.append(user.name)
            else:
                return whole
    kept = max(0, whole - put) if put and is_result else 0
    return min(read, whole) - kept


def recomputed(module: Module) -> int:
    """Counts the results that one call computes a second time, by the compiler's choice, so as not to keep them meanwhile."""
    return sum(item.times for item in executed(module) if re.search(r"\.remat\d*\b", item.instruction.name))


def overlap(module: Module) -> tuple[int, int]:
    """Counts bytes of asynchronous collectives, and of those next to matrix products."""
    # A scheduled program has its instructions in the order of issue: those between a collective's
    # start and its end run meanwhile. Products and convolutions take most of a device's time. The
    # bytes are those on one device; (0, 0) without asynchronous collectives.
    total = overlapped = 0
    flying: dict[tuple[str, str], tuple[int, bool]] = {}
    for item in executed(module):
        instruction, opcode = item.instruction, item.instruction.opcode
        if opcode.endswith("-start") and opcode.removesuffix("-start") in KINDS:
            payload = module.operand_bytes(item.computation, instruction)
            if opcode == "all-gather-start":  # of a gather the result, which its shape holds after the operand
                payload = shape_bytes(instruction.shape) - payload
            payload *= item.times
            flying[item.computation, instruction.name] = (payload, False)
        elif opcode.endswith("-done") and instruction.operands:
            payload, has_product = flying.pop((item.computation, instruction.operands[0]), (0, False))
            total, overlapped = total + payload, overlapped + payload * has_product
        elif flying and _is_product(module, instruction):
            flying = {start: (payload, True) for start, (payload, _) in flying.items()}
    return total, overlapped


def _is_product(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction is a matrix product or a convolution, a fusion or a call that holds one."""
    if instruction.opcode in ("dot", "convolution") or re.search(r'"__cu(blas|dnn)', instruction.attributes):
        return True
    called = dict(_CALLED.findall(instruction.attributes)).get("calls", "")
    return any(_is_product(module, inner) for inner in module.computations.get(called, {}).values())
