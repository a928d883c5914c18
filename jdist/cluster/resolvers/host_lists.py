"""Platforms that list a job's hosts in a variable: Amazon SageMaker, SkyPilot, LSF's blaunch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import check_hosts, host_problem, join, refused
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
SM_PORT = 2223  # free on every host, as nothing else runs there
_SM_MEND = 'SageMaker sets it, as ["algo-1", "algo-2"].'
_SKY_NODES, _SKY_RANK = "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"
_SKY_COUNT, _SKY_TASK = "SKYPILOT_NUM_NODES", "SKYPILOT_TASK_ID"
_SKY_MEND = "SkyPilot sets it in `run`; start the program there, on every node."
LSF_HOSTS, _LSF_TASK, _LSF_JOB = "LSB_MCPU_HOSTS", "LSF_PM_TASKID", "LSB_JOBID"
_LSF_MEND = "LSF sets it; start the tasks by blaunch."


def sagemaker(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads SM_HOSTS, a JSON list of all hosts, and SM_CURRENT_HOST: one process on each host, with all its GPUs.

    Args:
        environ: the environment, with both variables. The hosts are sorted, algo-2 before algo-10. Where SageMaker starts
            several processes on a host, by mpirun or torchrun, `open_mpi` and `torchrun` come first.

    Example:
        >>> sagemaker({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from sagemaker)

    Source: aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md.
    """
    source, current = environment.text(environ, SM_HOSTS), environment.text(environ, SM_CURRENT)
    if source is None:
        return None
    try:
        hosts = json.loads(source)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts:
        raise refused(SM_HOSTS, source, "a JSON list of hosts", _SM_MEND)
    check_hosts(SM_HOSTS, hosts, _SM_MEND)
    if current not in hosts:
        raise refused(SM_CURRENT, current, f"one of the hosts in {SM_HOSTS}, {source[:80]}", "SageMaker sets both.")
    hosts.sort(key=_by_numbers)
    return _listed(environ, "sagemaker", hosts, hosts.index(current), SM_PORT, (SM_HOSTS, "", SM_CURRENT))


def skypilot(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads SKYPILOT_NODE_IPS, an address a line, and SKYPILOT_NODE_RANK: one process on each node, with all its GPUs.

    Args:
        environ: the environment, with both variables. The resolver does not apply to one node.

    Example:
        >>> skypilot({"SKYPILOT_NODE_IPS": "10.0.0.4\\n10.0.0.5", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from skypilot)

    Source: SkyPilot, "Distributed multi-node jobs", "Environment variables".
    """
    hosts = (environment.text(environ, _SKY_NODES) or "").split()
    count = environment.number(environ, _SKY_COUNT, _SKY_MEND, least=1)
    count = len(hosts) if count is None else count
    if count <= 1:
        return None
    if not hosts:
        raise refused(_SKY_NODES, None, f"set here, to the addresses of {count} nodes", _SKY_MEND)
    if len(hosts) != count:
        raise refused(_SKY_COUNT, count, f"{len(hosts)}, the number of addresses in {_SKY_NODES}", _SKY_MEND)
    check_hosts(_SKY_NODES, hosts, _SKY_MEND)
    index = environment.index(environ, _SKY_RANK, count, _SKY_NODES, _SKY_MEND)
    port = derived_port(environ.get(_SKY_TASK, ""))
    return _listed(environ, "skypilot", hosts, index, port, (_SKY_NODES, _SKY_TASK, _SKY_RANK))


def lsf(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads the hosts of this LSF job, "hostA 1 hostB 1", and the number of this task of blaunch's, from 1 on.

    Args:
        environ: the environment, with LSB_JOBID, LSB_MCPU_HOSTS and LSF_PM_TASKID. The job needs one slot on each host
            (`bsub -n 4 -R "span[ptile=1]" blaunch ...`), as LSF does not say how many tasks blaunch has started in several.
            The resolver does not apply to a task alone; jsrun's ranks are those of `mpi`.

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
    task = environment.needed(environ, _LSF_TASK, _LSF_MEND, least=1)
    if task > len(slots):
        raise refused(_LSF_TASK, task, f"from 1 to {len(slots)}, the number of hosts in {LSF_HOSTS}", _LSF_MEND)
    port = derived_port(environment.needed(environ, _LSF_JOB, _LSF_MEND))
    return _listed(environ, "lsf", list(slots), task - 1, port, (LSF_HOSTS, _LSF_JOB, _LSF_TASK))


def lsf_slots(listed: str) -> dict[str, int]:
    """Parses LSF's list of hosts with their numbers of slots, "hostA 2 hostB 1"."""
    parts = listed.split()
    slots = [environment.whole_number(part) for part in parts[1::2]]
    if len(parts) % 2 or not all(slots) or any(host_problem(host) for host in parts[::2]):
        raise refused(LSF_HOSTS, listed, "hosts with their numbers of slots, as hostA 2 hostB 1", _LSF_MEND)
    return {host: slot or 0 for host, slot in zip(parts[::2], slots, strict=True)}


def _listed(
    environ: Mapping[str, str], resolver: str, hosts: list[str], index: int, port: int, variables: tuple[str, str, str]
) -> ClusterSpec:
    """Makes the spec of one process on each host; `port` is the default, `variables` are those of hosts, port and index."""
    hosts_from, port_from, index_from = variables
    port, port_from = chosen_port(environ, port, port_from)
    addresses, jobs_from = chosen_coordinator(environ, [join(host, port) for host in hosts], hosts_from, port_from)
    return workers_spec(environ, resolver, addresses, index, (jobs_from, hosts_from, index_from))


def _by_numbers(host: str) -> list[tuple[int, str]]:
    """Makes a key that sorts names by the values of the numbers in them."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"([0-9]{1,18})", host)]
