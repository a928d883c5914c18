"""Which resolver applies first, and what happens when none does."""

import json
import subprocess
import sys

import pytest

from jdist import cluster
from jdist.cluster import resolve
from jdist.errors import ClusterConfigError

TF_CONFIG = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})}
JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
SAGEMAKER = {"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a"}
TPU = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "resolver"),
    [
        (TF_CONFIG | POD | JAX | TPU | SLURM, "tf_config"),
        (POD | JAX | TPU, "kubernetes"),
        (JAX | SLURM | MPI, "jax_env"),
        (SAGEMAKER, "sagemaker"),
        (TPU | POD, "tpu"),
        (MPI | SLURM, "open_mpi"),
        (SLURM, "slurm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_that_applies(environ, resolver):
    assert resolve(environ).resolver == resolver


def test_none_applies_one_process():
    spec = resolve({"PATH": "/bin"})
    assert (spec.num_processes, spec.process_index, spec.is_chief) == (1, 0, True)
    assert spec.address is None
    assert "nothing (one process)" in spec.describe()


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_COORDINATOR_ADDRESS"),
        (POD, "JOB_COMPLETION_INDEX"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "SLURM_NTASKS"),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "SLURM_STEP_NUM_TASKS"),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4", "SLURM_PROCID": "0"}, "SLURM_JOB_NUM_NODES"),
        ({"PMI_ID": "0"}, "PMI_ID"),
    ],
)
def test_signs_of_several_processes_that_cannot_be_found(environ, variable):
    with pytest.raises(ClusterConfigError, match=f"^{variable} is ") as info:
        resolve(environ)
    assert info.value.variable == variable
    assert resolve(environ, resolvers=()).num_processes == 1


@pytest.mark.parametrize("environ", [{"SLURM_NTASKS": "1"}, {"PMI_SIZE": "1"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}])
def test_one_process_is_no_sign(environ):
    assert resolve(environ).num_processes == 1


def test_own_resolvers():
    assert resolve(TF_CONFIG | JAX, resolvers=(cluster.jax_env,)).resolver == "jax_env"


def test_the_environment_of_this_process(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG["TF_CONFIG"])
    assert resolve().resolver == "tf_config"


def test_each_resolver_is_public():
    named = {"jax_env", "kubernetes", "open_mpi", "sagemaker", "simple", "slurm", "tf_config", "tpu", "union"}
    named |= {"leader_worker_set", "lsf", "mpi", "skypilot", "submitit", "torchrun", "vertex"}
    assert named | {"ClusterSpec", "DEFAULT", "Resolver", "preemption", "resolve"} == set(cluster.__all__)


def test_it_imports_no_jax_and_opens_nothing():
    program = """
import sys, json
import jdist
assert jdist.cluster.resolve({}).num_processes == 1
found = [name for name in ("jax", "numpy", "yaml", "socket", "grpc", "pydantic") if name in sys.modules]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
