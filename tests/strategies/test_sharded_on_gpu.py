"""What the GPU compiler makes of states in parts, for H100s that are not here."""

import collections
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jdist
from tests.strategies.gpu_steps import needs_compiler
from tests.toys import step_of

pytestmark = needs_compiler
LAYERS, WIDTH = 8, 4096
LAYER = 4 * WIDTH * WIDTH  # bytes


def create():
    """A layer takes more than what is gathered at a time."""
    return jdist.TrainState.create(params=[jnp.zeros((WIDTH, WIDTH))] * LAYERS, tx=optax.adam(1e-3))


@step_of
def train_step(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def compiled(strategy, step=train_step, rows=8, **options):
    batch = {"x": jax.ShapeDtypeStruct((rows * strategy.num_replicas, WIDTH), jnp.float32)}
    return jdist.distribute(step, strategy, **options).lower(jax.eval_shape(create), batch).compile()


def counts(program):
    return collections.Counter(re.findall(r" (all-gather|reduce-scatter|all-reduce)(?:-start)?\(", program.as_text()))


@pytest.fixture(scope="module")
def mirrored():
    return compiled(jdist.mirrored(topology="h100:8")).memory_analysis()


@pytest.mark.parametrize(
    ("topology", "options"), [("h100:8", {}), ("h100:2x8", {"within": 8})], ids=["all", "within 8"]
)
def test_layers_of_a_loop_in_python_are_gathered_one_after_another(mirrored, topology, options):
    strategy = jdist.sharded(topology=topology, **options)
    program = compiled(strategy)
    memory = program.memory_analysis()
    state = strategy.report(jax.eval_shape(create))
    assert state.bytes_per_device <= (1 / 8 + 0.02) * state.num_bytes
    assert memory.argument_size_in_bytes <= (1 / 8 + 0.02) * mirrored.argument_size_in_bytes
    # A layer, the next one, a gradient and what the sum of it takes; of all eight layers there would be 8 and 8.
    assert memory.temp_size_in_bytes < 5 * LAYER < mirrored.temp_size_in_bytes
    assert counts(program)["all-gather"] == 2 * LAYERS - 1  # the last layer's serves its own backward pass


@pytest.mark.parametrize("accumulate", [1, 4])
def test_of_the_optimisers_state_one_exchange_an_update(accumulate):
    program = compiled(jdist.sharded(topology="h100:8", shard="optimizer"), accumulate=accumulate)
    gathered = re.findall(r" (all-gather|reduce-scatter)(?:-start)?\((.*?)\), channel_id", program.as_text())
    arrays = collections.Counter()
    for kind, operands in gathered:
        arrays[kind] += operands.count("%")
    assert arrays == {"all-gather": LAYERS, "reduce-scatter": LAYERS}


def test_a_stack_of_layers_under_a_users_checkpoint():
    def create_stack():
        return jdist.TrainState.create(params=jnp.zeros((LAYERS, WIDTH, WIDTH)), tx=optax.adam(1e-3))

    @step_of
    def step(params, batch):
        def layer(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), batch["x"].astype(jnp.bfloat16), params)[0] ** 2)

    strategy = jdist.sharded(topology="h100:8")
    batch = {"x": jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)}
    program = jdist.distribute(step, strategy).lower(jax.eval_shape(create_stack), batch).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * LAYER
    text = program.as_text()
    assert "all-to-all" in text  # half of the bytes of a sum in float32
    assert f"bf16[{WIDTH},{WIDTH}]" in text
    assert not re.search(rf"all-gather.*\[{LAYERS},{WIDTH},{WIDTH}\]", text)
