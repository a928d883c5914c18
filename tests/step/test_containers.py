"""A step, and whatever else jdist calls, gets copies of containers: what it changes in place is seen, and is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import NonFiniteError
from tests.toys import ON_ALL_DEVICES

ROWS = np.linspace(-1, 1, 16 * 4, dtype=np.float32).reshape(16, 4)


@pytest.fixture(params=ON_ALL_DEVICES, ids=lambda s: f"{s.name}-{s.transform}")
def strategy(request):
    return request.param


def create():
    return {"params": {"w": jnp.ones(4)}, "n": jnp.int32(0), "log": [jnp.float32(0)]}


def in_place(state, batch, further, *, scale):
    """A step that changes whatever it is given in place."""
    batch["x"] = batch["x"] * scale["by"]
    further["w"] = further["w"] + 1
    scale["by"] = 0.0
    loss, grads = jdist.value_and_grad(lambda p: jdist.mean((batch["x"] @ p["w"] + further["w"]) ** 2))(state["params"])
    state["params"] = {"w": state["params"]["w"] - 0.1 * grads["w"]}
    state["n"] += 1
    state["log"][0] = state["log"][0] + 1
    return state, {"loss": loss}


def pure(state, batch, further, *, scale):
    batch, further = {"x": batch["x"] * scale["by"]}, {"w": further["w"] + 1}
    loss, grads = jdist.value_and_grad(lambda p: jdist.mean((batch["x"] @ p["w"] + further["w"]) ** 2))(state["params"])
    params = {"w": state["params"]["w"] - 0.1 * grads["w"]}
    return {"params": params, "n": state["n"] + 1, "log": [state["log"][0] + 1]}, {"loss": loss}


OPTIONS = [{}, {"accumulate": 2}, {"non_finite": "apply"}, {"donate": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_a_step_changes_in_place_is_seen_and_its_own(strategy, options):
    results = []
    for step in (in_place, pure):
        train_step = jdist.distribute(step, strategy, **options)
        state, losses = strategy.init(create), []
        for _ in range(3):
            batch, further, scale = {"x": ROWS}, {"w": np.float32(1)}, {"by": np.float32(2)}
            before, leaves = state, dict(state)
            state, metrics = train_step(state, batch, further, scale=scale)
            losses.append(float(metrics["loss"]))
            assert batch["x"] is ROWS
            assert further == {"w": 1}
            assert scale == {"by": 2}
            assert all(before[name] is leaves[name] for name in before)
        results.append((losses, strategy.fetch(state)))
    assert int(results[0][1]["n"]) == int(results[0][1]["log"][0]) == 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *results)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_nan_in_a_scan_does_not_pass_a_state_changed_in_place(strategy, policy):
    def step(state, batch):
        def body(w, x):
            loss, grad = jdist.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            return w - 0.1 * grad, loss

        w, losses = jax.lax.scan(body, state["params"]["w"], batch["x"].reshape(2, -1, 4))
        state["params"] = {"w": w}
        state["n"] += 1
        return state, {"loss": losses.mean()}

    if strategy.name == "central_storage":
        pytest.skip("it cannot split a scan of gradients, and says so")
    train_step = jdist.distribute(step, strategy, non_finite=policy)
    state, _ = train_step(strategy.init(create), {"x": ROWS})
    good = jax.tree.map(np.array, strategy.fetch(state))
    bad = ROWS.copy()
    bad[3, 2] = np.nan
    state, _ = train_step(state, {"x": bad})
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="w"):
            train_step.wait()
    jax.tree.map(np.testing.assert_array_equal, strategy.fetch(train_step.last_state), good)
    if policy == "skip":
        assert train_step.num_skipped == 1


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_a_hyperparameter_set_in_place_in_the_loss(strategy, options):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)

    def step(state, batch):
        def loss_of(params):
            state.opt_state.hyperparams["learning_rate"] = 0.1 / (1.0 + state.step)
            return jdist.mean((batch["x"] @ params["w"]) ** 2)

        loss, grads = jdist.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def written_out(state, batch):
        loss, grads = jdist.value_and_grad(lambda p: jdist.mean((batch["x"] @ p["w"]) ** 2))(state.params)
        params = {"w": state.params["w"] - 0.1 / (1.0 + state.step) * grads["w"]}
        return state.replace(params=params, step=state.step + 1), {"loss": loss}

    ends = []
    for each in (step, written_out):
        train_step = jdist.distribute(each, strategy, **options)
        state = strategy.init(lambda: jdist.TrainState.create(params={"w": jnp.ones(4)}, tx=tx))
        for _ in range(3):
            state, _ = train_step(state, {"x": ROWS})
        ends.append(strategy.fetch(state))
    np.testing.assert_allclose(ends[0].params["w"], ends[1].params["w"], rtol=1e-6)
    np.testing.assert_allclose(ends[0].opt_state.hyperparams["learning_rate"], 0.1 / 3, rtol=1e-6)


def test_an_evaluation_step(strategy):
    def evaluate(state, batch):
        batch["x"] = batch["x"] * 2
        state["params"] = {"w": state["params"]["w"] * 0}
        return {"sum": jdist.mean(batch["x"] @ state["params"]["w"])}

    eval_step = jdist.distribute(evaluate, strategy, returns=("metrics",))
    state, batch = strategy.init(create), {"x": ROWS}
    for _ in range(2):
        assert float(eval_step(state, batch)["sum"]) == 0
    assert batch["x"] is ROWS
    assert strategy.fetch(state)["params"]["w"].tolist() == [1.0] * 4


def test_run_and_init(strategy):
    def change(tree, *, by):
        tree["x"] = tree["x"] + by["y"]
        by["y"] = None
        tree["list"].append(tree["x"])
        return tree["x"]

    tree, by = {"x": jnp.ones(3), "list": []}, {"y": 2}
    x = tree["x"]
    made = strategy.init(lambda tree: {"x": change(tree, by={"y": 1})}, tree)
    assert strategy.fetch(made)["x"].tolist() == [2.0] * 3
    if strategy.transform != "jit":
        strategy.run(change, tree, by=by)
    assert tree == {"x": x, "list": []}
    assert by == {"y": 2}


def test_what_an_inner_function_leaves_in_the_state_that_came_in(strategy):
    def step(state, batch):
        def loss_of(params):
            predicted = batch["x"] @ params["w"]
            state["log"][0] = predicted.mean()  # a tracer of the differentiation, of no use to anyone later
            return jdist.mean(predicted**2)

        loss, grads = jdist.value_and_grad(jax.checkpoint(loss_of))(state["params"])
        params = {"w": state["params"]["w"] - 0.1 * grads["w"]}
        return {"params": params, "n": state["n"] + 1, "log": [jnp.float32(5)]}, {"loss": loss}

    train_step = jdist.distribute(step, strategy)
    state = strategy.init(create)
    for _ in range(2):
        state, _ = train_step(state, {"x": ROWS})
    assert strategy.fetch(state)["log"] == [5]
