"""What tests of steps compiled for GPUs that are not here share."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jdist
from jdist.plan.collectives import collectives
from jdist.plan.hlo import parse
from jdist.strategies import absent_plugins
from tests.strategies.tpu_steps import batch_of, stacked
from tests.toys import step_of

needs_compiler = pytest.mark.skipif(
    absent_plugins.installed_plugin() is None,
    reason="the GPU compiler is not installed here: pip install 'jdist[plan-gpu]'",
)
LAYERS, WIDTH = 10, 1024


def create():
    params = {f"layer_{i}": jnp.zeros((WIDTH, WIDTH)) for i in range(LAYERS)}
    return jdist.TrainState.create(params=params, tx=optax.adam(1e-3))


@step_of
def step(params, batch):
    """A chain of products: the gradient of each layer is there before that of the layer below it."""
    x = batch["x"]
    for i in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer_{i}"])
    return jdist.mean(jnp.sum(x**2, axis=1), batch["mask"])


STATE = jax.eval_shape(create)
PARAMS_BYTES = LAYERS * WIDTH * WIDTH * 4


class Compiled:
    """A step compiled for a strategy whose devices are not here."""

    def __init__(self, strategy, rows=16, **options):
        batch = batch_of(rows * strategy.num_replicas, x=((WIDTH,), jnp.float32))
        batch = stacked(batch, options.get("steps_per_call", 1))
        self.program = jdist.distribute(step, strategy, **options).lower(STATE, batch).compile()
        self.text = self.program.as_text()
        self.module = parse(self.text)
        topology = jdist.strategies.topology.parse_topology(strategy.topology)
        shape = dict(strategy.mesh.shape)
        self.collectives = collectives(self.module, shape, domain=topology.domain_chips)
        self.memory = self.program.memory_analysis()

    @property
    def aliases(self):
        return len(re.findall(r"\((\d+), \{\}, m\w+-alias\)", self.module.header))
