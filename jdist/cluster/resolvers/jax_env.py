"""The cluster in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jdist.cluster import address, environment
from jdist.cluster.address import refused
from jdist.cluster.spec import ClusterSpec

MOST = 100_000  # processes of one job: more than any has, and a slip of the pen makes no longer list


def jax_env(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Read the three variables that JAX and many launchers know: where process 0 is, how many there are, which is this.

    It applies once JAX_NUM_PROCESSES or JAX_PROCESS_ID is set; then all three must be. JAX_COORDINATOR_ADDRESS alone
    only corrects the address that another resolver finds.

    Args:
        environ: the environment.

    Returns:
        The spec, with workers alone; the addresses of all but process 0 are not known.

    Raises:
        ClusterConfigError: one of the three is missing, or holds something else.

    Example:
        >>> jax_env({"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"})
        ClusterSpec(worker 3, process 3 of 4; cluster: 4 worker; from jax_env)
    """
    if environment.text(environ, COUNT) is None and environment.text(environ, INDEX) is None:
        return None
    return counted(
        environ,
        resolver="jax_env",
        coordinator=environment.address(environ, ADDRESS),
        address_variable=ADDRESS,
        count_variable=COUNT,
        index_variable=INDEX,
    )


def counted(
    environ: Mapping[str, str],
    *,
    resolver: str,
    coordinator: str | None,
    address_variable: str,
    count_variable: str,
    index_variable: str,
) -> ClusterSpec:
    """The spec in the coordinator's address, a variable with the number of processes and one with this one's index.

    Args:
        environ: the environment.
        resolver: the name to give as the spec's resolver.
        coordinator: the address of process 0; None is refused.
        address_variable: where it is from.
        count_variable: holds the number of processes.
        index_variable: holds this process's index.
    """
    mend = f"Set {address_variable}, {count_variable} and {index_variable} together on every process."
    count = environment.needed(environ, count_variable, mend, least=1)
    if count > MOST:
        raise refused(count_variable, count, f"at most {MOST}", mend)
    index = environment.index(environ, index_variable, count, count_variable, mend)
    if coordinator is None:
        raise refused(address_variable, None, "the address of process 0, host:port", mend)
    devices, devices_from = chosen_devices(environ)
    return ClusterSpec(
        jobs={"worker": (coordinator,) + (None,) * (count - 1)},
        task_type="worker",
        task_index=index,
        resolver=resolver,
        origins={
            "jobs": f"{address_variable}, {count_variable}",
            "task_type": count_variable,
            "task_index": index_variable,
            **devices_from,
        },
        local_device_ids=devices,
    )


ADDRESS = "JAX_COORDINATOR_ADDRESS"
PORT = "JAX_COORDINATOR_PORT"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
DEVICES = "JAX_LOCAL_DEVICE_IDS"
_FIRST_PORT, _PORTS = 20000, 4096


def chosen_port(environ: Mapping[str, str], default: int, default_from: str) -> tuple[int, str]:
    """The port of process 0, and where it came from: JAX_COORDINATOR_PORT, or that of JAX_COORDINATOR_ADDRESS.

    Raises:
        ClusterConfigError: no port, or the two differ.
    """
    port, at = environment.port(environ, PORT), environment.address(environ, ADDRESS)
    if port is not None and at is not None and address.split(at)[1] != port:
        raise refused(PORT, port, f"the port in {ADDRESS}, which is {at}", "Unset one of the two.")
    if at is not None:
        return address.split(at)[1], ADDRESS
    return (default, default_from) if port is None else (port, PORT)


def chosen_coordinator(
    environ: Mapping[str, str], processes: Sequence[str | None], *sources: str
) -> tuple[tuple[str | None, ...], str]:
    """The processes' addresses, process 0 where JAX_COORDINATOR_ADDRESS has it.

    Args:
        environ: the environment.
        processes: the addresses of all processes.
        sources: the variables that they came from; empty ones and repetitions are left out.

    Returns:
        The addresses, and the variables with commas between them.
    """
    at = environment.address(environ, ADDRESS)
    if at is not None and processes:
        processes, sources = (at, *processes[1:]), (*sources, ADDRESS)
    return tuple(processes), ", ".join(dict.fromkeys(filter(None, sources)))


def derived_port(number: int) -> int:
    """A port for process 0 that all processes compute from a job's number, below the ports of outgoing connections.

    It is even: the port after it belongs to the same job. Jobs with neighbouring numbers have different ports.

    Example:
        >>> derived_port(0), derived_port(4095), derived_port(4096)
        (20000, 28190, 20000)
    """
    return _FIRST_PORT + 2 * (number % _PORTS)


def chosen_devices(
    environ: Mapping[str, str], found: tuple[int, ...] | None = None, origin: str | None = None
) -> tuple[tuple[int, ...] | None, dict[str, str]]:
    """The GPUs in JAX_LOCAL_DEVICE_IDS, "0,1", or what was found elsewhere.

    Args:
        environ: the environment.
        found: what was found elsewhere; None: all.
        origin: where that came from; None: it is only the default.

    Returns:
        The numbers, None for all; and the spec's `origins` of them.

    Raises:
        ClusterConfigError: something else than whole numbers, or one twice.
    """
    written = environment.text(environ, DEVICES)
    if written is None:
        return found, {} if origin is None else {"local_device_ids": origin}
    ids = [environment.whole_number(part.strip()) for part in written.split(",")]
    if None in ids or len(set(ids)) < len(ids):
        raise refused(DEVICES, written, "whole numbers with commas between them, each once", "Write 0,1.")
    return tuple(i for i in ids if i is not None), {"local_device_ids": DEVICES}
