"""The cluster of an Amazon SageMaker training job: SM_HOSTS and SM_CURRENT_HOST."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join, refused
from jdist.cluster.resolvers.jax_env import chosen_coordinator, chosen_devices, chosen_port
from jdist.cluster.spec import ClusterSpec

HOSTS = "SM_HOSTS"
CURRENT = "SM_CURRENT_HOST"
PORT = 2223  # free on every host: nothing else runs there


def sagemaker(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read SM_HOSTS, a JSON list of all hosts, and SM_CURRENT_HOST: one process on each host, with all its GPUs.

    The processes are numbered in the hosts' order, algo-2 before algo-10. Where SageMaker starts the program by mpirun or
    torchrun, with several processes on a host, `open_mpi` and `torchrun` come first.

    Args:
        environ: the environment.

    Returns:
        The spec, with workers alone; None if SM_HOSTS is not set.

    Raises:
        ClusterConfigError: no list of hosts, a host twice, or this host is not among them.

    Example:
        >>> sagemaker({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from sagemaker)

    Source: aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md.
    """
    source = environment.text(environ, HOSTS)
    if source is None:
        return None
    hosts = _hosts(source)
    current = environment.text(environ, CURRENT)
    if current not in hosts:
        raise refused(CURRENT, current, f"one of the hosts in {HOSTS}, {source[:80]}", "SageMaker sets both.")
    port, port_from = chosen_port(environ, PORT, "")
    addresses, addresses_from = chosen_coordinator(environ, [join(host, port) for host in hosts], HOSTS, port_from)
    devices, devices_from = chosen_devices(environ)
    return ClusterSpec(
        jobs={"worker": addresses},
        task_type="worker",
        task_index=hosts.index(current),
        resolver="sagemaker",
        origins={"jobs": addresses_from, "task_type": HOSTS, "task_index": CURRENT, **devices_from},
        local_device_ids=devices,
    )


def first_of_ranks(environ: Mapping[str, str], master: str) -> tuple[str, str]:
    """The address of process 0 under SageMaker's mpirun, and where it is from.

    mpirun runs on the host of rank 0, and hands its SM_CURRENT_HOST on to all ranks.

    Args:
        environ: the environment.
        master: SM_CURRENT_HOST.
    """
    if (wrong := host_problem(master)) is not None:
        raise refused(CURRENT, master, "the name of a host", wrong)
    port, port_from = chosen_port(environ, PORT, "")
    return join(master, port), ", ".join(filter(None, (CURRENT, port_from)))


def _hosts(source: str) -> list[str]:
    mend = 'SageMaker sets it, as ["algo-1", "algo-2"].'
    try:
        hosts = json.loads(source)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts:
        raise refused(HOSTS, source, "a JSON list of hosts", mend)
    for i, host in enumerate(hosts):
        if not isinstance(host, str) or host_problem(host) is not None:
            raise refused(HOSTS, host, "the name of a host", mend, field=f"[{i}]")
        if host in hosts[:i]:
            raise refused(HOSTS, host, "there once only", mend, field=f"[{i}]")
    return sorted(hosts, key=_numeric)


def _numeric(host: str) -> list[tuple[int, str]]:
    """A key that sorts numbers within names by their value."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"([0-9]{1,18})", host)]
