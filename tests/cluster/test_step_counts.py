"""What a distributed step tells the cluster of how far it is."""

import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np

import jdist


class Cluster:
    """Takes the place of a cluster's runtime, and adds up what it is told."""

    num_processes, is_alone, steps = 1, False, 0

    def blocked(self):
        return contextlib.nullcontext()

    def advance(self, steps, result):
        self.steps += steps


def test_each_call_counts_the_steps_that_it_made():
    cluster = Cluster()
    strategy = dataclasses.replace(jdist.mirrored(["cpu:0", "cpu:1"]), cluster=cluster)
    train_step = jdist.distribute(lambda w, b: (w + 1, {}), strategy, steps_per_call=3)
    eval_step = jdist.distribute(lambda w, b: {"w": w}, strategy, returns=("metrics",))
    state = strategy.init(lambda: jnp.float32(0))
    for steps in (3, 3, 2):  # the last call of a data set
        state, _ = train_step(state, {"x": np.ones((steps, 2))})
    eval_step(state, {"x": np.ones(2)})
    assert cluster.steps == int(state) == 8
