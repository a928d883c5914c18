"""Steps that take a gradient where an earlier one of the same step has led are the plain program, over all replicas.

Several updates in one call, minibatches, a GAN, SAM and line searches: each as it is written for one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jdist
from jdist.errors import BoundaryError, ReplicaDivergenceError
from tests.by_default import some
from tests.toys import assert_close

RNG = np.random.default_rng(0)
BATCHES = [
    {"x": RNG.normal(size=(64, 6)).astype(np.float32), "y": RNG.normal(size=64).astype(np.float32)} for _ in range(3)
]
SGD = optax.sgd(0.05, momentum=0.9)


def params(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return {"a": jnp.asarray(rng.normal(size=(6, 8)) * 0.4, jnp.float32), "b": jnp.full(8, 0.2)}


def predict(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["a"]) @ p["b"]


def loss_fn(p: Any, batch: Any) -> Any:
    return jnp.mean((predict(p, batch["x"]) - batch["y"]) ** 2)


def updated(state: Any, batch: Any, value_and_grad: Any) -> Any:
    p, opt_state = state
    loss, grads = value_and_grad(loss_fn)(p, batch)
    updates, opt_state = SGD.update(grads, opt_state, p)
    return (optax.apply_updates(p, updates), opt_state), loss


def epochs(state: Any, batch: Any, value_and_grad: Any) -> Any:
    losses = []
    for _ in range(3):
        state, loss = updated(state, batch, value_and_grad)
        losses.append(loss)
    return state, {"loss": jnp.stack(losses).mean()}


def minibatches(state: Any, batch: Any, value_and_grad: Any) -> Any:
    for first in range(2):  # every other row: of a replica's rows, and so of all
        state, loss = updated(state, jax.tree.map(lambda x, first=first: x[first::2], batch), value_and_grad)
    return state, {"loss": loss}


def scanned_minibatches(state: Any, batch: Any, value_and_grad: Any) -> Any:
    cut = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]).swapaxes(0, 1), batch)
    state, losses = jax.lax.scan(lambda state, rows: updated(state, rows, value_and_grad), state, cut)
    return state, {"loss": losses[-1]}


def alternating_gan(state: Any, batch: Any, value_and_grad: Any) -> Any:
    (d, d_opt), (g, g_opt) = state

    def fake(g: Any) -> Any:
        return batch["x"] * predict(g, batch["x"])[:, None]

    def d_loss(d: Any) -> Any:
        return jnp.mean(jax.nn.softplus(-predict(d, batch["x"])) + jax.nn.softplus(predict(d, fake(g))))

    d_value, grads = value_and_grad(d_loss)(d)
    updates, d_opt = SGD.update(grads, d_opt, d)
    d = optax.apply_updates(d, updates)
    g_value, grads = value_and_grad(lambda g: jnp.mean(jax.nn.softplus(-predict(d, fake(g)))))(g)
    updates, g_opt = SGD.update(grads, g_opt, g)
    return ((d, d_opt), (optax.apply_updates(g, updates), g_opt)), {"d": d_value, "g": g_value}


def sam(state: Any, batch: Any, value_and_grad: Any) -> Any:
    p, opt_state = state
    loss, grads = value_and_grad(loss_fn)(p, batch)
    norm = optax.tree.norm(grads)
    _, grads = value_and_grad(loss_fn)(jax.tree.map(lambda p, g: p + 0.05 * g / norm, p, grads), batch)
    updates, opt_state = SGD.update(grads, opt_state, p)
    return (optax.apply_updates(p, updates), opt_state), {"loss": loss}


OPAQUE = optax.contrib.sam(
    optax.sgd(0.05), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2, opaque_mode=True
)


def opaque_sam(state: Any, batch: Any, value_and_grad: Any, inner: Any = None) -> Any:
    p, opt_state = state
    loss, grads = value_and_grad(loss_fn)(p, batch)
    gradient = inner or (lambda p, _: value_and_grad(loss_fn)(p, batch)[1])
    updates, opt_state = OPAQUE.update(grads, opt_state, p, grad_fn=gradient)
    return (optax.apply_updates(p, updates), opt_state), {"loss": loss}


def opaque_sam_by_jax(state: Any, batch: Any, value_and_grad: Any) -> Any:
    return opaque_sam(state, batch, value_and_grad, lambda p, _: jax.grad(loss_fn)(p, batch))


def searching(tx: Any, whole: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(state: Any, batch: Any, value_and_grad: Any) -> Any:
        p, opt_state = state

        def own(p: Any) -> Any:
            return loss_fn(p, batch)

        loss, grads = value_and_grad(own)(p)
        updates, opt_state = tx.update(grads, opt_state, p, value=loss, grad=grads, value_fn=whole(own))
        return (optax.apply_updates(p, updates), opt_state), {"loss": loss}

    return step


LBFGS = optax.lbfgs()
BACKTRACKING = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))

STEPS = {
    "epochs": (epochs, SGD),
    "minibatches": (minibatches, SGD),
    "scanned minibatches": (scanned_minibatches, SGD),
    "alternating GAN": (alternating_gan, SGD),
    "SAM": (sam, SGD),
    "opaque SAM": (opaque_sam, OPAQUE),
    "zoom": (searching(LBFGS, jdist.global_loss), LBFGS),
    "backtracking": (searching(BACKTRACKING, jdist.global_loss), BACKTRACKING),
}
STRATEGIES = {
    "one_device": jdist.one_device,
    "mirrored": jdist.mirrored,
    "pmap": lambda: jdist.mirrored(transform="pmap"),
    "jit": lambda: jdist.mirrored(transform="jit"),
    "central_storage": jdist.central_storage,
}


def create(step: Any, tx: Any) -> Any:
    if step is alternating_gan:
        return (params(1), tx.init(params(1))), (params(2), tx.init(params(2)))
    return params(), tx.init(params())


def trained(step: Any, tx: Any, strategy: jdist.Strategy, accumulate: int = 1) -> Any:
    distributed = jdist.distribute(
        lambda state, batch: step(state, batch, jdist.value_and_grad), strategy, accumulate=accumulate
    )
    state, history = strategy.init(lambda: create(step, tx)), []
    for batch in BATCHES:
        state, metrics = distributed(state, batch)
        history.append(metrics)
    return strategy.fetch(state), history


def alone(step: Any, tx: Any) -> Any:
    plain, history = jax.jit(lambda state, batch: step(state, batch, jax.value_and_grad)), []
    state = create(step, tx)
    for batch in BATCHES:
        state, metrics = plain(state, batch)
        history.append(metrics)
    return state, history


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", some(STRATEGIES, ["mirrored"]))
def test_is_the_plain_program(name: str, kind: str) -> None:
    found, expected = trained(*STEPS[name], STRATEGIES[kind]()), alone(*STEPS[name])
    assert_close(found, expected, rtol=2e-6, atol=2e-6)


IN_LOOPS = ("scanned minibatches", "zoom", "backtracking")


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", some(["one_device", "mirrored", "jit", "central_storage"], ["central_storage"]))
def test_with_microbatches_it_is_the_plain_program_or_refused(name: str, kind: str) -> None:
    if name in IN_LOOPS:
        with pytest.raises(BoundaryError, match=r"inside a `lax\.scan`.*where it cannot be split"):
            trained(*STEPS[name], STRATEGIES[kind](), 2)
        return
    found, expected = trained(*STEPS[name], STRATEGIES[kind](), 2), alone(*STEPS[name])
    assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("step", "tx"),
    [
        (opaque_sam_by_jax, OPAQUE),
        (searching(LBFGS, lambda own: own), LBFGS),
        (searching(BACKTRACKING, lambda own: own), BACKTRACKING),
    ],
    ids=["opaque SAM", "zoom", "backtracking"],
)
def test_what_looks_at_own_rows_alone_is_noticed(step: Any, tx: Any) -> None:
    with pytest.raises(ReplicaDivergenceError):
        trained(step, tx, jdist.mirrored())
