"""Cloud TPU: one slice, several slices."""

import pytest

from jdist.cluster import resolve, tpu
from jdist.errors import ClusterConfigError
from jdist.strategies import libtpu

SLICE = {"TPU_WORKER_HOSTNAMES": "t-0.tpu,t-1.tpu", "TPU_WORKER_ID": "1"}
MULTISLICE = {
    **SLICE,
    "MEGASCALE_COORDINATOR_ADDRESS": "train-slice-0-0.train:8080",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
}


def test_a_slice():
    spec = tpu(SLICE)
    assert spec.processes == ("t-0.tpu:8482", "t-1.tpu:8482")
    assert (spec.process_index, spec.resolver, spec.local_device_ids) == (1, "tpu", None)
    assert dict(spec.origins) == {
        "jobs": "TPU_WORKER_HOSTNAMES",
        "task_type": "TPU_WORKER_HOSTNAMES",
        "task_index": "TPU_WORKER_ID",
    }


def test_one_host_needs_no_index():
    assert tpu({"TPU_WORKER_HOSTNAMES": "t-0.tpu"}).num_processes == 1


def test_one_host_of_gke():
    assert tpu({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}).processes == ("localhost:8482",)


def test_what_jdist_itself_sets_for_libtpu_is_no_cluster(monkeypatch, tmp_path):
    monkeypatch.setattr(libtpu, "is_installed", lambda: True)
    quiet = libtpu.quiet_environment({}, dev=tmp_path)
    assert quiet["TPU_WORKER_HOSTNAMES"] == "localhost"
    assert tpu(quiet) is None


# What libtpu 0.0.42 sets in its own process, and so for its children, where it has compiled without a TPU.
NOTE = (
    "WARNING: could not determine TPU worker number, please set env var `TPU_WORKER_ID` manually, otherwise libtpu.so may "
    "not properly initialize."
)


@pytest.mark.parametrize("hosts", [{}, {"TPU_WORKER_HOSTNAMES": "localhost"}])
def test_libtpus_note_that_there_is_no_tpu_is_no_cluster(hosts):
    environ = {**hosts, "TPU_WORKER_ID": NOTE, "CLOUD_TPU_TASK_ID": NOTE}
    assert tpu(environ) is None
    assert resolve(environ).num_processes == 1


def test_libtpus_note_is_no_index():
    with pytest.raises(ClusterConfigError, match="TPU_WORKER_ID is not set"):
        tpu({**SLICE, "TPU_WORKER_ID": NOTE})


def test_process_addresses_come_before_host_names():
    spec = tpu({"TPU_PROCESS_ADDRESSES": "10.0.0.1:8476,10.0.0.2:8476", **SLICE})
    assert spec.processes == ("10.0.0.1:8482", "10.0.0.2:8482")


def test_ipv6_hosts():
    spec = tpu({"TPU_WORKER_HOSTNAMES": "fe80::1,[fe80::2]:80", "TPU_WORKER_ID": "0"})
    assert spec.processes == ("[fe80::1]:8482", "[fe80::2]:8482")


def test_several_slices_are_numbered_one_after_the_other():
    spec = tpu(MULTISLICE)
    assert spec.processes == ("train-slice-0-0.train:8482", None, None, None, "t-0.tpu:8482", "t-1.tpu:8482")
    assert (spec.num_processes, spec.process_index) == (6, 5)
    assert spec.origins["jobs"] == ("TPU_WORKER_HOSTNAMES, MEGASCALE_COORDINATOR_ADDRESS, MEGASCALE_NUM_SLICES")
    assert spec.origins["task_index"] == "MEGASCALE_SLICE_ID, TPU_WORKER_ID"


def test_all_slices_agree_on_process_0():
    specs = [tpu({**MULTISLICE, "MEGASCALE_SLICE_ID": str(i), "TPU_WORKER_ID": "0"}) for i in range(3)]
    assert {spec.coordinator_address for spec in specs} == {"train-slice-0-0.train:8482"}
    assert [spec.process_index for spec in specs] == [0, 2, 4]
    assert specs[0].address == specs[0].coordinator_address


def test_one_slice_of_multislice_is_a_slice():
    one = {**MULTISLICE, "MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"}
    assert tpu(one).processes == tpu(SLICE).processes


def test_the_port_and_address_of_process_0_can_be_chosen():
    assert tpu({**MULTISLICE, "JAX_COORDINATOR_PORT": "9000"}).coordinator_address == "train-slice-0-0.train:9000"
    spec = tpu({**SLICE, "JAX_COORDINATOR_ADDRESS": "10.0.0.9:9001"})
    assert spec.processes == ("10.0.0.9:9001", "t-1.tpu:9001")
    assert spec.origins["jobs"] == "TPU_WORKER_HOSTNAMES, JAX_COORDINATOR_ADDRESS"


@pytest.mark.parametrize("environ", [{}, {"TPU_WORKER_ID": "0"}, {"TPU_WORKER_HOSTNAMES": ""}])
def test_it_does_not_apply(environ):
    assert tpu(environ) is None
