"""What each resolver makes of its variables: places, addresses, ports, GPUs and their origins.

Whole jobs are in environments.yaml, refusals in test_refusals, Slurm's lists in test_slurm.
"""

import json

import pytest

from jdist.cluster import (
    jax_env,
    kubernetes,
    leader_worker_set,
    lsf,
    mpi,
    open_mpi,
    resolve,
    sagemaker,
    skypilot,
    torchrun,
    tpu,
    vertex,
)
from jdist.cluster.resolvers.jax_env import chosen_devices, chosen_port
from jdist.strategies import absent_plugins

JAX = {"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
LWS = {"LWS_LEADER_ADDRESS": "s-0.s", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}
LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 1 b 1", "LSF_PM_TASKID": "2"}
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-node-0-1"}
TRAINER = {"JAX_COORDINATOR_ADDRESS": "train-0.train:29500", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"}
UNNUMBERED = POD | TRAINER | {"JAX_PROCESS_ID": ""}
JAX_JOB = {"COORDINATOR_ADDRESS": "w-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
SLICE = {"TPU_WORKER_HOSTNAMES": "t-0.tpu,t-1.tpu", "TPU_WORKER_ID": "1"}
MULTISLICE = {
    **SLICE,
    "MEGASCALE_COORDINATOR_ADDRESS": "train-slice-0-0.train:8080",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
}
URI = "OMPI_MCA_orte_hnp_uri"
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    URI: "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911",
}
ONE_HOST = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-n1-77@1", URI: ""}
FLUX = {"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "1", "FLUX_TASK_LOCAL_ID": "1"}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
# What libtpu 0.0.42 sets in its own process, and so for its children, where it has compiled without a TPU.
NOTE = (
    "WARNING: could not determine TPU worker number, please set env var `TPU_WORKER_ID` manually, otherwise libtpu.so may "
    "not properly initialize."
)


def cluster_spec(**changes):
    spec = {"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}, "task": {"type": "workerpool1", "index": 0}}
    return {"CLUSTER_SPEC": json.dumps(spec | changes)}


def origins(jobs, task_type, task_index, **more):
    return {"jobs": jobs, "task_type": task_type, "task_index": task_index} | more


# A resolver, its variables, and what of the spec they decide.
SPECS = [
    (
        jax_env,
        JAX,
        {
            "resolver": "jax_env",
            "processes": ("a:1234", None, None),
            "process_index": 2,
            "origins": origins("JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
        },
    ),
    (
        sagemaker,
        SAGEMAKER,
        {
            "resolver": "sagemaker",
            "processes": ("algo-1:2223", "algo-2:2223"),
            "process_index": 1,
            "local_device_ids": None,
            "origins": origins("SM_HOSTS", "SM_HOSTS", "SM_CURRENT_HOST"),
        },
    ),
    (
        sagemaker,
        {"SM_HOSTS": '["algo-10", "algo-2", "algo-1", "algo-11"]', "SM_CURRENT_HOST": "algo-10"},
        {"processes": ("algo-1:2223", "algo-2:2223", "algo-10:2223", "algo-11:2223"), "process_index": 2},
    ),
    (sagemaker, {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, {"num_processes": 1}),
    (
        sagemaker,
        SAGEMAKER | {"JAX_COORDINATOR_PORT": "5000"},
        {"coordinator_address": "algo-1:5000", "jobs_from": "SM_HOSTS, JAX_COORDINATOR_PORT"},
    ),
    (
        kubernetes,
        # In a JobSet of several jobs every job counts its pods from 0: the process's own index counts.
        POD | TRAINER | {"JOB_COMPLETION_INDEX": "0"},
        {
            "resolver": "kubernetes",
            "num_processes": 4,
            "process_index": 1,
            "coordinator_address": "train-0.train:29500",
            "index_from": "JAX_PROCESS_ID",
        },
    ),
    (
        kubernetes,
        UNNUMBERED | {"JOB_COMPLETION_INDEX": "3"},
        {"process_index": 3, "index_from": "JOB_COMPLETION_INDEX"},
    ),
    (
        kubernetes,
        UNNUMBERED | {"LWS_WORKER_INDEX": "3", "LWS_GROUP_SIZE": "4"},
        {"num_processes": 4, "process_index": 3, "index_from": "LWS_WORKER_INDEX"},
    ),
    (
        kubernetes,
        POD | JAX_JOB,
        {
            "num_processes": 2,
            "process_index": 1,
            "coordinator_address": "w-0:6666",
            "jobs_from": "COORDINATOR_ADDRESS, NUM_PROCESSES",
        },
    ),
    (
        tpu,
        SLICE,
        {
            "resolver": "tpu",
            "processes": ("t-0.tpu:8482", "t-1.tpu:8482"),
            "process_index": 1,
            "local_device_ids": None,
            "origins": origins("TPU_WORKER_HOSTNAMES", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
        },
    ),
    (tpu, {"TPU_WORKER_HOSTNAMES": "t-0.tpu"}, {"num_processes": 1}),
    (tpu, {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, {"processes": ("localhost:8482",)}),
    (
        tpu,
        SLICE | {"TPU_PROCESS_ADDRESSES": "10.0.0.1:8476,10.0.0.2:8476"},
        {"processes": ("10.0.0.1:8482", "10.0.0.2:8482")},
    ),
    (
        tpu,
        {"TPU_WORKER_HOSTNAMES": "fe80::1,[fe80::2]:80", "TPU_WORKER_ID": "0"},
        {"processes": ("[fe80::1]:8482", "[fe80::2]:8482")},
    ),
    (
        tpu,
        MULTISLICE,
        {
            "processes": ("train-slice-0-0.train:8482", None, None, None, "t-0.tpu:8482", "t-1.tpu:8482"),
            "num_processes": 6,
            "process_index": 5,
            "jobs_from": "TPU_WORKER_HOSTNAMES, MEGASCALE_COORDINATOR_ADDRESS, MEGASCALE_NUM_SLICES",
            "index_from": "MEGASCALE_SLICE_ID, TPU_WORKER_ID",
        },
    ),
    (
        tpu,
        MULTISLICE | {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"},
        {"processes": ("t-0.tpu:8482", "t-1.tpu:8482")},
    ),
    (
        tpu,
        MULTISLICE | {"JAX_COORDINATOR_PORT": "9000"},
        {"coordinator_address": "train-slice-0-0.train:9000"},
    ),
    (
        tpu,
        SLICE | {"JAX_COORDINATOR_ADDRESS": "10.0.0.9:9001"},
        {
            "processes": ("10.0.0.9:9001", "t-1.tpu:9001"),
            "jobs_from": "TPU_WORKER_HOSTNAMES, JAX_COORDINATOR_ADDRESS",
        },
    ),
    (
        open_mpi,
        OPEN_MPI,
        {
            "resolver": "open_mpi",
            "processes": (f"10.96.0.1:{20000 + 2 * (1531576320 // 4096 % 4096)}", None, None, None),
            "process_index": 3,
            "local_device_ids": (1,),
            "origins": origins(
                f"{URI}, OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_RANK",
                local_device_ids="OMPI_COMM_WORLD_LOCAL_RANK",
            ),
        },
    ),
    (open_mpi, OPEN_MPI | {URI: "0.0;tcp://10.0.0.1:34911"}, {"host": "10.0.0.1"}),
    (open_mpi, OPEN_MPI | {URI: "4096.0;tcp6://[::1]:43370"}, {"host": "[::1]"}),
    (
        open_mpi,
        OPEN_MPI | {URI: "4096.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370"},
        {"host": "[fe80::b9b:ac5d:9cf0:b858]"},
    ),
    (
        open_mpi,
        ONE_HOST,
        {"host": "localhost", "jobs_from": "OMPI_COMM_WORLD_LOCAL_SIZE, PMIX_NAMESPACE, OMPI_COMM_WORLD_SIZE"},
    ),
    (
        open_mpi,
        OPEN_MPI | {URI: "", "JAX_COORDINATOR_ADDRESS": "n1:7777"},
        {
            "coordinator_address": "n1:7777",
            "num_processes": 4,
            "jobs_from": "OMPI_COMM_WORLD_SIZE, JAX_COORDINATOR_ADDRESS",
        },
    ),
    # Which GPUs a rank takes.
    (open_mpi, OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "3"}, {"local_device_ids": None}),
    (
        open_mpi,
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        {"local_device_ids": None},
    ),
    (open_mpi, OPEN_MPI | {"JAX_LOCAL_DEVICE_IDS": "4,5"}, {"local_device_ids": (4, 5)}),
    (torchrun, TORCH, {"local_device_ids": (1,)}),
    # LOCAL_RANK counts among the GPUs that are visible, as in PyTorch.
    (torchrun, TORCH | {"CUDA_VISIBLE_DEVICES": "4,5"}, {"local_device_ids": (1,)}),
    (torchrun, TORCH | {"CUDA_VISIBLE_DEVICES": "5"}, {"local_device_ids": None}),  # each rank is shown its own
    (torchrun, TORCH | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, {"local_device_ids": None}),
    (torchrun, TORCH | {"LOCAL_WORLD_SIZE": "", "LOCAL_RANK": ""}, {"local_device_ids": None}),
    (torchrun, TORCH | {"JAX_LOCAL_DEVICE_IDS": "2,3"}, {"local_device_ids": (2, 3)}),
    (torchrun, TORCH | {"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "2"}, {"local_device_ids": (1,)}),  # DeepSpeed's name
    (torchrun, TORCH | {"LOCAL_WORLD_SIZE": "", "JAX_LOCAL_DEVICE_IDS": "1"}, {"local_device_ids": (1,)}),
    (torchrun, TORCH | {"LOCAL_WORLD_SIZE": "", "CUDA_VISIBLE_DEVICES": "5"}, {"local_device_ids": None}),
    (mpi, FLUX | {"FLUX_JOB_NNODES": "1"}, {"host": "localhost", "local_device_ids": (1,)}),
    (
        mpi,
        FLUX | {"FLUX_JOB_NNODES": "1", "CUDA_VISIBLE_DEVICES": "3"},
        {"host": "localhost", "local_device_ids": None},
    ),
    (
        mpi,
        FLUX | {"FLUX_JOB_NNODES": "2", "JAX_COORDINATOR_ADDRESS": "n1:7000"},
        {"host": "n1", "local_device_ids": (1,)},
    ),
    (
        mpi,
        FLUX | {"FLUX_JOB_NNODES": "4", "JAX_COORDINATOR_ADDRESS": "n1:7000", "FLUX_TASK_LOCAL_ID": "0"},
        {"host": "n1", "local_device_ids": None},
    ),
    (mpi, HYDRA, {"local_device_ids": (1,)}),
    (mpi, HYDRA | {"CUDA_VISIBLE_DEVICES": "4,5"}, {"local_device_ids": None}),
    # Vertex AI writes an index as a number or its text.
    *(
        (vertex, cluster_spec(task={"type": "workerpool1", "index": index}), {"process_index": 1})
        for index in (0, "0", "00")
    ),
]


@pytest.mark.parametrize(("resolver", "environ", "expected"), SPECS)
def test_what_a_resolver_finds(resolver, environ, expected):
    spec = resolver(environ)
    of_origins = {
        "origins": dict(spec.origins),
        "jobs_from": spec.origins["jobs"],
        "index_from": spec.origins["task_index"],
        "host": (spec.processes[0] or "").rpartition(":")[0],
    }
    assert {name: of_origins[name] if name in of_origins else getattr(spec, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("resolver", "environ"),
    [
        *((jax_env, each) for each in ({}, {"JAX_NUM_PROCESSES": " "}, {"JAX_COORDINATOR_ADDRESS": "a:1234"})),
        *((sagemaker, each) for each in ({}, {"SM_HOSTS": "", "SM_CURRENT_HOST": ""}, {"SM_CURRENT_HOST": "algo-1"})),
        *((kubernetes, each) for each in (TRAINER, JAX_JOB, POD)),
        *((kubernetes, POD | each) for each in ({"JOB_COMPLETION_INDEX": "0"}, {"NUM_PROCESSES": "4"})),
        *((tpu, each) for each in ({}, {"TPU_WORKER_ID": "0"}, {"TPU_WORKER_HOSTNAMES": ""})),
        *(
            (tpu, each | {"TPU_WORKER_ID": NOTE, "CLOUD_TPU_TASK_ID": NOTE})
            for each in ({}, {"TPU_WORKER_HOSTNAMES": "localhost"})
        ),
        (open_mpi, {URI: OPEN_MPI[URI]}),
    ],
)
def test_where_a_resolver_does_not_apply(resolver, environ):
    assert resolver(environ) is None
    if NOTE in environ.values():
        assert resolve(environ).num_processes == 1


@pytest.mark.parametrize("environ", [TORCH, LWS, SKY, LSF], ids=["torchrun", "lws", "skypilot", "lsf"])
def test_the_port_and_address_of_process_0_can_be_chosen(environ):
    (resolver,) = [each for each in (torchrun, leader_worker_set, skypilot, lsf) if each(environ) is not None]
    found = resolver(environ).coordinator_address
    assert resolver(environ | {"JAX_COORDINATOR_PORT": "7000"}).coordinator_address == f"{found.split(':')[0]}:7000"
    assert resolver(environ | {"JAX_COORDINATOR_ADDRESS": "n9:7001"}).coordinator_address == "n9:7001"


def test_jobs_of_open_mpi_have_ports_of_their_own():
    uris = [f"{job * 4096}.0;tcp://a:1" for job in range(4096)]
    assert len({open_mpi({**OPEN_MPI, URI: uri}).coordinator_address for uri in uris}) == 4096
    another = open_mpi({**ONE_HOST, "PMIX_NAMESPACE": "prterun-n1-78@1"})
    assert another.coordinator_address != open_mpi(ONE_HOST).coordinator_address


def test_all_slices_agree_on_process_0():
    specs = [tpu({**MULTISLICE, "MEGASCALE_SLICE_ID": str(i), "TPU_WORKER_ID": "0"}) for i in range(3)]
    assert {spec.coordinator_address for spec in specs} == {"train-slice-0-0.train:8482"}
    assert [spec.process_index for spec in specs] == [0, 2, 4]
    assert specs[0].address == specs[0].coordinator_address


def test_what_jdist_itself_sets_for_libtpu_is_no_cluster(monkeypatch, tmp_path):
    monkeypatch.setattr(absent_plugins, "has_libtpu", lambda: True)
    quiet = absent_plugins.quiet_environment({}, dev=tmp_path)
    assert quiet["TPU_WORKER_HOSTNAMES"] == "localhost"
    assert tpu(quiet) is None


def test_the_port_of_process_0():
    assert chosen_port({}, 7, "X") == (7, "X")
    assert chosen_port({"JAX_COORDINATOR_PORT": "8"}, 7, "X") == (8, "JAX_COORDINATOR_PORT")
    both = {"JAX_COORDINATOR_PORT": "8", "JAX_COORDINATOR_ADDRESS": "a:8"}
    assert chosen_port(both, 7, "X") == (8, "JAX_COORDINATOR_ADDRESS")


def test_chosen_devices():
    assert chosen_devices({}) == (None, {})
    assert chosen_devices({}, (1,), "X") == ((1,), {"local_device_ids": "X"})
    chosen = chosen_devices({"JAX_LOCAL_DEVICE_IDS": "2,0"}, (1,), "X")
    assert chosen == ((2, 0), {"local_device_ids": "JAX_LOCAL_DEVICE_IDS"})
