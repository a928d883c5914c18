"""Which GPUs of its node a Slurm task takes."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.refuse import refused

ON_NODE = "SLURM_GPUS_ON_NODE"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
PLATFORMS = "JAX_PLATFORMS"
_NONE = ("-1", "NoDevFiles")  # what stands for no GPU


def own_gpus(environ: Mapping[str, str], tasks: int, local: int) -> tuple[tuple[int, ...] | None, str | None]:
    """The numbers of this task's GPUs among those that it sees, and where they came from.

    Args:
        environ: the environment.
        tasks: how many tasks this node has.
        local: this task's number among them.

    Returns:
        None for all that it sees: it is alone, or Slurm has shown each task its own, or there is none. Otherwise an equal
        share.

    Raises:
        ClusterConfigError: all tasks see all GPUs, and their number cannot be shared equally.

    Example:
        >>> own_gpus({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, tasks=2, local=1)
        ((2, 3), 'SLURM_GPUS_ON_NODE, SLURM_LOCALID')
    """
    visible = next((name for name in VISIBLE if environment.text(environ, name) is not None), None)
    on_node = environment.number(environ, ON_NODE, "Slurm sets it.")
    if tasks == 1 or visible is None or not on_node or environment.text(environ, PLATFORMS) == "cpu":
        return None, None
    seen = [entry for entry in environ[visible].split(",") if entry.strip() and entry.strip() not in _NONE]
    if len(seen) < on_node:
        return None, None
    if on_node % tasks:
        raise refused(
            ON_NODE,
            on_node,
            f"a multiple of the {tasks} tasks of this node, which all see all its GPUs ({visible}={environ[visible][:80]})",
            "Start as many tasks as there are GPUs, or one a node, or give each its own by srun --gpus-per-task=1.",
        )
    share = on_node // tasks
    return tuple(range(local * share, (local + 1) * share)), f"{ON_NODE}, SLURM_LOCALID"
