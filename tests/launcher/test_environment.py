import json

import pytest

from jdist.errors import LaunchError
from jdist.launcher.environment import child_environment
from jdist.launcher.exit_cause import Task
from jdist.launcher.launch import check_cpu_devices

ADDRESSES = ["127.0.0.1:20000", "127.0.0.1:20002"]


def environment(environ, task=Task("worker", 1), **options):  # noqa: B008  # a frozen value
    return child_environment(environ, task, {"worker": ADDRESSES}, **{"attempt": 0} | options)


@pytest.mark.parametrize("task", [Task("worker", 0), Task("worker", 1), Task("evaluator", 0)])
def test_the_cluster_and_the_place_in_it(task):
    config = json.loads(environment({}, task)["TF_CONFIG"])
    assert config == {"cluster": {"worker": ADDRESSES}, "task": {"type": task.type, "index": task.index}}


def test_what_another_launcher_said_is_taken_out():
    other = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "3", "TF_CONFIG": "{}"}
    variables = environment(other | {"PATH": "/bin"})
    assert other.keys() & variables.keys() == {"TF_CONFIG"}
    assert variables["TF_CONFIG"] != "{}"
    assert variables["PATH"] == "/bin"


def test_the_attempt_is_told():
    assert environment({}, attempt=3)["JDIST_LAUNCH_ATTEMPT"] == "3"


@pytest.mark.parametrize(("environ", "value"), [({}, "1"), ({"PYTHONUNBUFFERED": ""}, "")])
def test_output_is_not_held_back_unless_asked(environ, value):
    assert environment(environ)["PYTHONUNBUFFERED"] == value


def test_virtual_devices_join_the_flags_that_are_there():
    flags = "--xla_a=1 --xla_force_host_platform_device_count=8"
    variables = environment({"XLA_FLAGS": flags}, devices_per_process=4)
    assert variables["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=4"
    assert variables["JAX_PLATFORMS"] == "cpu"


def test_without_them_devices_are_left_alone():
    assert not {"XLA_FLAGS", "JAX_PLATFORMS"} & environment({}).keys()


def test_virtual_devices_where_the_cpu_is_ruled_out():
    with pytest.raises(LaunchError, match="JAX_PLATFORMS=cuda"):
        check_cpu_devices(4, {"JAX_PLATFORMS": "cuda"})
    check_cpu_devices(4, {"JAX_PLATFORMS": "cuda,cpu"})
    assert environment({"JAX_PLATFORMS": "cuda,cpu"}, devices_per_process=4)["JAX_PLATFORMS"] == "cpu"
