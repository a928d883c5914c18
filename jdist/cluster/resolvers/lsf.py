"""The cluster of an LSF job whose tasks `blaunch` has started: LSB_MCPU_HOSTS and LSF_PM_TASKID."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join, refused
from jdist.cluster.resolvers.jax_env import (
    ADDRESS,
    COUNT,
    INDEX,
    chosen_coordinator,
    chosen_devices,
    chosen_port,
    derived_port,
)
from jdist.cluster.spec import ClusterSpec

HOSTS, TASK, JOB = "LSB_MCPU_HOSTS", "LSF_PM_TASKID", "LSB_JOBID"
_MEND = "LSF sets it; start the tasks by blaunch."


def lsf(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read the hosts of this job, "hostA 1 hostB 1", and which of blaunch's tasks this is, from 1 on.

    It needs one slot on each host (`bsub -n 4 -R "span[ptile=1]" blaunch ...`): of several slots LSF does not say how many
    tasks blaunch has started. jsrun's ranks are those of `mpi`.

    Args:
        environ: the environment.

    Returns:
        The spec, with workers alone; None if blaunch has not started this, or it is the only task.

    Raises:
        ClusterConfigError: several slots on a host, or a variable that is missing or holds something else.

    Example:
        >>> lsf({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "hostA 1 hostB 1", "LSF_PM_TASKID": "2"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from lsf)

    Source: IBM Spectrum LSF, "blaunch", "Environment variables"; openpmix/prrte, src/mca/ess/lsf.
    """
    listed = environment.text(environ, HOSTS)
    if environment.text(environ, TASK) is None or listed is None:
        return None
    slots = hosts_of(listed)
    if sum(slots.values()) == 1 or (len(slots) == 1 and environment.text(environ, TASK) == "1"):
        return None  # perhaps the job's own program
    if set(slots.values()) != {1}:
        raise refused(
            HOSTS,
            listed,
            "hosts of one slot each, as LSF does not say how many tasks blaunch has started",
            f'Ask for them by bsub -R "span[ptile=1]", or set {ADDRESS}, {COUNT} and {INDEX} for each task.',
        )
    hosts = list(slots)
    task = environment.needed(environ, TASK, _MEND, least=1)
    if task > len(hosts):
        raise refused(TASK, task, f"from 1 to {len(hosts)}, the number of hosts in {HOSTS}", _MEND)
    port, port_from = chosen_port(environ, derived_port(environment.needed(environ, JOB, _MEND)), JOB)
    addresses, addresses_from = chosen_coordinator(environ, [join(host, port) for host in hosts], HOSTS, port_from)
    devices, devices_from = chosen_devices(environ)
    return ClusterSpec(
        jobs={"worker": addresses},
        task_type="worker",
        task_index=task - 1,
        resolver="lsf",
        origins={"jobs": addresses_from, "task_type": HOSTS, "task_index": TASK, **devices_from},
        local_device_ids=devices,
    )


def hosts_of(listed: str) -> dict[str, int]:
    """How many slots each host has.

    Example:
        >>> hosts_of("hostA 2 hostB 1")
        {'hostA': 2, 'hostB': 1}
    """
    parts = listed.split()
    slots = [environment.whole_number(part) for part in parts[1::2]]
    if len(parts) % 2 or not all(slots) or any(host_problem(host) for host in parts[::2]):
        raise refused(HOSTS, listed, "hosts with their numbers of slots, as hostA 2 hostB 1", _MEND)
    return {host: slot or 0 for host, slot in zip(parts[::2], slots, strict=True)}
