"""Platforms that list a job's hosts in a variable: Amazon SageMaker, SkyPilot, LSF's blaunch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join, refused
from jdist.cluster.resolvers.jax_env import (
    ADDRESS,
    COUNT,
    INDEX,
    chosen_coordinator,
    chosen_port,
    derived_port,
    workers_spec,
)
from jdist.cluster.spec import ClusterSpec

SM_HOSTS, SM_CURRENT = "SM_HOSTS", "SM_CURRENT_HOST"
_SM_PORT = 2223  # free on every host, as nothing else runs there
_SM_MEND = 'SageMaker sets it, as ["algo-1", "algo-2"].'
_SKY_NODES, _SKY_RANK = "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"
_SKY_COUNT, _SKY_TASK = "SKYPILOT_NUM_NODES", "SKYPILOT_TASK_ID"
_SKY_MEND = "SkyPilot sets it in `run`; start the program there, on every node."
LSF_HOSTS, _LSF_TASK, _LSF_JOB = "LSB_MCPU_HOSTS", "LSF_PM_TASKID", "LSB_JOBID"
_LSF_MEND = "LSF sets it; start the tasks by blaunch."


def sagemaker(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads SM_HOSTS, a JSON list of all hosts, and SM_CURRENT_HOST: one process on each host, with all its GPUs.

    The hosts are sorted, algo-2 before algo-10. Where SageMaker starts several processes on a host, by mpirun or torchrun,
    `open_mpi` and `torchrun` come first.

    Returns:
        The spec, with workers alone; None if SM_HOSTS is not set.

    Raises:
        ClusterConfigError: there is no list of hosts, a host is in it twice, or this host is not in it.

    Example:
        >>> sagemaker({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from sagemaker)

    Source: aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md.
    """
    source = environment.text(environ, SM_HOSTS)
    if source is None:
        return None
    hosts = _sagemaker_hosts(source)
    current = environment.text(environ, SM_CURRENT)
    if current not in hosts:
        raise refused(SM_CURRENT, current, f"one of the hosts in {SM_HOSTS}, {source[:80]}", "SageMaker sets both.")
    return _listed(
        environ, "sagemaker", hosts, hosts.index(current), _SM_PORT, "", hosts_from=SM_HOSTS, index_from=SM_CURRENT
    )


