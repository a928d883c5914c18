"""SageMaker."""

import pytest

from jdist.cluster import sagemaker

TWO = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}


def test_hosts_and_current_host():
    spec = sagemaker(TWO)
    assert spec.processes == ("algo-1:2223", "algo-2:2223")
    assert (spec.process_index, spec.resolver, spec.local_device_ids) == (1, "sagemaker", None)
    assert dict(spec.origins) == {"jobs": "SM_HOSTS", "task_type": "SM_HOSTS", "task_index": "SM_CURRENT_HOST"}


def test_hosts_are_numbered_in_numeric_order():
    hosts = ", ".join(f'"algo-{i}"' for i in (10, 2, 1, 11))
    spec = sagemaker({"SM_HOSTS": f"[{hosts}]", "SM_CURRENT_HOST": "algo-10"})
    assert [address.split(":")[0] for address in spec.processes] == ["algo-1", "algo-2", "algo-10", "algo-11"]
    assert spec.process_index == 2


def test_one_host():
    assert sagemaker({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}).num_processes == 1


@pytest.mark.parametrize("environ", [{}, {"SM_HOSTS": "", "SM_CURRENT_HOST": ""}, {"SM_CURRENT_HOST": "algo-1"}])
def test_it_does_not_apply(environ):
    assert sagemaker(environ) is None


def test_another_port():
    spec = sagemaker({**TWO, "JAX_COORDINATOR_PORT": "5000"})
    assert spec.coordinator_address == "algo-1:5000"
    assert spec.origins["jobs"] == "SM_HOSTS, JAX_COORDINATOR_PORT"
