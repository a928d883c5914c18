"""Which resolver applies first, what happens when none does; clusters from arguments, and several joined."""

import json
import subprocess
import sys

import pytest

from jdist import cluster
from jdist.cluster import jax_env, resolve, simple, slurm, tf_config, union
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
    "environ",
    [
        {"JAX_COORDINATOR_ADDRESS": "a:1"},
        POD,
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "1", "SLURM_PROCID": "1"},
        {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"},
        {"PMI_ID": "0"},
    ],
)
def test_signs_of_several_processes_that_cannot_be_found(environ):
    variable = next(name for name in environ if name != "KUBERNETES_SERVICE_HOST")
    with pytest.raises(ClusterConfigError, match=f"^{variable} is ") as info:
        resolve(environ)
    assert info.value.variable == variable
    assert resolve(environ, resolvers=()).num_processes == 1


def test_own_resolvers():
    assert resolve(TF_CONFIG | JAX, resolvers=(jax_env,)).resolver == "jax_env"


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


CONFIG = {
    "TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}),
}
SERVERS = simple(jobs={"ps": ["p:1", "q:1"]}, task_type="ps", task_index=0)


def test_simple():
    spec = simple(jobs={"worker": ["a:1", "b:1"]}, task_type="worker", task_index=1, local_device_ids=[0])
    assert (spec.process_index, spec.address, spec.local_device_ids, spec.resolver) == (1, "b:1", (0,), "simple")
    assert spec.origins["jobs"] == "`jobs`"


def test_simple_names_the_argument():
    with pytest.raises(ClusterConfigError, match="`task_index`: `task_index` is 7"):
        simple(jobs={"worker": ["a:1"]}, task_type="worker", task_index=7)


def test_the_first_part_says_which_task_this_is():
    spec = union(tf_config, SERVERS)(CONFIG)
    assert dict(spec.jobs) == {"worker": ("a:1", "b:1"), "ps": ("p:1", "q:1")}
    assert (spec.task_type, spec.task_index, spec.num_ps) == ("worker", 1, 2)
    assert spec.resolver == "union(tf_config, simple)"
    assert spec.origins["jobs"] == "TF_CONFIG, `jobs`"
    other = union(SERVERS, tf_config)(CONFIG)
    assert (other.task_type, other.task_index) == ("ps", 0)


def test_tasks_of_one_job_follow_each_other():
    more = simple(jobs={"worker": ["c:1"]}, task_type="worker", task_index=0)
    assert union(tf_config, more)(CONFIG).processes == ("a:1", "b:1", "c:1")


def test_parts_that_agree_count_once():
    devices = simple(jobs={"worker": ["a:1", "b:1"]}, task_type="worker", task_index=1, local_device_ids=[0])
    spec = union(devices, tf_config)(CONFIG)
    assert (spec.processes, spec.local_device_ids) == (("a:1", "b:1"), (0,))


def test_parts_that_do_not_apply_are_passed_over():
    assert union(jax_env, slurm, tf_config)(CONFIG).resolver == "union(tf_config)"
    assert union(jax_env, slurm)(CONFIG) is None
    assert union()(CONFIG) is None


def test_one_address_for_two_tasks():
    other = simple(jobs={"worker": ["b:1"]}, task_type="worker", task_index=0)
    with pytest.raises(ClusterConfigError, match=r"`worker\[2\]` is 'b:1'.*`worker\[1\]` has the same"):
        union(tf_config, other)(CONFIG)
