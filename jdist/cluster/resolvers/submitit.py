"""The tasks of submitit's local executor; under its Slurm executor srun starts them, whose variables count."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster import environment
from jdist.cluster.resolvers.ranks import Launcher, ranked
from jdist.cluster.spec import ClusterSpec

LOCAL = Launcher(
    name="submitit's local executor",
    count="SUBMITIT_LOCAL_NTASKS",
    rank="SUBMITIT_LOCAL_GLOBALID",
    local_count="SUBMITIT_LOCAL_NTASKS",
    local_rank="SUBMITIT_LOCAL_LOCALID",
    jobs=("SUBMITIT_LOCAL_JOB_ID",),
    resolver="submitit",
    command="set JAX_COORDINATOR_ADDRESS=HOST:PORT before the job is submitted",
    needs_local=True,
    shows_all=True,
)


def submitit(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Reads the variables of submitit's local executor, whose tasks are all on this host.

    Each of several tasks takes one GPU.

    Returns:
        The spec, with workers alone; None if that executor has not started this process.

    Raises:
        ClusterConfigError: a number is missing or is no number.

    Example:
        >>> submitit({
        ...     "SUBMITIT_LOCAL_JOB_ID": "4711", "SUBMITIT_LOCAL_NTASKS": "2",
        ...     "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_LOCALID": "1",
        ... })
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from submitit)

    Source: submitit/local/local.py, `Controller.start_tasks`.
    """
    # The executor's own process has the number of tasks alone.
    if all(environment.text(environ, name) is None for name in (LOCAL.rank, LOCAL.local_rank, *LOCAL.jobs)):
        return None
    return ranked(environ, LOCAL)
