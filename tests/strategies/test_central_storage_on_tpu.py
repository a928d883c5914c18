"""What the TPU compiler makes of central_storage, on a topology of TPUs that are not here."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jdist
from tests.strategies.tpu_steps import COLLECTIVE, batch_of, host_computations, size_bytes, stacked

pytestmark = pytest.mark.xdist_group(__name__)  # they share what is compiled

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install libtpu")

TOPOLOGY = "v5e:2x4"
N = 3635  # 5 * 727, so neither rows nor elements divide by 8; 159 MB of state under Adam
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def create(key):
    params = {"first": jax.random.normal(key, (N, N)), "second": jnp.zeros((N, 13)), "bias": jnp.zeros(13)}
    return jdist.TrainState.create(params=params, tx=TX)


def step(state, batch):
    def loss_fn(params):
        predictions = jnp.tanh(batch["x"] @ params["first"]) @ params["second"] + params["bias"]
        return jdist.mean((predictions - batch["y"]) ** 2, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "norm": optax.tree.norm(grads)}


def compiled(strategy, state, **options):
    batch = batch_of(64, x=((N,), jnp.float32), y=((13,), jnp.float32))
    batch = stacked(batch, options.get("steps_per_call", 1))
    return jdist.distribute(step, strategy, **options).lower(state, batch).compile()


@pytest.fixture(scope="module")
def state():
    return jax.eval_shape(create, jax.random.key(0))


@pytest.fixture(scope="module")
def mirrored(state):
    return compiled(jdist.mirrored(topology=TOPOLOGY), state)


@pytest.fixture(scope="module")
def central(state):
    return compiled(jdist.central_storage(topology=TOPOLOGY), state)


def test_host_memory_holds_the_state_once(central, state):
    assert 155e6 < size_bytes(state) < 165e6
    memory = central.memory_analysis()
    # Padding, and the tiles of the TPU's layout.
    assert size_bytes(state) <= 8 * memory.host_argument_size_in_bytes < 1.05 * size_bytes(state)
    assert memory.host_alias_size_in_bytes == memory.host_argument_size_in_bytes == memory.host_output_size_in_bytes


@pytest.mark.full
def test_devices_hold_less_than_mirrored(central, mirrored):
    def device_bytes(compiled):
        memory = compiled.memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    assert mirrored.memory_analysis().host_argument_size_in_bytes == 0
    assert device_bytes(central) < 0.25 * device_bytes(mirrored)


def check_hosts(compiled):
    hosts = host_computations(compiled.as_text())
    update = max(hosts, key=len)
    assert all(f" {op}(" in update for op in ("multiply", "add", "divide", "sqrt", "select"))  # adamw, and the guard
    assert not any(COLLECTIVE.search(text) for text in hosts)
    assert COLLECTIVE.search(compiled.as_text())
    devices = compiled.as_text()
    for text in hosts:
        devices = devices.replace(text, "")
    assert not large_roots(devices)  # adamw takes one of every second moment


def large_roots(text):
    return [n for n in re.findall(r"= f32\[(\d+)[^=\n]* r?sqrt\(", text) if int(n) > 128]


def test_the_hosts_update_and_the_devices_communicate(central, mirrored):
    check_hosts(central)
    assert not host_computations(mirrored.as_text())
    assert large_roots(mirrored.as_text())


@pytest.mark.full
def test_several_steps_a_call_keep_the_state_in_host_memory(mirrored, state):
    looped = compiled(jdist.central_storage(topology=TOPOLOGY), state, steps_per_call=3)
    memory = looped.memory_analysis()
    assert 8 * memory.host_argument_size_in_bytes < 1.05 * size_bytes(state)
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 0.5 * (
        mirrored.memory_analysis().argument_size_in_bytes + mirrored.memory_analysis().temp_size_in_bytes
    )
    check_hosts(looped)
