"""JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID; and JAX's other variables, which all resolvers obey."""

import pytest

from jdist.cluster import jax_env
from jdist.cluster.resolvers.jax_env import chosen_devices, chosen_port
from jdist.errors import ClusterConfigError

THREE = {"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}


def test_the_three_variables():
    spec = jax_env(THREE)
    assert (spec.num_processes, spec.process_index, spec.coordinator_address) == (3, 2, "a:1234")
    assert spec.processes == ("a:1234", None, None)
    assert spec.resolver == "jax_env"
    assert dict(spec.origins) == {
        "jobs": "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES",
        "task_type": "JAX_NUM_PROCESSES",
        "task_index": "JAX_PROCESS_ID",
    }


@pytest.mark.parametrize("environ", [{}, {"JAX_NUM_PROCESSES": " "}, {"JAX_COORDINATOR_ADDRESS": "a:1234"}])
def test_it_does_not_apply(environ):
    assert jax_env(environ) is None


@pytest.mark.parametrize("missing", list(THREE))
def test_one_of_the_three_is_missing(missing):
    environ = {name: value for name, value in THREE.items() if name != missing}
    with pytest.raises(ClusterConfigError, match=f"{missing} is not set.*together on every process") as info:
        jax_env(environ)
    assert (info.value.variable, info.value.value) == (missing, None)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("JAX_NUM_PROCESSES", "0", "a whole number of at least 1"),
        ("JAX_NUM_PROCESSES", "three", "a whole number of at least 1"),
        ("JAX_NUM_PROCESSES", "3.0", "a whole number of at least 1"),
        ("JAX_NUM_PROCESSES", "99999999999999", "at most 100000"),
        ("JAX_PROCESS_ID", "3", "from 0 to 2, as JAX_NUM_PROCESSES says that there are 3"),
        ("JAX_PROCESS_ID", "-1", "a whole number of at least 0"),
        ("JAX_COORDINATOR_ADDRESS", "a", "host:port"),
        ("JAX_COORDINATOR_ADDRESS", "http://a:1", "Leave out"),
        ("JAX_LOCAL_DEVICE_IDS", "0,x", "whole numbers with commas"),
        ("JAX_LOCAL_DEVICE_IDS", "0,0", "each once"),
    ],
)
def test_what_is_refused(variable, value, message):
    with pytest.raises(ClusterConfigError, match=f"{variable} is .*{message}") as info:
        jax_env({**THREE, variable: value})
    assert info.value.variable == variable


def test_the_port_of_process_0():
    assert chosen_port({}, 7, "X") == (7, "X")
    assert chosen_port({"JAX_COORDINATOR_PORT": "8"}, 7, "X") == (8, "JAX_COORDINATOR_PORT")
    both = {"JAX_COORDINATOR_PORT": "8", "JAX_COORDINATOR_ADDRESS": "a:8"}
    assert chosen_port(both, 7, "X") == (8, "JAX_COORDINATOR_ADDRESS")


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1"])
def test_a_port_that_is_none(port):
    with pytest.raises(ClusterConfigError, match=r"JAX_COORDINATOR_PORT is .*a port from 1 to 65535"):
        chosen_port({"JAX_COORDINATOR_PORT": port}, 7, "X")


def test_two_ports_that_contradict_each_other():
    with pytest.raises(ClusterConfigError, match=r"JAX_COORDINATOR_PORT is 9; it must be the port in .* a:8"):
        chosen_port({"JAX_COORDINATOR_PORT": "9", "JAX_COORDINATOR_ADDRESS": "a:8"}, 7, "X")


def test_chosen_devices():
    assert chosen_devices({}) == (None, {})
    assert chosen_devices({}, (1,), "X") == ((1,), {"local_device_ids": "X"})
    chosen = chosen_devices({"JAX_LOCAL_DEVICE_IDS": "2,0"}, (1,), "X")
    assert chosen == ((2, 0), {"local_device_ids": "JAX_LOCAL_DEVICE_IDS"})
