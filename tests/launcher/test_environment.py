import socket

import pytest

from jdist.errors import LaunchError
from jdist.launcher import environment as launcher_environment
from jdist.launcher.environment import child_environment, free_ports
from jdist.launcher.exit_cause import Task
from jdist.launcher.launch import check_cpu_devices

ADDRESSES = ["127.0.0.1:20000", "127.0.0.1:20002"]


def environment(environ, **options):
    return child_environment(environ, Task("worker", 1), {"worker": ADDRESSES}, attempt=0, **options)


def test_what_another_launcher_said_is_taken_out():
    other = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "3", "TF_CONFIG": "{}"}
    variables = environment(other | {"PATH": "/bin"})
    assert other.keys() & variables.keys() == {"TF_CONFIG"}
    assert variables["TF_CONFIG"] != "{}"
    assert variables["PATH"] == "/bin"


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


def test_each_port_and_the_next_can_be_taken_by_all_at_once():
    ports = free_ports(10)
    taken = []
    try:
        for port in [*ports, *(port + 1 for port in ports)]:
            taken.append(socket.create_server(("127.0.0.1", port)))
    finally:
        for server in taken:
            server.close()
    assert len(taken) == 20


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_that_is_taken_or_whose_next_is(offset, monkeypatch):
    pair = free_ports(1)[0]
    monkeypatch.setattr(launcher_environment, "_RANGE", range(pair, pair + 2, 2))
    assert free_ports(1) == [pair]
    with (
        socket.create_server(("127.0.0.1", pair + offset)),
        pytest.raises(OSError, match="only 0 of 1"),
    ):
        free_ports(1)
