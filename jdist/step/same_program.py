"""A check, before anything is compiled, that the processes of a job run one program on one state.

Processes that trace different programs, as one of them was started with another learning rate, would train apart without
a word, or wait for each other's collectives for ever.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdist.core.collective_marks import line_of
from jdist.core.strategy import Strategy
from jdist.errors import ClusterError, ReplicaDivergenceError
from jdist.jaxpr import graph
from jdist.step.placement import hash_replicas
from jdist.support.arrays import is_key, to_host
from jdist.typing import PyTree

# `Runtime.exchange`: (what, this process's value, timeout_s) -> the values of all processes
Exchange = Callable[[str, Any, float], list[Any]]
_WAIT_S = 600.0  # the others may trace longer
_MOST_LETTERS = 200
_SHOWN = 5


def check_same_of_processes(strategy: Strategy, name: str, closed: Any, state: Any | None) -> None:
    """Compares a traced step, and perhaps its first state, with the other processes'."""
    if state is not None:
        _check_same_state(strategy, name, state)
    check_same_program(closed, name, strategy.cluster.exchange)


def check_same_program(closed: Any, name: str, exchange: Exchange) -> None:
    """Compares a traced step with that of the other processes, equation by equation."""
    # If one process prints in the step and others do not, nothing is compared: jdist's own part of
    # it depends on that.
    lines = list(_lines(closed))
    digests = [b""]
    for line, _ in lines:
        digests.append(hashlib.sha256(digests[-1] + line.encode()).digest())
    what = f"the program of {name}"
    summaries = exchange(
        what, [len(lines), digests[-1].hex(), graph.contains_primitive(closed, *graph.PRINTS)], _WAIT_S
    )
    if all(one == summaries[0] for one in summaries) or len({printing for _, _, printing in summaries}) > 1:
        return
    # The first `same` lines are equal, the first `first` lines are not.
    same, first = 0, min(count for count, _, _ in summaries) + 1
    while first - same > 1:
        middle = (same + first) // 2
        prefixes = exchange(what, digests[middle].hex(), _WAIT_S)
        same, first = (middle, first) if len(set(prefixes)) == 1 else (same, middle)
    line, place = lines[same] if same < len(lines) else ("nothing more", "")
    equations = exchange(what, [line[:_MOST_LETTERS], place], _WAIT_S)
    other = next((i for i, one in enumerate(equations) if one[0] != equations[0][0]), 1)
    difference = _difference(equations[other], equations[0])
    raise ClusterError(
        f"{name} is another program on process {other} than on process 0: {difference}. Give all processes the same "
        "hyperparameters, options, code and versions, and keep values that differ between processes out of the step."
    )


def _difference(theirs: Sequence[str], ours: Sequence[str]) -> str:
    (theirs_line, place), (line, _) = theirs, ours
    where = f", computed at {place}" if place else ""
    mine, yours = _NUMBER.findall(line), _NUMBER.findall(theirs_line)
    if _NUMBER.sub("", line) == _NUMBER.sub("", theirs_line):
        a, b = next((a, b) for a, b in zip(mine, yours, strict=True) if a != b)
        return f"a constant is {b} there and {a} on process 0, in `{line.partition(' ')[0]}`{where}"
    return f"it has `{theirs_line}`{where}, where process 0 has `{line}`"


_NUMBER = re.compile(r"(?<==)\S+")


def _lines(closed: Any) -> Iterator[tuple[str, str]]:
    """Writes the equations of a traced function, nested ones too, each with its place in the user's program."""
    jaxpr = graph.body_of(closed)
    for const in closed.consts:
        yield f"constant {_value(const)}", ""
    numbers: dict[Any, int] = {}

    def named(v: Any) -> str:
        if graph.is_literal(v):
            return f"{v.aval.str_short()}={_value(v.val)}"
        return f"{v.aval.str_short()}:{numbers.setdefault(v, len(numbers))}"

    yield f"arguments {' '.join(map(named, jaxpr.invars))}", ""
    for eqn in jaxpr.eqns:
        options = [f"{key}={text}" for key, value in sorted(eqn.params.items()) if _has_value(text := _text(value))]
        yield " ".join([eqn.primitive.name, *map(named, eqn.invars), *options]), line_of(eqn)
        for inner in graph.nested_jaxprs(eqn):
            yield from _lines(inner)
        for v in eqn.outvars:
            named(v)
    yield f"results {' '.join(map(named, jaxpr.outvars))}", ""


def _value(x: Any) -> str:
    """Writes a constant's value; of a large one its hash."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        return f"{x.dtype}{list(x.shape)}"
    x = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    return (
        f"{x.item()!r}" if x.size == 1 else f"{x.dtype}{list(x.shape)} {hashlib.sha256(x.tobytes()).hexdigest()[:12]}"
    )


def _text(value: Any) -> str:
    """Writes an option of an equation, if it is the same text for the same program in every process."""
    if isinstance(value, bool | int | float | complex | str | np.dtype | enum.Enum | type(None)):
        return str(value).replace(" ", "")
    if isinstance(value, tuple | list):
        return f"({','.join(map(_text, value))})"
    if isinstance(value, Mapping):
        return f"({','.join(f'{key}:{_text(each)}' for key, each in value.items())})"
    return ""


def _has_value(text: str) -> bool:
    return bool(text.replace("None", "").strip("(),"))


def _check_same_state(strategy: Strategy, name: str, state: PyTree) -> None:
    """Raises ReplicaDivergenceError, on all of them, if the processes begin with different states."""
    if (hashed := hash_replicas(strategy, state)) is None:
        return
    hashes, paths, leaves = hashed
    processes = [device.process_index for device in strategy.first_devices]
    firsts = {process: hashes[processes.index(process)] for process in sorted(set(processes))}
    differing = [i for i in range(len(paths)) if len({int(row[i]) for row in firsts.values()}) > 1]
    if not differing:
        return
    shown = sorted(differing, key=lambda i: (leaves[i].size > 1, i))[:_SHOWN]  # scalars say most
    values = strategy.cluster.exchange(
        f"the state of {name}", [_value(to_host(leaves[i])) if leaves[i].size == 1 else "" for i in shown], _WAIT_S
    )
    lines = [
        f"  {paths[i]}: {_who([one[k] for one in values], [firsts[p][i] for p in firsts])}" for k, i in enumerate(shown)
    ]
    if len(differing) > _SHOWN:
        lines.append(f"  and {len(differing) - _SHOWN} more leaves")
    raise ReplicaDivergenceError(
        f"the processes begin {name} with different states, in {len(differing)} of {len(paths)} leaves:\n"
        + "\n".join(lines)
        + "\nAll have to begin with the same: give every process the same seed and hyperparameters, and let all restore the "
        "same checkpoint.",
        tuple(paths[i] for i in differing),
        tuple(tuple(range(len(hashes))) for _ in differing),
    )


def _who(values: Sequence[str], hashes: Sequence[Any]) -> str:
    if all(values):
        return ", ".join(f"{value} on process {process}" for process, value in enumerate(values))
    others = [process for process, found in enumerate(hashes) if found != hashes[0]]
    return f"process {', '.join(map(str, others))} has another value than process 0"
