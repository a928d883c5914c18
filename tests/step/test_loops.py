"""`lax.scan`, unrolled where XLA's CPU backend would run convolutions slowly inside a loop."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.step.loops import scan
from tests.toys import TWO, step_of

ELSEWHERE = dataclasses.replace(jdist.default(), devices=(SimpleNamespace(platform="gpu"),))
rng = np.random.default_rng(0)


def convolve(x):
    return jax.lax.conv(x, jnp.ones((1, 1, 2, 2)), (1, 1), "VALID").sum()


BODIES = {
    "at the body's level": convolve,
    "in jit": jax.jit(convolve),
    "in a branch": lambda x: jax.lax.cond(x.sum() > 0, convolve, jnp.sum, x),
    "in a checkpoint": jax.checkpoint(convolve),
}


def lowered(strategy, f):
    def body(total, x):
        return total + f(x), x.sum()

    return jax.jit(lambda xs: scan(strategy, body, 0.0, xs)).lower(jnp.ones((3, 1, 1, 4, 4))).as_text()


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("strategy", [jdist.default(), TWO], ids=lambda s: s.name)
def test_a_convolution_on_cpu_is_unrolled(strategy, kind):
    assert "stablehlo.while" not in lowered(strategy, BODIES[kind])


def test_all_else_stays_a_loop():
    assert lowered(TWO, jnp.sum).count("stablehlo.while") == 1
    assert lowered(ELSEWHERE, convolve).count("stablehlo.while") == 1


@functools.partial(step_of, rate=0.01)
def step(w, batch):
    out = jax.lax.conv(batch["x"], w, (1, 1), "VALID") if w.ndim == 4 else batch["x"] * w
    return jdist.mean((out**2).sum((1, 2, 3)), batch.get("mask"))


OPTIONS = [{"accumulate": 2}, {"steps_per_call": 2}, {"accumulate": 2, "steps_per_call": 2}]


def batch_for(options, **more):
    batch = {"x": rng.normal(size=(8, 1, 4, 4)).astype(np.float32), **more}
    return jax.tree.map(lambda x: np.stack([x, x]), batch) if "steps_per_call" in options else batch


@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_has_a_loop_only_without_a_convolution(options):
    run = jdist.distribute(step, TWO, **options)
    assert "stablehlo.while" not in run.lower(jnp.ones((1, 1, 2, 2)), batch_for(options)).as_text()
    assert "stablehlo.while" in run.lower(jnp.float32(1), batch_for(options)).as_text()


@pytest.mark.parametrize("options", OPTIONS)
def test_unrolled_steps_give_the_same(options):
    batch = batch_for({}, mask=np.arange(8) < 5, more=np.ones(8))
    expected = jnp.ones((1, 1, 2, 2))
    for _ in range(options.get("steps_per_call", 1)):
        expected, metrics = jax.jit(step)(expected, batch)
    if "steps_per_call" in options:
        batch = jax.tree.map(lambda x: np.stack([x, x]), batch)
    state, got = jdist.distribute(step, TWO, **options)(jnp.ones((1, 1, 2, 2)), batch)
    np.testing.assert_allclose(state, expected, rtol=1e-5)
    np.testing.assert_allclose(np.ravel(got["loss"])[-1], metrics["loss"], rtol=1e-5)
