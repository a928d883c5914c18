"""What the TPU compiler makes of central_storage, on a topology of TPUs that are not here."""

import os
import re

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU machine to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import jdist
from jdist.core.context import mesh_of_program
from jdist.core.division import shapes
from jdist.core.operations import Parts
from jdist.sharded_state.operations import BACKEND
from jdist.step.mesh_program import REPLICATED
from jdist.step.options import make_options
from jdist.step.outputs import Traced
from jdist.step.program_spec import ProgramSpec
from jdist.step.signature import Call, Others
from jdist.strategies.central_storage import CENTRAL
from jdist.strategies.local import LOCAL, strategy_over
from tests.strategies.tpu_steps import COLLECTIVE, host_computations

pytestmark = pytest.mark.xdist_group(__name__)  # they share what is compiled

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install libtpu")

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


def size_bytes(tree):
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compiled(name, operations, backend, state, **options):
    devices = tuple(topologies.get_topology_desc("v5e:2x4", "tpu").devices)
    strategy = strategy_over(
        devices,
        name=name,
        axis="replica",
        transform="shard_map",
        reduction=jdist.reduction.psum(),
        operations=operations,
        parts=Parts(of="state", memory="host", axes=("replica",)) if operations is CENTRAL else None,
    )
    checked = make_options(**options)
    lead = (checked.steps_per_call,) if checked.steps_per_call > 1 else ()
    by_rows = NamedSharding(strategy.mesh, PartitionSpec(*[None] * len(lead), "replica"))
    batch = {
        name: jax.ShapeDtypeStruct((*lead, 64, *shape), dtype, sharding=by_rows)
        for name, shape, dtype in (("x", (N,), jnp.float32), ("y", (13,), jnp.float32), ("mask", (), jnp.bool_))
    }
    token = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=strategy.replicated_sharding)
    program = backend.make_program(ProgramSpec(step, strategy, checked, Call(("state", "batch")), Traced(), [], "step"))
    traced = program.trace(token, shapes(strategy, state), (batch,), Others((), {}))
    with mesh_of_program(strategy):
        return traced.lower().compile()


@pytest.fixture(scope="module")
def state():
    return jax.eval_shape(create, jax.random.key(0))


@pytest.fixture(scope="module")
def mirrored(state):
    return compiled("mirrored", LOCAL, REPLICATED, state)


@pytest.fixture(scope="module")
def central(state):
    return compiled("central_storage", CENTRAL, BACKEND, state)


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
    looped = compiled("central_storage", CENTRAL, BACKEND, state, steps_per_call=3)
    memory = looped.memory_analysis()
    assert 8 * memory.host_argument_size_in_bytes < 1.05 * size_bytes(state)
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 0.5 * (
        mirrored.memory_analysis().argument_size_in_bytes + mirrored.memory_analysis().temp_size_in_bytes
    )
    check_hosts(looped)
