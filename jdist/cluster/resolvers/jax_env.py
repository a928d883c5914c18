"""The cluster in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.refuse import refused
from jdist.cluster.resolvers.jax_variables import ADDRESS, COUNT, INDEX, chosen_devices
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
