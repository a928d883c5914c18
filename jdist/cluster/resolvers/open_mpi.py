"""The cluster of a program that Open MPI's mpirun started: OMPI_COMM_WORLD_*."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join
from jdist.cluster.refuse import refused
from jdist.cluster.resolvers.jax_env import MOST
from jdist.cluster.resolvers.jax_variables import ADDRESS, chosen_coordinator, chosen_devices, chosen_port, derived_port
from jdist.cluster.spec import ClusterSpec

COUNT, INDEX = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
LOCAL_COUNT, LOCAL_INDEX = "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
LAUNCHER = "OMPI_MCA_orte_hnp_uri"
NAMESPACE = "PMIX_NAMESPACE"
_URI = re.compile(r"([0-9]{1,18})\.[0-9]+;tcp(?:://([^,:]+)|6://\[([^,\]]+)).*", re.DOTALL)
_MEND = "mpirun sets it; start the program by mpirun, or unset all OMPI_ variables."


def open_mpi(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read this process's rank, how many there are, and where mpirun runs.

    Process 0 must be found by the others. mpirun up to version 4 says on which host it runs itself, and rank 0 is
    taken to be there; when all ranks are on one host, that is localhost. Else, or if rank 0 runs on another host, say
    where it is: `mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT ...`.

    Several ranks of a host take one GPU each, in order. Where CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES is set, each
    rank takes all that it sees; a rank alone on its host takes all GPUs.

    Args:
        environ: the environment.

    Returns:
        The spec, with workers alone; the addresses of all but process 0 are not known. None if mpirun did not start this.

    Raises:
        ClusterConfigError: a number is missing or is none, or process 0's host is not known.

    Example:
        >>> open_mpi({
        ...     "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        ...     "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        ... })
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from open_mpi)

    Source: Open MPI, "Environment variables"; jax/_src/clusters/ompi_cluster.py.
    """
    if environment.text(environ, COUNT) is None and environment.text(environ, INDEX) is None:
        return None
    count = environment.needed(environ, COUNT, _MEND, least=1)
    if count > MOST:
        raise refused(COUNT, count, f"at most {MOST}", _MEND)
    index = environment.index(environ, INDEX, count, COUNT, _MEND)
    local_count = environment.needed(environ, LOCAL_COUNT, _MEND, least=1)
    local_index = environment.index(environ, LOCAL_INDEX, local_count, LOCAL_COUNT, _MEND)
    if local_count > count:
        raise refused(LOCAL_COUNT, local_count, f"at most {COUNT}, which is {count}", _MEND)
    first, first_from = _first(environ, everyone_here=local_count == count)
    addresses, addresses_from = chosen_coordinator(environ, [first] + [None] * (count - 1), *first_from, COUNT)
    one_each = local_count > 1 and not any(
        environment.text(environ, name) for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    )
    devices, devices_from = chosen_devices(
        environ, (local_index,) if one_each else None, LOCAL_INDEX if one_each else None
    )
    return ClusterSpec(
        jobs={"worker": addresses},
        task_type="worker",
        task_index=index,
        resolver="open_mpi",
        origins={"jobs": addresses_from, "task_type": COUNT, "task_index": INDEX, **devices_from},
        local_device_ids=devices,
    )


def _first(environ: Mapping[str, str], *, everyone_here: bool) -> tuple[str | None, tuple[str, ...]]:
    """Process 0's address and the variables it came from; None if it is in JAX_COORDINATOR_ADDRESS."""
    uri = environment.text(environ, LAUNCHER)
    if environment.address(environ, ADDRESS) is not None:
        return None, ()
    if uri is None and not everyone_here:
        raise refused(
            ADDRESS,
            None,
            f"the address of rank 0, host:port, as {LAUNCHER} is not set and the ranks are on several hosts",
            "Add -x JAX_COORDINATOR_ADDRESS=HOST:PORT to mpirun.",
        )
    if uri is None:
        job = zlib.crc32(environ.get(NAMESPACE, "").encode("utf-8", "replace"))
        port, port_from = chosen_port(environ, derived_port(job), NAMESPACE)
        return join("localhost", port), (LOCAL_COUNT, port_from)
    parts = _URI.fullmatch(uri)
    host = "" if parts is None else parts[2] or parts[3]
    if parts is None or host_problem(host) is not None:
        raise refused(LAUNCHER, uri, "as 1531576320.0;tcp://10.96.0.1:34911", f"Set {ADDRESS}.")
    port, port_from = chosen_port(environ, derived_port(int(parts[1]) // 4096), LAUNCHER)  # jobs count by 4096
    return join(host, port), (LAUNCHER, port_from)
