"""JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; JAX's other variables, which correct any resolver."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from jdist.cluster import address, environment
from jdist.cluster.address import refused
from jdist.cluster.spec import ClusterSpec

ADDRESS = "JAX_COORDINATOR_ADDRESS"
PORT = "JAX_COORDINATOR_PORT"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
DEVICES = "JAX_LOCAL_DEVICE_IDS"
MOST = 100_000  # processes of a job, more than any has: the longest list that a typing error can make
_FIRST_PORT, _PORTS = 20000, 4096
Gpus = tuple[tuple[int, ...] | None, str | None]  # those that a process takes (None: all), and their variables


def jax_env(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads JAX's three variables: the address of process 0, the number of processes, this one's index.

    Args:
        environ: the environment. The resolver applies where JAX_NUM_PROCESSES or JAX_PROCESS_ID is set; then all three must
            be. JAX_COORDINATOR_ADDRESS alone only replaces the address of process 0 that another resolver finds.

    Example:
        >>> jax_env({"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"})
        ClusterSpec(worker 3, process 3 of 4; cluster: 4 worker; from jax_env)
    """
    if environment.first_set(environ, COUNT, INDEX) is None:
        return None
    return counted(environ, "jax_env", environment.address(environ, ADDRESS), (ADDRESS, COUNT, INDEX))


def counted(
    environ: Mapping[str, str], resolver: str, coordinator: str | None, variables: tuple[str, str, str]
) -> ClusterSpec:
    """Makes the spec from the coordinator's address, and the variables of address, count and index."""
    address_from, count_from, index_from = variables
    mend = f"Set {address_from}, {count_from} and {index_from} together on every process."
    count = environment.needed(environ, count_from, mend, least=1, most=MOST)
    index = environment.index(environ, index_from, count, count_from, mend)
    if coordinator is None:
        raise refused(address_from, None, "the address of process 0, host:port", mend)
    addresses = (coordinator,) + (None,) * (count - 1)
    return workers_spec(environ, resolver, addresses, index, (f"{address_from}, {count_from}", count_from, index_from))


def workers_spec(
    environ: Mapping[str, str],
    resolver: str,
    addresses: Sequence[str | None],
    index: int,
    origins: tuple[str, str, str],
    gpus: Gpus = (None, None),
) -> ClusterSpec:
    """Makes the spec of a job of workers alone; see `make_spec`."""
    return make_spec(environ, resolver, {"worker": tuple(addresses)}, ("worker", index), origins, gpus)


def make_spec(
    environ: Mapping[str, str],
    resolver: str,
    jobs: Mapping[str, Any],
    task: tuple[str, int],
    origins: tuple[str, str, str],
    gpus: Gpus = (None, None),
) -> ClusterSpec:
    """Makes a spec; `origins` are the variables of jobs, task type and index, and JAX_LOCAL_DEVICE_IDS replaces `gpus`."""
    devices, devices_from = chosen_devices(environ, *gpus)
    return ClusterSpec(
        jobs=jobs,
        task_type=task[0],
        task_index=task[1],
        resolver=resolver,
        origins={**dict(zip(("jobs", "task_type", "task_index"), origins, strict=True)), **devices_from},
        local_device_ids=devices,
    )


def chosen_port(environ: Mapping[str, str], default: int, default_from: str) -> tuple[int, str]:
    """Reads process 0's port and its variable: JAX_COORDINATOR_PORT or JAX_COORDINATOR_ADDRESS."""
    port, at = environment.port(environ, PORT), environment.address(environ, ADDRESS)
    if port is not None and at is not None and address.split(at)[1] != port:
        raise refused(PORT, port, f"the port in {ADDRESS}, which is {at}", "Unset one of the two.")
    if at is not None:
        return address.split(at)[1], ADDRESS
    return (default, default_from) if port is None else (port, PORT)


def chosen_coordinator(
    environ: Mapping[str, str], processes: Sequence[str | None], *sources: str
) -> tuple[tuple[str | None, ...], str]:
    """Moves process 0 to JAX_COORDINATOR_ADDRESS; returns all addresses and their variables."""
    at = environment.address(environ, ADDRESS)
    if at is not None and processes:
        processes, sources = (at, *processes[1:]), (*sources, ADDRESS)
    return tuple(processes), ", ".join(dict.fromkeys(filter(None, sources)))


def derived_port(job: int | str) -> int:
    """Computes process 0's port from a job's number or name: even, the next is the watch's."""
    # It lies below the ports of outgoing connections. Jobs with neighbouring numbers have different
    # ports.
    number = job if isinstance(job, int) else zlib.crc32(job.encode("utf-8", "replace"))
    return _FIRST_PORT + 2 * (number % _PORTS)


def chosen_devices(
    environ: Mapping[str, str], default: tuple[int, ...] | None = None, default_from: str | None = None
) -> tuple[tuple[int, ...] | None, dict[str, str]]:
    """Reads this process's GPUs and their origins; JAX_LOCAL_DEVICE_IDS ("0,1") overrides."""
    written = environment.text(environ, DEVICES)
    if written is None:
        return default, {} if default_from is None else {"local_device_ids": default_from}
    ids = [environment.whole_number(part.strip()) for part in written.split(",")]
    if None in ids or len(set(ids)) < len(ids):
        raise refused(DEVICES, written, "whole numbers with commas between them, each once", "Write 0,1.")
    return tuple(i for i in ids if i is not None), {"local_device_ids": DEVICES}
