"""Signs that several processes were started whose cluster cannot be found: better refused than trained apart."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.refuse import refused
from jdist.cluster.resolvers.jax_variables import ADDRESS, COUNT, INDEX
from jdist.cluster.resolvers.kubernetes import COMPLETION_INDEX, POD
from jdist.cluster.resolvers.slurm import NODES

_ALONE = "To train in one process on its own, use another strategy (mirrored), or unset the variable."


def unplaced(environ: Mapping[str, str]) -> None:
    """Refuse an environment that tells of several processes, but not where they are. It never finds a cluster.

    Args:
        environ: the environment.

    Raises:
        ClusterConfigError: a coordinator's address alone; a pod of an Indexed Job that is told nothing else; a Slurm
            allocation outside srun; a rank of MPICH's or Intel MPI's.
    """
    if (found := environment.text(environ, ADDRESS)) is not None:
        raise refused(ADDRESS, found, f"set together with {COUNT} and {INDEX}", "Set all three, or none.")
    index = environment.text(environ, COMPLETION_INDEX)
    if index is not None and environment.text(environ, POD) is not None:
        mend = f"Set {ADDRESS} and {COUNT} in the manifest, as configs/cluster/jobset.yaml does. {_ALONE}"
        raise refused(COMPLETION_INDEX, index, f"set together with {ADDRESS} and {COUNT}", mend)
    for variable, mend in (
        ("SLURM_STEP_NUM_TASKS", f"Start every process by srun, which also sets {NODES}. {_ALONE}"),
        ("SLURM_NTASKS", f"Start every process by srun, which also sets {NODES}. {_ALONE}"),
        ("PMI_SIZE", f"Set {ADDRESS}, {COUNT} and {INDEX} for each rank (Open MPI's ranks are found). {_ALONE}"),
    ):
        count = environment.text(environ, variable)
        if count is not None and count != "1":
            raise refused(variable, count, "1 here", mend)
