"""Cloud TPU slices: TPU_WORKER_HOSTNAMES, TPU_WORKER_ID, MEGASCALE_*."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join, refused
from jdist.cluster.resolvers.jax_env import chosen_coordinator, chosen_port, workers_spec
from jdist.cluster.spec import ClusterSpec

HOSTS = "TPU_WORKER_HOSTNAMES"
ADDRESSES = "TPU_PROCESS_ADDRESSES"
INDEX = "TPU_WORKER_ID"
TASK = "CLOUD_TPU_TASK_ID"
FIRST, SLICES, SLICE = "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"
PORT = 8482  # JAX's own choice on TPUs
_MEND = "GKE sets the variables of a slice on all its hosts; set them all, or none."
_MEND_SLICES = f"Set {FIRST}, {SLICES} and {SLICE} together on every host."


def tpu(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads the hosts of a TPU slice and this process's place among them.

    GKE sets these variables in every pod that asks for TPUs: one process on each host. Several processes on a host, each
    with chips of its own, are in TPU_PROCESS_ADDRESSES and CLOUD_TPU_TASK_ID. Of several slices (multislice) GKE also sets
    MEGASCALE_COORDINATOR_ADDRESS, MEGASCALE_NUM_SLICES and MEGASCALE_SLICE_ID; their processes are numbered slice by slice.
    MEGASCALE_COORDINATOR_ADDRESS alone tells where process 0 of one slice is.

    On a Cloud TPU VM only the metadata server knows the hosts, and a resolver opens no connection:
    configs/cluster/cloud_tpu.sh asks that server, and sets the variables of `jax_env`. The chips of a host, and their
    wiring, are left to JAX.

    Example:
        >>> tpu({"TPU_WORKER_HOSTNAMES": "t-0.tpu,t-1.tpu", "TPU_WORKER_ID": "1"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from tpu)

    Source: jax/_src/clusters/cloud_tpu_cluster.py; GKE, "Deploy TPU multislices".
    """
    variable = environment.first_set(environ, ADDRESSES, HOSTS)
    if variable is None:
        return None
    listed = environ[variable].strip()
    if listed == "localhost" and environment.text(environ, INDEX) is None:
        return None  # set by jdist/strategies/libtpu.py to keep libtpu quiet without a TPU; GKE sets an index, too
    entries = [_split(entry.strip(), variable) for entry in listed.split(",")]
    for i, entry in enumerate(entries):
        if entry in entries[:i] or (variable == HOSTS and entry[0] in [host for host, _ in entries[:i]]):
            raise refused(variable, entry[0], "there once only", _MEND, field=f"[{i}]")
    hosts = [host for host, _ in entries]
    index, index_from = 0, TASK if variable == ADDRESSES and environment.text(environ, TASK) is not None else INDEX
    if len(hosts) > 1 or environment.text(environ, index_from) is not None:
        index = environment.index(environ, index_from, len(hosts), variable, _MEND)
    port, port_from = chosen_port(environ, _free_port(entries), "")
    slices, own_slice = _slices(environ)
    processes: list[str | None] = [None] * (slices * len(hosts))
    processes[own_slice * len(hosts) : (own_slice + 1) * len(hosts)] = [
        join(host, port + 2 * hosts[:i].count(host)) for i, host in enumerate(hosts)
    ]
    sources = [variable]
    if slices > 1 or (environment.text(environ, SLICES) is None and environment.text(environ, FIRST) is not None):
        processes[0] = join(_first_host(environ), port)
        sources += [FIRST, SLICES] if slices > 1 else [FIRST]
    addresses, jobs_from = chosen_coordinator(environ, processes, *sources, port_from)
    index_from = index_from if slices == 1 else f"{SLICE}, {index_from}"
    return workers_spec(environ, "tpu", addresses, own_slice * len(hosts) + index, (jobs_from, variable, index_from))


def _split(entry: str, variable: str) -> tuple[str, int | None]:
    """Splits an entry into its host and its port, which those of TPU_PROCESS_ADDRESSES have."""
    host, colon, port = entry.rpartition(":")
    number = environment.whole_number(port)
    if not colon or number is None or (":" in host and not host.startswith("[")):
        host, number = entry, None
    host = host.removeprefix("[").removesuffix("]")
    if (wrong := host_problem(host)) is not None:
        raise refused(variable, entry, "hosts with commas between them", wrong)
    return host, number


def _free_port(entries: list[tuple[str, int | None]]) -> int:
    """Finds two ports in a row that are not libtpu's: eight processes of a host have 8476 to 8483."""
    of_libtpu = {port for _, port in entries}
    return next(port for port in range(PORT, PORT + 4 * len(entries) + 4, 2) if not {port, port + 1} & of_libtpu)


def _slices(environ: Mapping[str, str]) -> tuple[int, int]:
    """Reads the number of slices, and this slice's index."""
    slices = environment.number(environ, SLICES, _MEND_SLICES, least=1, most=10_000)
    if slices is None:
        if (index := environment.text(environ, SLICE)) is not None:
            raise refused(SLICES, None, f"set, as {SLICE} is {index[:80]}", _MEND_SLICES)
        return 1, 0
    if slices == 1:
        return 1, 0
    return slices, environment.index(environ, SLICE, slices, SLICES, _MEND_SLICES)


def _first_host(environ: Mapping[str, str]) -> str:
    """Finds the host of process 0 in the first slice; the port beside it is that of another service."""
    address = environment.text(environ, FIRST)
    if address is None:
        raise refused(FIRST, None, "the first host of the first slice", _MEND_SLICES)
    return _split(address, FIRST)[0]
