"""Which phase computes what of a step's microbatches."""

import jax
import jax.numpy as jnp

from jdist.core.collective_marks import Collective, alone, emit
from jdist.jaxpr import graph, variation
from jdist.jaxpr.phases import schedule


def combined(kind, op, x):
    return emit(Collective(kind, op), alone, [x])[0]


def phases_of(step):
    """The cuts' names, the carried leaves and the outputs of each phase, of a step that returns `(carried, outputs)`."""
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(jnp.ones(3))
    variables = graph.body_of(closed)
    own = variation.of_one_microbatch(closed, variables.invars)
    num_carried = len(shapes[0])
    carried, outputs = variables.outvars[:num_carried], variables.outvars[num_carried:]
    early = {i: v for i, v in enumerate(outputs) if graph.is_in(v, own)}
    found = schedule(closed, own, carried=carried, outputs=early, effects=graph.effects_of(closed))
    names = [eqn.params.get("name") for eqn in variables.eqns]
    return [([names[i] for i in each.cuts], each.carried, each.outputs, len(each.effects)) for each in found]


def test_a_cut_that_reads_another_has_a_phase_of_its_own():
    def step(batch):
        total = combined("value", "sum", batch.sum())
        return (), (combined("gradient", "mean", batch * total),)

    assert phases_of(step) == [(["jdist_value_sum"], (), (), 0), (["jdist_gradient_mean"], (), (), 0)]


def test_what_no_cut_reads_goes_where_the_gradient_is_taken():
    def step(batch):
        total = combined("value", "sum", batch.sum())
        count = combined("value", "sum", jnp.sum(batch > 0))
        grad = combined("gradient", "mean", batch * total)
        return (batch.max(),), (grad, count, batch.mean())

    first, second = phases_of(step)
    assert first == (["jdist_value_sum"], (), (), 0)
    assert second == (["jdist_value_sum", "jdist_gradient_mean"], (0,), (2,), 0)


def test_without_a_gradient_all_is_one_phase():
    def step(batch):
        jax.debug.print("{}", batch[0])
        return (), (combined("value", "max", batch.max()), batch.sum())

    assert phases_of(step) == [(["jdist_value_max"], (), (1,), 1)]


def test_a_step_without_microbatches_of_its_own_has_no_phase():
    assert phases_of(lambda batch: ((), (jnp.float32(1),))) == []
