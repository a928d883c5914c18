"""Many processes as one job: finding the cluster, joining it, watching it.

Start at `spec.ClusterSpec`, which `resolvers` read from the environment, and at `runtime.Runtime`, this
process's part in the job. `watch` knows which processes are alive and where they are; `stop` ends all after
the same step; `exit_status` is what a launcher reads.

May import: support, errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jdist.cluster.resolvers.host_lists import lsf, sagemaker, skypilot
from jdist.cluster.resolvers.jax_env import jax_env
from jdist.cluster.resolvers.launchers import mpi, open_mpi, submitit, torchrun
from jdist.cluster.resolvers.pods import kubernetes, leader_worker_set, tpu
from jdist.cluster.resolvers.resolve import DEFAULT, Resolver, resolve, simple, union
from jdist.cluster.resolvers.slurm import slurm
from jdist.cluster.resolvers.tf_config import tf_config, vertex
from jdist.cluster.spec import ClusterSpec

if TYPE_CHECKING:
    from jdist.cluster.stop import preemption as preemption

__all__ = [
    "DEFAULT",
    "ClusterSpec",
    "Resolver",
    "jax_env",
    "kubernetes",
    "leader_worker_set",
    "lsf",
    "mpi",
    "open_mpi",
    "preemption",
    "resolve",
    "sagemaker",
    "simple",
    "skypilot",
    "slurm",
    "submitit",
    "tf_config",
    "torchrun",
    "tpu",
    "union",
    "vertex",
]


def __getattr__(name: str) -> Any:
    if name == "preemption":  # which needs JAX; reading the cluster does not
        from jdist.cluster.stop import preemption

        return preemption
    raise AttributeError(f"module 'jdist.cluster' has no attribute {name!r}")
