"""Whatever the variables hold, a resolver gives a spec, None, or a ClusterConfigError; never another exception."""

import json
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jdist.cluster import (
    ClusterSpec,
    jax_env,
    kubernetes,
    leader_worker_set,
    lsf,
    mpi,
    open_mpi,
    resolve,
    sagemaker,
    skypilot,
    slurm,
    tf_config,
    torchrun,
    tpu,
    vertex,
)
from jdist.cluster.resolvers import launchers
from jdist.errors import ClusterConfigError
from tests.cluster.resolvers.test_platforms import JAX_JOB, LSF, LWS, MULTISLICE, OPEN_MPI, SAGEMAKER, SKY, TORCH
from tests.cluster.resolvers.test_slurm import STEP

quick = settings(max_examples=150, deadline=None, database=None)

# Texts that are near to what is valid, and texts that are not.
near = st.text(alphabet=string.digits + "abn-,.:[]()x{}\"' \n%=;/", max_size=24)
values = st.one_of(
    st.text(max_size=20),
    near,
    st.integers(-3, 10**20).map(str),
    st.sampled_from(["", " ", "0", "1", "2", "a:1", "n[1-3]", "2(x2),1", '["a","b"]', "localhost", "a,b", "1" * 5000]),
)


def of(*names):
    """Environments in which each of the variables is set or not."""
    return st.fixed_dictionaries({}, optional={name: values for name in names})


JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_PORT", "JAX_LOCAL_DEVICE_IDS")
POD = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
TPU = (*MULTISLICE, "TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID")
PET = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
RANKS = tuple(name for each in launchers.MPI for name in each.sets)
MPI = (*OPEN_MPI, "PMIX_NAMESPACE")
GPUS = {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
SLURM = (
    *STEP,
    *GPUS,
    "SLURM_NTASKS",
    "SLURM_TASKS_PER_NODE",
    "SLURM_DISTRIBUTION",
    "SLURM_HET_SIZE",
    "SLURM_JOB_NUM_NODES",
)


def outcome(resolver, environ):
    """The spec, None or the refusal, which names its variable; any other exception fails the test."""
    try:
        found = resolver(environ)
    except ClusterConfigError as exc:
        found = exc
    if isinstance(found, ClusterConfigError):
        assert found.variable in str(found)
        return found
    assert found is None or isinstance(found, ClusterSpec)
    if found is not None:
        assert found.describe()
        assert repr(found)
    return found


@quick
@given(
    st.one_of(st.text(max_size=60), near, st.binary(max_size=40).map(lambda b: b.decode("utf-8", "surrogateescape")))
)
def test_any_text_in_tf_config(source):
    outcome(tf_config, {"TF_CONFIG": source})


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**30), st.floats(), st.text(max_size=8), st.sampled_from(["a:1", "1"])
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=8,
)
jobs = st.dictionaries(
    st.one_of(st.sampled_from(["chief", "worker", "ps", "evaluator"]), st.text(max_size=6)),
    st.one_of(
        trees,
        st.lists(st.one_of(st.sampled_from(["a:1", "b:2", "[::1]:3", "c:0", "c:65536"]), scalars), max_size=4),
        st.dictionaries(st.sampled_from(["0", "1", "2", "00", "x"]), st.sampled_from(["a:1", "b:2"]), max_size=3),
    ),
    max_size=4,
)
tasks = st.fixed_dictionaries(
    {}, optional={"type": st.one_of(st.sampled_from(["chief", "worker", "ps", "evaluator"]), trees), "index": trees}
)
documents = st.fixed_dictionaries({}, optional={"cluster": st.one_of(jobs, trees), "task": st.one_of(tasks, trees)})


@quick
@given(st.one_of(documents, trees))
@example({"cluster": {"worker": [float("nan")]}, "task": {"type": "worker", "index": float("inf")}})
@example({"cluster": {"\ud800": ["a:1"]}, "task": {"type": "\ud800", "index": 0}})
def test_any_json_in_tf_config(document):
    found = outcome(tf_config, {"TF_CONFIG": json.dumps(document)})
    if isinstance(found, ClusterSpec):  # and what was understood is written and read again the same
        again = tf_config({"TF_CONFIG": json.dumps(found.as_tf_config())})
        assert again == found


@quick
@given(st.one_of(documents, trees))
@example({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "1" * 5000}})
@example({"cluster": {"": ["a:1"], "worker": ["a:1"]}, "task": {"type": "worker", "index": "0"}})
def test_any_json_in_cluster_spec(document):
    outcome(vertex, {"CLUSTER_SPEC": json.dumps(document)})


@quick
@given(st.integers(1, 6), st.integers(0, 6), st.sampled_from(["chief", "worker", "ps", "evaluator"]), st.data())
def test_numbers_of_processes(workers, index, task_type, data):
    cluster = {"worker": [f"w{i}:1" for i in range(workers)]}
    if data.draw(st.booleans()):
        cluster["chief"] = ["c:1"]
    document = {"cluster": cluster, "task": {"type": task_type, "index": index}}
    found = outcome(tf_config, {"TF_CONFIG": json.dumps(document)})
    there = index < len(cluster.get(task_type, [])) or (task_type == "evaluator" and index == 0)
    assert isinstance(found, ClusterSpec) == there
    if isinstance(found, ClusterSpec) and task_type in ("chief", "worker"):
        assert found.processes[found.process_index] == found.address
        assert found.is_chief == (found.address == found.coordinator_address)


@quick
@given(st.data())
@pytest.mark.parametrize(
    ("resolver", "names"),
    [
        (jax_env, JAX),
        (kubernetes, (*POD, *JAX, *JAX_JOB)),
        (sagemaker, (*SAGEMAKER, *JAX)),
        (tpu, TPU + JAX),
        (open_mpi, MPI + JAX),
        (slurm, SLURM + JAX),
        (torchrun, (*TORCH, "TORCHELASTIC_RUN_ID", *PET, *JAX)),
        (mpi, RANKS + JAX),
        (leader_worker_set, (*LWS, *JAX)),
        (skypilot, (*SKY, "SKYPILOT_TASK_ID", *JAX)),
        (lsf, (*LSF, *JAX)),
        (vertex, ("CLUSTER_SPEC",)),
        (resolve, (*JAX, *POD, *SAGEMAKER, *TPU, *MPI, *SLURM)),
        (resolve, (*TORCH, "TORCHELASTIC_RUN_ID", *PET, *RANKS, *SLURM, *SAGEMAKER)),
        (resolve, (*LWS, *SKY, "SKYPILOT_TASK_ID", *LSF, *MULTISLICE, "CLUSTER_SPEC", "PMI_ID", "K_MPI_JOB_ROLE")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_any_text_in_the_variables(resolver, names, data):
    outcome(resolver, data.draw(of(*names)))


@quick
@given(st.data())
@pytest.mark.parametrize(
    ("resolver", "valid"),
    [(tpu, MULTISLICE), (open_mpi, OPEN_MPI), (slurm, STEP | GPUS)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_variable_of_a_valid_environment_is_wrong(resolver, valid, data):
    assert isinstance(outcome(resolver, valid), ClusterSpec)
    variable = data.draw(st.sampled_from(sorted(valid)))
    outcome(resolver, {**valid, variable: data.draw(values)})
