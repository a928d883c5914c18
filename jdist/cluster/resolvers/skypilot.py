"""The cluster of a SkyPilot task on several nodes: SKYPILOT_NODE_IPS and SKYPILOT_NODE_RANK."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join, refused
from jdist.cluster.resolvers.jax_env import chosen_coordinator, chosen_devices, chosen_port, derived_port
from jdist.cluster.spec import ClusterSpec

NODES, RANK, COUNT, TASK = "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_TASK_ID"
_MEND = "SkyPilot sets it in `run`; start the program there, on every node."


def skypilot(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read SKYPILOT_NODE_IPS, an address a line, and SKYPILOT_NODE_RANK: one process on each node, with all its GPUs.

    Args:
        environ: the environment.

    Returns:
        The spec, with workers alone; None if there is one node, or the variables are not set.

    Raises:
        ClusterConfigError: a node twice, a rank that is none of theirs, or another number of nodes.

    Example:
        >>> skypilot({"SKYPILOT_NODE_IPS": "10.0.0.4\\n10.0.0.5", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from skypilot)

    Source: SkyPilot, "Distributed multi-node jobs", "Environment variables".
    """
    hosts = (environment.text(environ, NODES) or "").split()
    count = environment.number(environ, COUNT, _MEND, least=1)
    if count is None:
        count = len(hosts)
    if count <= 1:
        return None
    if not hosts:
        raise refused(NODES, None, f"set here, to the addresses of {count} nodes", _MEND)
    if len(hosts) != count:
        raise refused(COUNT, count, f"{len(hosts)}, the number of addresses in {NODES}", _MEND)
    for i, host in enumerate(hosts):
        if (wrong := host_problem(host)) is not None:
            raise refused(NODES, host, "an address a line", wrong, field=f"[{i}]")
        if host in hosts[:i]:
            raise refused(NODES, host, "there once only", _MEND, field=f"[{i}]")
    index = environment.index(environ, RANK, count, NODES, _MEND)
    job = zlib.crc32(environ.get(TASK, "").encode("utf-8", "replace"))
    port, port_from = chosen_port(environ, derived_port(job), TASK)
    addresses, addresses_from = chosen_coordinator(environ, [join(host, port) for host in hosts], NODES, port_from)
    devices, devices_from = chosen_devices(environ)
    return ClusterSpec(
        jobs={"worker": addresses},
        task_type="worker",
        task_index=index,
        resolver="skypilot",
        origins={"jobs": addresses_from, "task_type": NODES, "task_index": RANK, **devices_from},
        local_device_ids=devices,
    )
