"""The two short notations of Slurm: lists of nodes, and of tasks on each node."""

from __future__ import annotations

import re

from jdist.cluster.refuse import refused

MOST = 100_000  # nodes, or tasks: a slip of the pen must not fill the memory
_ITEM = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9,-]*\])+")
_PART = re.compile(r"([A-Za-z0-9._-]+)|\[([0-9,-]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_nodes(listed: str, variable: str) -> list[str]:
    """The nodes of a list, in its order; a range counts up, and keeps the zeros that it is written with.

    Args:
        listed: as Slurm writes it.
        variable: where it is from.

    Raises:
        ClusterConfigError: it is no such list, a range counts down, or a node is there twice.

    Example:
        >>> expand_nodes("n[1-2],m5,o[08-10]", "SLURM_STEP_NODELIST")
        ['n1', 'n2', 'm5', 'o08', 'o09', 'o10']
    """
    nodes: list[str] = []
    for item in re.split(r",(?![^\[]*\])", listed):  # commas outside brackets
        names = [""]
        if _ITEM.fullmatch(item.strip()) is None:
            raise _no_nodes(variable, listed)
        for literal, ranges in _PART.findall(item):
            ends = [literal] if literal else _numbers(ranges, listed, variable)
            if len(nodes) + len(names) * len(ends) > MOST:
                raise refused(variable, listed, f"a list of at most {MOST} nodes", "Slurm sets it in each job step.")
            names = [name + end for name in names for end in ends]
        nodes += names
    seen: set[str] = set()
    for node in nodes:
        if node in seen:
            raise refused(variable, listed, f"a list with each node once, and {node} is there twice", "Leave one out.")
        seen.add(node)
    return nodes


def _numbers(ranges: str, listed: str, variable: str) -> list[str]:
    """What stands in brackets, "1-3,07": each number as it is written."""
    numbers: list[str] = []
    for part in ranges.split(","):
        bounds = _RANGE.fullmatch(part)
        if bounds is None:
            raise _no_nodes(variable, listed)
        first, last = bounds[1], bounds[2] or bounds[1]
        if int(last) < int(first):
            raise refused(variable, listed, f"a list whose ranges count up, unlike {part}", "Write the smaller first.")
        if len(numbers) + int(last) - int(first) >= MOST:
            raise refused(variable, listed, f"a list of at most {MOST} nodes", "Slurm sets it in each job step.")
        numbers += [f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
    return numbers


def _no_nodes(variable: str, listed: str) -> Exception:
    return refused(variable, listed, "a list of nodes such as n[1-2],m5,o[08-10]", "Slurm sets it in each job step.")


def expand_tasks(listed: str, variable: str) -> list[int]:
    """How many tasks each node has.

    Args:
        listed: as Slurm writes it.
        variable: where it is from.

    Raises:
        ClusterConfigError: it is no such list, or a node has no task.

    Example:
        >>> expand_tasks("2(x2),1", "SLURM_STEP_TASKS_PER_NODE")
        [2, 2, 1]
    """
    tasks: list[int] = []
    for part in listed.split(","):
        found = _TASKS.fullmatch(part.strip())
        if found is None or int(found[1]) == 0 or int(found[2] or 1) == 0:
            raise refused(variable, listed, "numbers of tasks such as 2(x2),1", "Slurm sets it in each job step.")
        if len(tasks) + int(found[2] or 1) > MOST:
            raise refused(variable, listed, f"numbers of tasks of at most {MOST} nodes", "Slurm sets it.")
        tasks += [int(found[1])] * int(found[2] or 1)
    if sum(tasks) > MOST:
        raise refused(variable, listed, f"at most {MOST} tasks in all", "Slurm sets it in each job step.")
    return tasks
