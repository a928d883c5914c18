"""Many processes as one job: finding the cluster, starting it, watching it."""

from jdist.cluster.jax_env import jax_env
from jdist.cluster.kubernetes import kubernetes
from jdist.cluster.open_mpi import open_mpi
from jdist.cluster.resolve import DEFAULT, resolve
from jdist.cluster.resolver import Resolver
from jdist.cluster.sagemaker import sagemaker
from jdist.cluster.simple import simple
from jdist.cluster.slurm import slurm
from jdist.cluster.spec import ClusterSpec
from jdist.cluster.tf_config import tf_config
from jdist.cluster.tpu import tpu
from jdist.cluster.union import union

__all__ = [
    "DEFAULT",
    "ClusterSpec",
    "Resolver",
    "jax_env",
    "kubernetes",
    "open_mpi",
    "resolve",
    "sagemaker",
    "simple",
    "slurm",
    "tf_config",
    "tpu",
    "union",
]
