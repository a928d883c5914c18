"""Open MPI."""

import pytest

from jdist.cluster import open_mpi
from jdist.errors import ClusterConfigError

URI = "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911"
RANK = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": URI,
}


def test_a_rank():
    spec = open_mpi(RANK)
    port = 20000 + 2 * (1531576320 // 4096 % 4096)
    assert spec.processes == (f"10.96.0.1:{port}", None, None, None)
    assert (spec.process_index, spec.resolver) == (3, "open_mpi")
    assert dict(spec.origins) == {
        "jobs": "OMPI_MCA_orte_hnp_uri, OMPI_COMM_WORLD_SIZE",
        "task_type": "OMPI_COMM_WORLD_SIZE",
        "task_index": "OMPI_COMM_WORLD_RANK",
        "local_device_ids": "OMPI_COMM_WORLD_LOCAL_RANK",
    }


@pytest.mark.parametrize(
    ("uri", "host"),
    [
        ("0.0;tcp://10.0.0.1:34911", "10.0.0.1"),
        ("4096.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370", "[fe80::b9b:ac5d:9cf0:b858]"),
        ("4096.0;tcp6://[::1]:43370", "[::1]"),
    ],
)
def test_the_host_of_mpirun(uri, host):
    assert open_mpi({**RANK, "OMPI_MCA_orte_hnp_uri": uri}).coordinator_address.rpartition(":")[0] == host


def test_jobs_have_ports_of_their_own():
    ports = {
        open_mpi({**RANK, "OMPI_MCA_orte_hnp_uri": f"{job * 4096}.0;tcp://a:1"}).coordinator_address
        for job in range(4096)
    }
    assert len(ports) == 4096


def test_all_ranks_on_one_host():
    environ = {**RANK, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-n1-77@1"}
    del environ["OMPI_MCA_orte_hnp_uri"]
    spec = open_mpi(environ)
    assert spec.coordinator_address.startswith("localhost:")
    assert spec.origins["jobs"] == "OMPI_COMM_WORLD_LOCAL_SIZE, PMIX_NAMESPACE, OMPI_COMM_WORLD_SIZE"
    another = open_mpi({**environ, "PMIX_NAMESPACE": "prterun-n1-78@1"})
    assert another.coordinator_address != spec.coordinator_address


def test_several_hosts_without_the_address_of_process_0():
    environ = {**RANK, "OMPI_MCA_orte_hnp_uri": ""}
    with pytest.raises(
        ClusterConfigError, match=r"JAX_COORDINATOR_ADDRESS is not set.*mpirun -x JAX_COORDINATOR_ADDRESS="
    ):
        open_mpi(environ)
    spec = open_mpi({**environ, "JAX_COORDINATOR_ADDRESS": "n1:7777"})
    assert (spec.coordinator_address, spec.num_processes) == ("n1:7777", 4)
    assert spec.origins["jobs"] == "OMPI_COMM_WORLD_SIZE, JAX_COORDINATOR_ADDRESS"


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "3"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, None),
        ({"JAX_LOCAL_DEVICE_IDS": "4,5"}, (4, 5)),
    ],
)
def test_which_gpus_a_rank_takes(changes, devices):
    assert open_mpi({**RANK, **changes}).local_device_ids == devices


def test_the_master_of_sagemaker_is_a_host():
    with pytest.raises(ClusterConfigError, match="SM_CURRENT_HOST is 'a b'; it must be the name of a host"):
        open_mpi({**RANK, "SM_HOSTS": '["a b"]', "SM_CURRENT_HOST": "a b"})


def test_it_does_not_apply():
    assert open_mpi({"OMPI_MCA_orte_hnp_uri": URI}) is None
