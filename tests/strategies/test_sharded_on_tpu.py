"""`jdist.tpu(shard=...)`: what the TPU compiler makes of it for TPUs that are not here, and steps on devices in their place."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.core.layout import Layout
from jdist.plan.collectives import BETWEEN_SLICES, collectives
from jdist.plan.hlo import parse
from tests.strategies.tpu_steps import batch_of, check_donated, size_bytes
from tests.toys import step_of

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed here: pip install 'jdist[plan-tpu]'"
)
LAYERS, WIDTH = 6, 512
ROWS = 8  # of a replica
TILES = 200_000  # bytes: small arrays take a tile each


def create():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return jdist.TrainState.create(params=params, tx=optax.adam(1e-3))


@step_of
def train_step(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jdist.mean((x**2).sum(-1), batch["mask"])


def compiled(topology, shard):
    strategy = jdist.tpu(topology=topology, shard=shard)
    state = jax.eval_shape(create)
    batch = batch_of(ROWS * strategy.num_replicas, x=((WIDTH,), jnp.float32))
    program = jdist.distribute(train_step, strategy).lower(state, batch).compile()
    module = parse(program.as_text())
    check_donated(module, state)
    return strategy.report(state), program.memory_analysis(), collectives(module, dict(strategy.mesh.shape))


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "shapes"),
    [
        ("v5e:4x4", [(48, 1600, 1600), (48, 1600, 6400), (48, 6400, 1600)]),
        ("v5e:8x8", [(12, 768, 768), (12, 768, 3072), (12, 3072, 768)]),
        ("v5e:16x16", [(40, 5120, 5120)]),
    ],
)
def test_a_stack_whose_layers_fill_no_tiles_is_stored_layer_by_layer(topology, shapes):
    layout = Layout.of(jdist.tpu(topology=topology, shard="state"))
    for shape in shapes:
        form = layout.form(shape)
        assert form.of_layer is not None
        *_, rows, columns = form.part(layout.num_parts)
        in_tiles = shape[0] * -(-rows // 8) * 8 * -(-columns // 128) * 128
        assert in_tiles <= (1 / layout.num_parts + 0.02) * math.prod(shape)


@needs_libtpu
@pytest.mark.parametrize(("shard", "share"), [("state", 1 / 4), ("optimizer", 1 / 3 + 2 / 3 / 4)])
def test_a_chip_holds_its_part(shard, share):
    report, memory, found = compiled("v5p:2x2x1", shard)
    assert report.num_bytes == size_bytes(jax.eval_shape(create))
    assert report.bytes_per_device <= (share + 0.001) * report.num_bytes
    assert report.bytes_per_device <= memory.argument_size_in_bytes <= report.bytes_per_device + TILES
    assert {(c.axes, c.group_size) for c in found} == {("replica", 4)}


@needs_libtpu
def test_groups_as_large_as_a_slice_gather_within_it_and_send_sums_of_parts_between_slices():
    report, memory, found = compiled("v5e:2x2,slices=2", {"of": "state", "within": 4})
    assert report.bytes_per_device <= (1 / 4 + 0.001) * report.num_bytes
    assert memory.argument_size_in_bytes <= report.bytes_per_device + TILES
    between = [c for c in found if c.kind.endswith(BETWEEN_SLICES)]
    assert {c.axes for c in found if c not in between} == {"replica_in_group"}
    part = LAYERS * WIDTH * WIDTH * 4 // 4
    assert part <= sum(c.bytes for c in between) <= 1.01 * part


def test_steps_on_devices_in_place_of_chips(monkeypatch):
    monkeypatch.setattr("jdist.strategies.over_devices.attached_tpu_devices", lambda num_processes: jax.devices()[:4])
    x = np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)

    def trained(strategy):
        step, state = jdist.distribute(train_step, strategy), strategy.init(create)
        losses = []
        for batch in strategy.distribute_dataset(jdist.data.from_arrays({"x": x}, global_batch=16)):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return strategy.report(state).bytes_per_device, losses

    (part, losses), (whole, expected) = trained(jdist.tpu(shard="state")), trained(jdist.one_device())
    assert part <= (1 / 4 + 0.001) * whole
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
