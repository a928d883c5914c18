"""torchrun, LeaderWorkerSet, SkyPilot, Vertex AI, LSF: ports, GPUs, and what is refused.

Whole jobs are in test_cluster_environments.
"""

import json

import pytest

from jdist.cluster import leader_worker_set, lsf, mpi, skypilot, torchrun, vertex

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


def cluster_spec(**changes):
    spec = {"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}, "task": {"type": "workerpool1", "index": 0}}
    return {"CLUSTER_SPEC": json.dumps(spec | changes)}


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ({}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, (1,)),  # LOCAL_RANK counts among them, as in PyTorch
        ({"CUDA_VISIBLE_DEVICES": "5"}, None),  # each rank is shown its own
        ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_RANK": ""}, None),
        ({"JAX_LOCAL_DEVICE_IDS": "2,3"}, (2, 3)),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "2"}, (1,)),  # DeepSpeed's name
        ({"LOCAL_WORLD_SIZE": "", "JAX_LOCAL_DEVICE_IDS": "1"}, (1,)),
        ({"LOCAL_WORLD_SIZE": "", "CUDA_VISIBLE_DEVICES": "5"}, None),
    ],
)
def test_which_gpus_a_rank_of_torchrun_takes(visible, devices):
    assert torchrun(TORCH | visible).local_device_ids == devices


@pytest.mark.parametrize(
    ("nodes", "visible", "at", "devices"),
    [
        ("1", {}, "localhost", (1,)),
        ("1", {"CUDA_VISIBLE_DEVICES": "3"}, "localhost", None),
        ("2", {"JAX_COORDINATOR_ADDRESS": "n1:7000"}, "n1", (1,)),
        ("4", {"JAX_COORDINATOR_ADDRESS": "n1:7000", "FLUX_TASK_LOCAL_ID": "0"}, "n1", None),
    ],
)
def test_a_rank_of_flux_counts_the_ranks_of_its_node(nodes, visible, at, devices):
    rank = {"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "1", "FLUX_TASK_LOCAL_ID": "1"}
    spec = mpi(rank | {"FLUX_JOB_NNODES": nodes} | visible)
    assert (spec.coordinator_address.split(":")[0], spec.local_device_ids) == (at, devices)


def test_a_rank_of_mpich_takes_what_it_is_shown():
    rank = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
    assert mpi(rank).local_device_ids == (1,)
    assert mpi(rank | {"CUDA_VISIBLE_DEVICES": "4,5"}).local_device_ids is None


@pytest.mark.parametrize("environ", [TORCH, LWS, SKY, LSF], ids=["torchrun", "lws", "skypilot", "lsf"])
def test_the_port_and_address_of_process_0_can_be_chosen(environ):
    (resolver,) = [each for each in (torchrun, leader_worker_set, skypilot, lsf) if each(environ) is not None]
    found = resolver(environ).coordinator_address
    assert resolver(environ | {"JAX_COORDINATOR_PORT": "7000"}).coordinator_address == f"{found.split(':')[0]}:7000"
    assert resolver(environ | {"JAX_COORDINATOR_ADDRESS": "n9:7001"}).coordinator_address == "n9:7001"


@pytest.mark.parametrize("index", [0, "0", "00"])
def test_vertex_writes_an_index_as_a_number_or_its_text(index):
    assert vertex(cluster_spec(task={"type": "workerpool1", "index": index})).process_index == 1
