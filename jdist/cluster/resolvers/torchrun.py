"""PyTorch's variables, set by torchrun, Kubeflow's PyTorchJob and Trainer, DeepSpeed, Azure ML, and many scripts."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.address import host_problem, join, refused, split
from jdist.cluster.resolvers.jax_env import ADDRESS, chosen_port, counted, derived_port
from jdist.cluster.resolvers.ranks import Launcher, ranked
from jdist.cluster.resolvers.slurm import COUNTS
from jdist.cluster.resolvers.slurm import NODES as STEP_NODES
from jdist.cluster.spec import ClusterSpec

TORCHRUN = Launcher(
    name="torchrun",
    resolver="torchrun",
    count="WORLD_SIZE",
    rank="RANK",
    local_count="LOCAL_WORLD_SIZE",
    local_rank="LOCAL_RANK",
    jobs=("MASTER_PORT",),
    command="set JAX_COORDINATOR_ADDRESS=HOST:PORT, or MASTER_ADDR and MASTER_PORT, for all ranks",
    shows_all=True,
)
HOST, PORT, AGENT = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"
NODES, NODE_RANK, NODES_HOST, NODES_PORT = "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"
_DEEPSPEED_LOCAL_COUNT = "LOCAL_SIZE"
_PORT = 29500  # torchrun's own
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def torchrun(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    torchrun sets them for each process, with LOCAL_RANK and LOCAL_WORLD_SIZE; DeepSpeed's launcher with LOCAL_RANK and
    LOCAL_SIZE; Azure ML with LOCAL_RANK alone; PyTorchJob for each pod. Process 0 has MASTER_PORT, or under torchrun, which
    listens there itself, a port that follows from it. Several ranks of a host take one GPU each, in order.

    Kubeflow Trainer sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT for torchrun; a program started
    there without torchrun is one process on each node, with all its GPUs.

    Returns:
        The spec, with workers alone; only process 0's address is known. None if there is one process, or RANK is not set.

    Raises:
        ClusterConfigError: a number is missing or is no number, process 0's host is not known, it is not clear whether this
            rank has its host for itself, or srun has started torchrun several times for one rank each.

    Example:
        >>> torchrun({"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"})
        ClusterSpec(worker 2, process 2 of 3; cluster: 3 worker; from torchrun)

    Source: PyTorch, "torchrun", "Environment variables"; kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go;
    kubeflow/trainer, pkg/runtime/framework/plugins/torch; deepspeed/launcher/launch.py; Azure ML, "Distributed GPU training
    guide", "Process initialization".
    """

    def text(name: str) -> str | None:
        return environment.text(environ, name)

    if text(TORCHRUN.local_rank) is None and text(NODE_RANK) is not None:  # RANK is then a node's as well
        coordinator = environment.address(environ, ADDRESS) or _address(environ, NODES_HOST, NODES_PORT)
        return counted(environ, "torchrun", coordinator, NODES_HOST, NODES, NODE_RANK)
    # Scripts set all but the rank for a whole job, whose tasks something else starts.
    if text(TORCHRUN.rank) is None and text(AGENT) is None:
        return None
    if text(TORCHRUN.count) is None and text(HOST) is None:
        return None
    if text(TORCHRUN.count) == "1":
        tasks = next((value for name in COUNTS if (value := text(name)) is not None), "1")
        if text(AGENT) is not None and text(STEP_NODES) is not None and tasks != "1":
            mend = (
                f"Give torchrun --nnodes={tasks} and --rdzv-endpoint=HOST:PORT, or start python by srun without it. To train "
                f"apart in each, use another strategy (mirrored), or unset {STEP_NODES}."
            )
            raise refused(TORCHRUN.count, 1, f"{tasks} or more here, as srun has started torchrun {tasks} times", mend)
        return None
    if not TORCHRUN.is_there(environ):
        return None
    if text(TORCHRUN.local_count) is None and (ranks_here := text(_DEEPSPEED_LOCAL_COUNT)) is not None:
        environ = {**environ, TORCHRUN.local_count: ranks_here}
    return ranked(environ, TORCHRUN, lambda: _rank_0(environ))


def _rank_0(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Finds the address of process 0 and its variables; None if they are not set."""
    if (address := _address(environ, HOST, PORT)) is None:
        return None
    local_count = environment.text(environ, TORCHRUN.local_count)
    if split(address)[0] in _LOOPBACK and local_count is not None:
        count = environ[TORCHRUN.count]
        allowed = f"an address that all hosts reach, as {local_count} of the {count} ranks are on this one"
        raise refused(HOST, environ[HOST], allowed, "Give torchrun --master-addr, the name of the first host.")
    return address, f"{HOST}, {PORT}"


def _address(environ: Mapping[str, str], host_variable: str, port_variable: str) -> str | None:
    """Reads the address of process 0; None if its host is not set."""
    host = environment.text(environ, host_variable)
    if host is None:
        return None
    if (wrong := host_problem(host)) is not None:
        raise refused(host_variable, host, "the name or address of rank 0's host", wrong)
    port = environment.port(environ, port_variable) or _PORT
    torchrun_listens = environment.text(environ, AGENT) is not None
    own_port, _ = chosen_port(environ, derived_port(port) if torchrun_listens else port, port_variable)
    return join(host, own_port)
