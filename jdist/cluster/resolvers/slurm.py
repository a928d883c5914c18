"""Slurm's job steps: the variables that `srun` sets in each task."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import join, refused
from jdist.cluster.resolvers.jax_env import (
    ADDRESS,
    COUNT,
    INDEX,
    MOST,
    Gpus,
    chosen_coordinator,
    chosen_port,
    derived_port,
    make_spec,
)
from jdist.cluster.spec import JOBS, ClusterSpec

NODES, RANK, JOB, STEP = "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID"
LOCAL_RANK, DISTRIBUTION = "SLURM_LOCALID", "SLURM_DISTRIBUTION"
COUNTS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")  # the step's own first: the second may be the whole job's
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
HET_SIZE = "SLURM_HET_SIZE"
_NO_TASKS = 4294967290  # from here on Slurm numbers its own steps: salloc's shell, the batch script
_MEND, _SETS = "Start the tasks by srun, which sets it.", "Slurm sets it in each job step."
ON_NODE = "SLURM_GPUS_ON_NODE"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
PLATFORMS = "JAX_PLATFORMS"
_NONE = ("-1", "NoDevFiles")  # stand for no GPU
_ITEM = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9,-]*\])+")
_PART = re.compile(r"([A-Za-z0-9._-]+)|\[([0-9,-]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def slurm(environ: Mapping[str, str], *, jobs: Mapping[str, int] | None = None) -> ClusterSpec | None:
    """Reads the nodes of this job step, the number of tasks on each, and this task's rank; each task is a process.

    The port of process 0 follows from the numbers of job and step, so that all tasks know it. JAX_COORDINATOR_PORT replaces
    it, JAX_COORDINATOR_ADDRESS the host as well. A task takes all GPUs that it sees, which are its own where it is alone on
    its node or Slurm has given it some (--gpus-per-task). Where the tasks of a node all see all its GPUs, they share them
    equally.

    Args:
        environ: the environment.
        jobs: the number of tasks of each job, {"ps": 1, "worker": 3}; they take the ranks in the order chief, evaluator,
            ps, worker. None: all tasks are workers.

    It does not apply in a step of Slurm's own: the shell of `salloc`, a batch script. Heterogeneous jobs are refused.

    Example:
        >>> slurm({
        ...     "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2],m5", "SLURM_PROCID": "4",
        ...     "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_LOCALID": "0",
        ... })
        ClusterSpec(worker 4, process 4 of 5; cluster: 5 worker; from slurm)

    Source: Slurm's manual, srun, "Output environment variables"; tf.distribute's SlurmClusterResolver.
    """
    listed = environment.text(environ, NODES)
    if listed is None or not _is_in_step(environ):
        return None
    components = environment.number(environ, HET_SIZE, "Slurm sets it.") or 1
    if components > 1:
        allowed = "1: in a step of a heterogeneous job Slurm's lists have the tasks of one component only"
        at, count = f"{ADDRESS}=HOST:PORT to where {RANK} is 0", f"{COUNT} to the number of all tasks"
        raise refused(HET_SIZE, components, allowed, f"In each task set {at}, {count}, and {INDEX}=${RANK}.")
    nodes = expand_nodes(listed, NODES)
    tasks, tasks_from = _tasks_per_node(environ, len(nodes))
    rank = environment.index(environ, RANK, sum(tasks), tasks_from, _MEND)
    places = _places(environ, tasks)
    node, local = places[rank]
    local_rank = environment.number(environ, LOCAL_RANK, _MEND)
    if local_rank not in (None, local):
        raise refused(LOCAL_RANK, local_rank, f"{local}, as {RANK} is {rank} and {tasks_from} says so", _MEND)
    job, step = environment.needed(environ, JOB, _MEND), environment.number(environ, STEP, _MEND) or 0
    # Steps of one job often share nodes: 7 lies between the ports of a job's first step and the
    # next job's.
    port, port_from = chosen_port(environ, derived_port(7 * job + step), JOB)
    # The port of the first task of each node; the others have the ports after it, two each.
    addresses = [join(nodes[node], port + 2 * local) for node, local in places]
    members, task = _assigned(addresses, rank, jobs)
    first = "chief" if members.get("chief") else "worker"
    members[first], jobs_from = chosen_coordinator(environ, members.get(first, ()), NODES, tasks_from, port_from)
    gpus = own_gpus(environ, tasks[node], local)
    return make_spec(environ, "slurm", members, task, (jobs_from, RANK, RANK), gpus)


def is_task(environ: Mapping[str, str], count: str | None, rank: str | None) -> bool:
    """Returns whether srun itself has started this process as `rank` (None: any) of `count`."""
    # Some scripts and MPI plug-ins set another launcher's variables in srun's tasks. If these agree
    # with Slurm's own, Slurm's lists count: they give the place of each task. They do not agree if
    # a launcher has started its helpers by srun.
    if environment.text(environ, NODES) is None or not _is_in_step(environ):
        return False
    tasks = environment.text(environ, environment.first_set(environ, *COUNTS) or COUNTS[0])
    return count == tasks and rank in (None, environment.text(environ, RANK))


def _is_in_step(environ: Mapping[str, str]) -> bool:
    """Returns whether this process is a task of a step, or one has started it."""
    step = environment.number(environ, STEP, _MEND)
    return environment.text(environ, RANK) is not None and (step is None or step < _NO_TASKS)


def _tasks_per_node(environ: Mapping[str, str], num_nodes: int) -> tuple[list[int], str]:
    """Reads the number of tasks on each node, and its variable."""
    count_from = environment.first_set(environ, *COUNTS) or COUNTS[0]
    count = environment.number(environ, count_from, _MEND, least=1)
    variable = environment.first_set(environ, *TASKS_PER_NODE)
    if variable is None:
        if count != num_nodes:
            allowed = f"there, as {NODES} has {num_nodes} nodes for {count_from}={count}"
            raise refused(TASKS_PER_NODE[0], None, allowed, _MEND)
        return [1] * num_nodes, count_from
    listed = environ[variable]
    tasks = expand_tasks(listed, variable)
    if len(tasks) != num_nodes:
        raise refused(variable, listed, f"numbers of tasks for the {num_nodes} nodes of {NODES}", _MEND)
    if count is not None and sum(tasks) != count:
        raise refused(count_from, count, f"{sum(tasks)}, as {variable} is {listed[:80]}", _MEND)
    return tasks, variable


def _places(environ: Mapping[str, str], tasks: list[int]) -> list[tuple[int, int]]:
    """Lists each task's node and its number there: node by node (Slurm's "block"), or in turn ("cyclic")."""
    by_block = [(node, local) for node, count in enumerate(tasks) for local in range(count)]
    how = environment.text(environ, DISTRIBUTION) or "block"
    if how.startswith(("plane", "arbitrary")):
        raise refused(DISTRIBUTION, how, "block or cyclic", "Start the tasks by srun --distribution=block.")
    if how.startswith("cyclic"):
        return sorted(by_block, key=lambda place: (place[1], place[0]))
    return by_block


def _assigned(
    addresses: list[str], rank: int, jobs: Mapping[str, int] | None
) -> tuple[dict[str, tuple[str | None, ...]], tuple[str, int]]:
    """Assigns the addresses to the jobs, and the rank to a job and an index."""
    if jobs is None:
        return {"worker": tuple(addresses)}, ("worker", rank)
    wrong = [name for name in jobs if name not in JOBS]
    if wrong or sum(jobs.values()) != len(addresses) or min(jobs.values()) < 0:
        allowed = f"numbers of tasks of {', '.join(sorted(JOBS))} that add up to the step's {len(addresses)}"
        raise refused("jobs", dict(jobs), allowed, "Correct them, or srun's --ntasks.")
    members: dict[str, tuple[str | None, ...]] = {}
    job, index, start = "", 0, 0
    for name in sorted(jobs):
        members[name] = tuple(addresses[start : start + jobs[name]])
        if start <= rank < start + jobs[name]:
            job, index = name, rank - start
        start += jobs[name]
    return members, (job, index)


def own_gpus(environ: Mapping[str, str], tasks: int, local: int) -> Gpus:
    """Shares this node's GPUs among its `tasks`; returns number `local`'s, and their variables."""
    # The GPUs are numbered among those that the task sees. None for all: the task is alone, sees
    # only its own, or sees none.
    visible = environment.first_set(environ, *VISIBLE)
    on_node = environment.number(environ, ON_NODE, "Slurm sets it.")
    if tasks == 1 or visible is None or not on_node or environment.text(environ, PLATFORMS) == "cpu":
        return None, None
    seen = [entry for entry in environ[visible].split(",") if entry.strip() and entry.strip() not in _NONE]
    if len(seen) < on_node:
        return None, None
    if on_node % tasks:
        shown = f"{visible}={environ[visible][:80]}"
        allowed = f"a multiple of the {tasks} tasks of this node, which all see all its GPUs ({shown})"
        mend = "Start as many tasks as there are GPUs, or one a node, or give each its own by srun --gpus-per-task=1."
        raise refused(ON_NODE, on_node, allowed, mend)
    share = on_node // tasks
    return tuple(range(local * share, (local + 1) * share)), f"{ON_NODE}, SLURM_LOCALID"


def expand_nodes(listed: str, variable: str) -> list[str]:
    """Expands Slurm's list of nodes, in its order; numbers keep their leading zeros."""
    nodes: list[str] = []
    for item in re.split(r",(?![^\[]*\])", listed):  # commas outside brackets
        names = [""]
        if _ITEM.fullmatch(item.strip()) is None:
            raise _no_nodes(variable, listed)
        for literal, ranges in _PART.findall(item):
            ends = [literal] if literal else _numbers(ranges, listed, variable)
            if len(nodes) + len(names) * len(ends) > MOST:
                raise refused(variable, listed, f"a list of at most {MOST} nodes", _SETS)
            names = [name + end for name in names for end in ends]
        nodes += names
    for node, count in Counter(nodes).items():
        if count > 1:
            raise refused(variable, listed, f"a list with each node once, and {node} is there twice", "Leave one out.")
    return nodes


