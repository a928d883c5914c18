"""Pods."""

import pytest

from jdist.cluster import kubernetes

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-node-0-1"}
TRAINER = {
    "JAX_COORDINATOR_ADDRESS": "train-node-0-0.train:29500",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "1",
}
JAX_JOB = {
    "COORDINATOR_ADDRESS": "train-worker-0",
    "COORDINATOR_PORT": "6666",
    "NUM_PROCESSES": "2",
    "PROCESS_ID": "1",
}


def test_kubeflow_trainer():
    spec = kubernetes({**POD, **TRAINER, "JOB_COMPLETION_INDEX": "1"})
    assert (spec.resolver, spec.num_processes, spec.process_index) == ("kubernetes", 4, 1)
    assert spec.coordinator_address == "train-node-0-0.train:29500"
    assert spec.origins["task_index"] == "JAX_PROCESS_ID"


def test_jobset_takes_the_completion_index():
    environ = {**POD, **TRAINER, "JOB_COMPLETION_INDEX": "3"}
    del environ["JAX_PROCESS_ID"]
    spec = kubernetes(environ)
    assert spec.process_index == 3
    assert spec.origins["task_index"] == "JOB_COMPLETION_INDEX"


def test_a_process_id_counts_before_the_completion_index():
    # In a JobSet of several jobs every job counts its pods from 0.
    assert kubernetes({**POD, **TRAINER, "JOB_COMPLETION_INDEX": "0"}).process_index == 1


def test_a_leader_worker_set_tells_the_index_of_a_process():
    pod = {**POD, **TRAINER, "JAX_PROCESS_ID": "", "LWS_WORKER_INDEX": "3", "LWS_GROUP_SIZE": "4"}
    spec = kubernetes(pod)
    assert (spec.num_processes, spec.process_index, spec.origins["task_index"]) == (4, 3, "LWS_WORKER_INDEX")


def test_jaxjob():
    spec = kubernetes({**POD, **JAX_JOB})
    assert (spec.num_processes, spec.process_index, spec.coordinator_address) == (2, 1, "train-worker-0:6666")
    assert spec.origins["jobs"] == "COORDINATOR_ADDRESS, NUM_PROCESSES"


@pytest.mark.parametrize(
    "environ", [TRAINER, JAX_JOB, POD, {**POD, "JOB_COMPLETION_INDEX": "0"}, {**POD, "NUM_PROCESSES": "4"}]
)
def test_it_does_not_apply(environ):
    assert kubernetes(environ) is None
