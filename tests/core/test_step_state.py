"""What steps keep beside a state stays there when the state is changed outside of a step."""

import dataclasses
import functools
import warnings
from typing import NamedTuple

import equinox as eqx
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.core.step_state import user_state, with_user_state
from jdist.errors import StepError

BATCH = {"x": np.linspace(-1, 1, 16 * 4, dtype=np.float32).reshape(16, 4)}


class Named(NamedTuple):
    params: dict
    n: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    params: dict
    n: jax.Array
    name: str = dataclasses.field(default="own", metadata={"static": True})

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    def counted(self):
        return self.replace(n=self.n + 1), int(self.n)

    count_by = functools.partialmethod(lambda self, n: self.replace(n=self.n + n), 2)

    def size(self):
        return sum(x.size for x in jax.tree.leaves(self.params))


class Module(eqx.Module):
    params: dict
    n: jax.Array

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


def params():
    return {"w": jnp.ones((4, 2)) / 4}


STATES = {
    "jdist": lambda: jdist.TrainState.create(
        params=params(), tx=optax.sgd(0.1), apply_fn=lambda v, x: x @ v["params"]["w"]
    ),
    "flax": lambda: flax.training.train_state.TrainState.create(
        params=params(), tx=optax.sgd(0.1), apply_fn=lambda v, x: x @ v["params"]["w"]
    ),
    "own": lambda: Own(params(), jnp.int32(0)),
    "equinox": lambda: Module(params(), jnp.int32(0)),
    "named tuple": lambda: Named(params(), jnp.int32(0)),
}


def step(state, batch):
    loss, grads = jdist.value_and_grad(lambda p: jdist.mean(((batch["x"] @ p["w"]) ** 2).sum(1)))(
        state["params"] if isinstance(state, dict) else state.params
    )
    if hasattr(state, "apply_gradients"):
        return state.apply_gradients(grads=grads), {"loss": loss}
    if isinstance(state, dict):
        return {**state, "params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, {"loss": loss}
    new = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
    replace = state._replace if isinstance(state, Named) else state.replace
    return replace(params=new), {"loss": loss}


def trained(create, kind):
    """A distributed step and a state that it has returned; "both" has a loss scale within residuals."""
    strategy = jdist.mirrored(all_reduce="psum" if kind == "loss scale" else {"name": "compressed", "dtype": "bf16"})
    precision = None if kind == "residuals" else jdist.precision("fp16", initial_scale=2.0**4)
    train_step = jdist.distribute(step, strategy, precision=precision)
    state, _ = train_step(strategy.init(create), BATCH)
    return train_step, state


@pytest.fixture(params=["residuals", "loss scale", "both"])
def kind(request):
    return request.param


def same_around(a, b):
    return jax.tree.map(lambda x, y: x is y, with_user_state(a, None), with_user_state(b, None))


@pytest.mark.parametrize("name", STATES)
def test_methods_keep_what_is_around(name, kind):
    train_step, state = trained(STATES[name], kind)
    replace = state._replace if name == "named tuple" else state.replace
    doubled = replace(params=jax.tree.map(lambda x: 2 * x, state.params))
    assert type(doubled) is type(state)
    assert type(user_state(doubled)) is type(user_state(state))
    assert jax.tree.all(same_around(doubled, state))
    np.testing.assert_array_equal(doubled.params["w"], 2 * state.params["w"])
    if name in ("jdist", "flax"):
        updated = state.apply_gradients(grads=state.params)
        assert jax.tree.all(same_around(updated, state))
        assert int(updated.step) == 2
        np.testing.assert_array_equal(state.apply_fn({"params": state.params}, BATCH["x"]).shape, (16, 2))
    if name == "own":
        counted, n = state.counted()
        assert jax.tree.all(same_around(counted, state))
        assert (int(counted.n), n) == (1, 0)
        assert (state.size(), state.name) == (8, "own")
        assert jax.tree.all(same_around(state.count_by(), state))
        assert int(state.count_by().n) == 2
    if kind == "both":
        assert float(state.loss_scale.scale) == float(doubled.loss_scale.scale) == 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(doubled, BATCH)


def test_a_report_counts_residuals_as_parts():
    _, state = trained(STATES["jdist"], "residuals")
    (residual,) = (leaf for leaf in jdist.mirrored().report(state).leaves if "residuals" in leaf.path)
    assert residual.kept.startswith("in 8 parts over replica: [1, ")
    assert residual.bytes_per_device == residual.num_bytes // len(jax.devices()) > 0


def test_a_dict(kind):
    train_step, state = trained(lambda: {"params": params(), "n": jnp.int32(0)}, kind)
    assert sorted(state.keys()) == sorted(state) == ["n", "params"]
    assert "n" in state
    assert 0 not in state
    assert list(state.get("params")) == ["w"]
    assert jax.tree.all(same_around(state.copy(), state))
    changed = state.with_user({**state, "params": params()})
    assert jax.tree.all(same_around(changed, state))
    assert float(changed["params"]["w"][0, 0]) == 0.25
    state, _ = train_step(changed, BATCH)
    lost = {"both": "loss scale and residuals"}.get(kind, kind)
    made_of_it = {**state, "params": params()}
    with pytest.raises(
        StepError, match=rf"step was called with a state .* lost its {lost}\..*with_user.*strategy\.fetch"
    ):
        train_step(made_of_it, BATCH)
    train_step(train_step.strategy.fetch(made_of_it), BATCH)  # to begin them anew on purpose
    train_step(state, BATCH)  # nothing of it was consumed


def test_a_new_run_loses_nothing(kind):
    train_step, _ = trained(STATES["own"], kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = train_step(STATES["own"](), BATCH)
        train_step(train_step.strategy.fetch(state), BATCH)


def test_a_loss_scale_goes_on_after_a_replacement():
    strategy = jdist.one_device()
    train_step = jdist.distribute(
        step, strategy, precision=jdist.precision("fp16", initial_scale=8.0, growth_interval=2)
    )
    state = STATES["own"]()
    for _ in range(4):
        state, _ = train_step(state, BATCH)
        state = state.replace(n=state.n + 1)
    assert (float(state.loss_scale.scale), int(state.n)) == (32.0, 4)