def _numbers(ranges: str, listed: str, variable: str) -> list[str]:
    """Expands the ranges in brackets, "1-3,07"; numbers keep their leading zeros."""
    numbers: list[str] = []
    for part in ranges.split(","):
        bounds = _RANGE.fullmatch(part)
        if bounds is None:
            raise _no_nodes(variable, listed)
        first, last = bounds[1], bounds[2] or bounds[1]
        if int(last) < int(first):
            raise refused(variable, listed, f"a list of ascending ranges, unlike {part}", "Write the smaller first.")
        if len(numbers) + int(last) - int(first) >= MOST:
            raise refused(variable, listed, f"a list of at most {MOST} nodes", _SETS)
        numbers += [f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
    return numbers


def _no_nodes(variable: str, listed: str) -> Exception:
    return refused(variable, listed, "a list of nodes such as n[1-2],m5,o[08-10]", _SETS)


def expand_tasks(listed: str, variable: str) -> list[int]:
    """Expands Slurm's list of the number of tasks on each node: "2(x2),1"."""
    tasks: list[int] = []
    for part in listed.split(","):
        match = _TASKS.fullmatch(part.strip())
        count, nodes = (0, 0) if match is None else (int(match[1]), int(match[2] or 1))
        if not count or not nodes:
            raise refused(variable, listed, "numbers of tasks such as 2(x2),1", _SETS)
        if len(tasks) + nodes > MOST:
            raise refused(variable, listed, f"numbers of tasks of at most {MOST} nodes", _SETS)
        tasks += [count] * nodes
    if sum(tasks) > MOST:
        raise refused(variable, listed, f"at most {MOST} tasks in all", _SETS)
    return tasks