def skypilot(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads SKYPILOT_NODE_IPS, an address a line, and SKYPILOT_NODE_RANK: one process on each node, with all its GPUs.

    Returns:
        The spec, with workers alone; None if there is one node, or the variables are not set.

    Raises:
        ClusterConfigError: a node is listed twice, or the rank or the number of nodes does not fit the list.

    Example:
        >>> skypilot({"SKYPILOT_NODE_IPS": "10.0.0.4\\n10.0.0.5", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from skypilot)

    Source: SkyPilot, "Distributed multi-node jobs", "Environment variables".
    """
    hosts = (environment.text(environ, _SKY_NODES) or "").split()
    count = environment.number(environ, _SKY_COUNT, _SKY_MEND, least=1)
    if count is None:
        count = len(hosts)
    if count <= 1:
        return None
    if not hosts:
        raise refused(_SKY_NODES, None, f"set here, to the addresses of {count} nodes", _SKY_MEND)
    if len(hosts) != count:
        raise refused(_SKY_COUNT, count, f"{len(hosts)}, the number of addresses in {_SKY_NODES}", _SKY_MEND)
    for i, host in enumerate(hosts):
        if (wrong := host_problem(host)) is not None:
            raise refused(_SKY_NODES, host, "an address a line", wrong, field=f"[{i}]")
        if host in hosts[:i]:
            raise refused(_SKY_NODES, host, "there once only", _SKY_MEND, field=f"[{i}]")
    index = environment.index(environ, _SKY_RANK, count, _SKY_NODES, _SKY_MEND)
    port = derived_port(environ.get(_SKY_TASK, ""))
    return _listed(environ, "skypilot", hosts, index, port, _SKY_TASK, hosts_from=_SKY_NODES, index_from=_SKY_RANK)


def lsf(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads the hosts of this LSF job, "hostA 1 hostB 1", and the number of this task of blaunch's, from 1 on.

    It needs one slot on each host (`bsub -n 4 -R "span[ptile=1]" blaunch ...`), as LSF does not say how many tasks blaunch
    has started in several. jsrun's ranks are those of `mpi`.

    Returns:
        The spec, with workers alone; None if blaunch has not started this process, or it is the only task.

    Raises:
        ClusterConfigError: a host has several slots, or a variable is missing or holds something else.

    Example:
        >>> lsf({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "hostA 1 hostB 1", "LSF_PM_TASKID": "2"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from lsf)

    Source: IBM Spectrum LSF, "blaunch", "Environment variables"; openpmix/prrte, src/mca/ess/lsf.
    """
    listed, written_task = environment.text(environ, LSF_HOSTS), environment.text(environ, _LSF_TASK)
    if written_task is None or listed is None:
        return None
    slots = lsf_slots(listed)
    if sum(slots.values()) == 1 or (len(slots) == 1 and written_task == "1"):
        return None  # perhaps the job's own program
    if set(slots.values()) != {1}:
        allowed = "hosts of one slot each, as LSF does not say how many tasks blaunch has started"
        mend = f'Ask for them by bsub -R "span[ptile=1]", or set {ADDRESS}, {COUNT} and {INDEX} for each task.'
        raise refused(LSF_HOSTS, listed, allowed, mend)
    hosts = list(slots)
    task = environment.needed(environ, _LSF_TASK, _LSF_MEND, least=1)
    if task > len(hosts):
        raise refused(_LSF_TASK, task, f"from 1 to {len(hosts)}, the number of hosts in {LSF_HOSTS}", _LSF_MEND)
    port = derived_port(environment.needed(environ, _LSF_JOB, _LSF_MEND))
    return _listed(environ, "lsf", hosts, task - 1, port, _LSF_JOB, hosts_from=LSF_HOSTS, index_from=_LSF_TASK)


def lsf_slots(listed: str) -> dict[str, int]:
    """Parses LSF's list of hosts with their numbers of slots.

    Example:
        >>> lsf_slots("hostA 2 hostB 1")
        {'hostA': 2, 'hostB': 1}
    """
    parts = listed.split()
    slots = [environment.whole_number(part) for part in parts[1::2]]
    if len(parts) % 2 or not all(slots) or any(host_problem(host) for host in parts[::2]):
        raise refused(LSF_HOSTS, listed, "hosts with their numbers of slots, as hostA 2 hostB 1", _LSF_MEND)
    return {host: slot or 0 for host, slot in zip(parts[::2], slots, strict=True)}


def sagemaker_rank_0(environ: Mapping[str, str], current: str) -> tuple[str, str]:
    """Finds the address of process 0 under SageMaker's mpirun, and its variables."""
    # mpirun runs on rank 0's host, and passes that host's SM_CURRENT_HOST, `current`, to all ranks.
    if (wrong := host_problem(current)) is not None:
        raise refused(SM_CURRENT, current, "the name of a host", wrong)
    port, port_from = chosen_port(environ, _SM_PORT, "")
    return join(current, port), ", ".join(filter(None, (SM_CURRENT, port_from)))


def _listed(
    environ: Mapping[str, str],
    resolver: str,
    hosts: list[str],
    index: int,
    port: int,
    port_from: str,
    *,
    hosts_from: str,
    index_from: str,
) -> ClusterSpec:
    """Makes the spec of one process on each host; `port` is the default."""
    port, port_from = chosen_port(environ, port, port_from)
    addresses, jobs_from = chosen_coordinator(environ, [join(host, port) for host in hosts], hosts_from, port_from)
    return workers_spec(
        environ, resolver, addresses, index, jobs_from=jobs_from, count_from=hosts_from, index_from=index_from
    )


def _sagemaker_hosts(source: str) -> list[str]:
    try:
        hosts = json.loads(source)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts:
        raise refused(SM_HOSTS, source, "a JSON list of hosts", _SM_MEND)
    for i, host in enumerate(hosts):
        if not isinstance(host, str) or host_problem(host) is not None:
            raise refused(SM_HOSTS, host, "the name of a host", _SM_MEND, field=f"[{i}]")
        if host in hosts[:i]:
            raise refused(SM_HOSTS, host, "there once only", _SM_MEND, field=f"[{i}]")
    return sorted(hosts, key=_by_numbers)


def _by_numbers(host: str) -> list[tuple[int, str]]:
    """Makes a key that sorts names by the values of the numbers in them."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"([0-9]{1,18})", host)]
