"""The cluster of this process, found by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from jdist.cluster.resolvers.jax_env import jax_env
from jdist.cluster.resolvers.kubernetes import kubernetes, leader_worker_set
from jdist.cluster.resolvers.lsf import lsf
from jdist.cluster.resolvers.mpi import mpi
from jdist.cluster.resolvers.open_mpi import open_mpi
from jdist.cluster.resolvers.sagemaker import sagemaker
from jdist.cluster.resolvers.skypilot import skypilot
from jdist.cluster.resolvers.slurm import slurm
from jdist.cluster.resolvers.tf_config import tf_config
from jdist.cluster.resolvers.torchrun import torchrun
from jdist.cluster.resolvers.tpu import tpu
from jdist.cluster.resolvers.unplaced import allocation, unplaced
from jdist.cluster.resolvers.vertex import vertex
from jdist.cluster.spec import ClusterSpec

# What somebody has written for this job comes first, then what a launcher has told this very process, then what a platform
# says of its hosts. mpirun in a Slurm allocation starts its ranks by srun, one task a node, so that Slurm's variables are those
# of mpirun's helpers.
STARTED: tuple[Resolver, ...] = (
    tf_config,
    kubernetes,
    jax_env,
    torchrun,
    open_mpi,
    mpi,
    vertex,
    sagemaker,
    tpu,
    leader_worker_set,
    skypilot,
    slurm,
    lsf,
    unplaced,
)
DEFAULT: tuple[Resolver, ...] = (*STARTED, allocation)


def resolve(environ: Mapping[str, str] | None = None, resolvers: Sequence[Resolver] = DEFAULT) -> ClusterSpec:
    """Find the cluster that this process belongs to, in its environment.

    Args:
        environ: the environment; that of this process if None.
        resolvers: what to try, in order; the first that applies counts.

    Returns:
        The spec; `spec.resolver` says which resolver applied, `spec.origins` which variable each value came from, and
        `spec.describe()` both in words. If none applies, a cluster of this process alone.

    Raises:
        ClusterConfigError: the first resolver that applies cannot make sense of the environment, or the environment shows
            that several processes were started, but not where they are.

    Example:
        >>> resolve({"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from jax_env)
        >>> resolve({}).num_processes
        1
    """
    environ = os.environ if environ is None else environ
    for resolver in resolvers:
        spec = resolver(environ)
        if spec is not None:
            return spec
    return ClusterSpec(jobs={"worker": (None,)}, task_type="worker", task_index=0, resolver="nothing (one process)")


Resolver = Callable[[Mapping[str, str]], ClusterSpec | None]
"""A pure function of an environment: the cluster that it describes, None if it describes none of this kind."""
