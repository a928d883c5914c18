"""The residuals of a compressed all-reduce: beside the state, through every way a step can be run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist.errors import ReplicaDivergenceError, StepError, StrategyError
from jdist.reduction import Reduction
from jdist.train import Checkpointer

N = 4
ROWS = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
BATCH = {"x": ROWS, "y": ROWS @ np.array([1, 2, 3], np.float32)}


def constant(n=N):
    """An algorithm whose residuals can be counted: each replica's grows by its number plus one at every call."""

    def apply(tree, carry, axes):
        return jax.lax.psum(tree, axes), carry + 1 + jax.lax.axis_index(axes)

    return Reduction("constant", lambda tree: jnp.zeros(len(jax.tree.leaves(tree))), apply, exact=False)


def mirrored(transform="shard_map", reduction=None, n=N):
    return jdist.mirrored(jax.devices()[:n], transform=transform, all_reduce=reduction or constant())


def loss(w, batch):
    return jdist.mean((batch["x"] @ w["w"] + w["b"] - batch["y"]) ** 2)


def train_step(state, batch):
    value, grads = jdist.value_and_grad(loss)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}


def start():
    return {"w": np.zeros(3, np.float32), "b": np.float32(0)}


def expected(steps):
    state = start()
    for _ in range(steps):
        grads = jax.grad(loss)(state, BATCH)
        state = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
    return state


def assert_near(found, wanted, atol=1e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol), found, wanted)


def stacked(k):
    return jax.tree.map(lambda x: np.stack([x] * k), BATCH)


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"steps_per_call": 2}, {"non_finite": "apply"}], ids=str)
def test_each_replica_keeps_its_own_from_step_to_step(options, transform):
    strategy = mirrored(transform)
    step = jdist.distribute(train_step, strategy, **options)
    per_call = options.get("steps_per_call", 1)
    state, batch = start(), BATCH if per_call == 1 else stacked(per_call)
    for call in range(1, 4):
        state, _ = step(state, batch)
        (kept,) = state.residuals["train_step"]
        assert kept.sharding.is_equivalent_to(strategy.batch_sharding, 2)
        np.testing.assert_array_equal(kept, call * per_call * np.arange(1, N + 1)[:, None] * np.ones(2))
    assert_near(strategy.fetch(state), expected(3 * per_call))


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_one_compilation(transform, compiled):
    step = jdist.distribute(train_step, mirrored(transform))
    state, _ = step(start(), BATCH)
    compiled.clear()
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert not compiled


def test_the_state_reads_as_the_steps_own_and_is_fetched_without():
    strategy = mirrored()
    step = jdist.distribute(train_step, strategy)
    state, _ = step(strategy.init(start), BATCH)
    assert isinstance(state, jdist.StepState)
    assert state["b"] is state.user["b"]
    assert list(strategy.fetch(state)) == ["b", "w"]
    make = jdist.TrainState.create
    of_class = make(params=start(), tx=optax.sgd(0.1))

    def with_optimizer(state, batch):
        value, grads = jdist.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": value}

    state, _ = jdist.distribute(with_optimizer, strategy)(of_class, BATCH)
    assert int(state.step) == 1
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = state.nothing_of_the_kind
    assert strategy.fetch(state).__class__ is jdist.TrainState


def test_old_residuals_are_donated_with_the_state():
    step = jdist.distribute(train_step, mirrored())
    first, _ = step(start(), BATCH)
    step(first, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    kept = jdist.distribute(train_step, mirrored(), donate=False)
    first, _ = kept(start(), BATCH)
    kept(first, BATCH)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first))


def test_two_steps_share_a_state_and_each_keeps_its_own():
    strategy = mirrored()

    def other_step(state, batch):
        grads = jdist.grad(lambda w: loss({**state, "w": w}, batch))(state["w"])
        more = jdist.grad(lambda b: loss({**state, "b": b}, batch))(state["b"])
        return {"w": state["w"] - 0.1 * grads, "b": state["b"] - 0.1 * more}, {}

    one, other = jdist.distribute(train_step, strategy), jdist.distribute(other_step, strategy)
    state = start()
    for _ in range(2):
        state, _ = one(state, BATCH)
        state, _ = other(state, BATCH)
        state, _ = other(state, BATCH)
    assert [float(x[0, 0]) for x in state.residuals["train_step"]] == [2]
    assert [float(x[0, 0]) for x in state.residuals["other_step"]] == [4, 4]
    assert_near(strategy.fetch(state), expected(6))


def test_evaluation_leaves_them_alone():
    strategy = mirrored()
    evaluate = jdist.distribute(
        lambda state, batch: {"loss": loss(state, batch)}, strategy, args=("state", "batch"), returns=("metrics",)
    )
    state, _ = jdist.distribute(train_step, strategy)(start(), BATCH)
    before = np.asarray(state.residuals["train_step"][0])
    assert np.isfinite(float(evaluate(state, BATCH)["loss"]))
    assert np.isfinite(float(evaluate(strategy.fetch(state), BATCH)["loss"]))
    np.testing.assert_array_equal(before, state.residuals["train_step"][0])


def test_a_step_left_out_leaves_them_as_they_were():
    step = jdist.distribute(train_step, mirrored(), non_finite="skip")
    state, _ = step(start(), BATCH)
    bad = {**BATCH, "y": np.full(8, np.nan, np.float32)}
    state, _ = step(state, bad)
    assert step.num_skipped == 1
    assert np.asarray(state.residuals["train_step"][0])[:, 0].tolist() == [1, 2, 3, 4]


def test_the_replica_check_looks_past_them_and_still_at_the_state():
    strategy = mirrored()
    state, _ = jdist.distribute(train_step, strategy)(start(), BATCH)
    strategy.check(state)

    def forgets(state, batch):
        grads = jdist.grad(loss)(state, batch)
        local = jax.grad(loss)(state, batch)
        return jax.tree.map(lambda p, g, h: p - g - h, state, grads, local), {}

    with pytest.raises(ReplicaDivergenceError, match="2 of 2 leaves"):
        jdist.distribute(forgets, strategy)(start(), BATCH)


def test_metrics_and_reductions_of_the_users_own_are_exact():
    strategy = jdist.mirrored(jax.devices()[:N], all_reduce={"name": "compressed", "dtype": "int8"})

    def step(state, batch):
        mean, total = jdist.all_reduce(batch["x"].mean()), jdist.all_reduce(batch["x"].sum(), "sum")
        value, grads = jdist.value_and_grad(loss)(state, batch)
        metrics = {"loss": value, "mean": mean, "total": total, "own": batch["x"].mean()}
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), metrics

    for options in ({}, {"accumulate": 2}):
        _, metrics = jdist.distribute(step, strategy, **options)(start(), BATCH)
        np.testing.assert_allclose(metrics["loss"], loss(start(), BATCH), rtol=1e-5)
        np.testing.assert_allclose([metrics["mean"], metrics["own"]], ROWS.mean(), rtol=1e-5)
        np.testing.assert_allclose(metrics["total"], ROWS.sum(), rtol=1e-5)


@pytest.mark.parametrize("n", [2, 4])
def test_a_checkpoint_holds_them_and_a_run_goes_on_as_if_never_interrupted(n, tmp_path):
    strategy = mirrored(reduction=jdist.reduction.compressed("int8"), n=n)
    step = jdist.distribute(train_step, strategy)
    state = start()
    for _ in range(3):
        state, _ = step(state, BATCH)
    with Checkpointer(tmp_path, check=strategy.check) as checkpoints:
        checkpoints.save(3, state, wait=True)
        for _ in range(3):
            state, _ = step(state, BATCH)
        again = jdist.distribute(train_step, strategy)
        restored = checkpoints.restore(again.prepare(start(), BATCH))
    resumed = restored.state
    assert np.abs(np.asarray(resumed.residuals["train_step"][0])).max() > 0
    for _ in range(3):
        resumed, _ = again(resumed, BATCH)
    assert jax.tree.map(lambda x: np.asarray(x).tobytes(), resumed) == jax.tree.map(
        lambda x: np.asarray(x).tobytes(), state
    )


@pytest.mark.parametrize(("then", "now"), [(4, 2), (2, 4), (4, None), (None, 4)])
def test_a_checkpoint_is_gone_on_from_with_another_all_reduce_or_number_of_replicas(then, now, tmp_path):
    def run(n):
        return jdist.distribute(train_step, mirrored(n=n) if n else jdist.mirrored(jax.devices()[:2]))

    state, _ = run(then)(start(), BATCH)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, wait=True)
        restored = checkpoints.restore(run(now).prepare(start(), BATCH))
    resumed, _ = run(now)(restored.state, BATCH)
    assert_near(run(now).strategy.fetch(resumed), expected(2))
    if now:
        assert np.asarray(resumed.residuals["train_step"][0])[:, 0].tolist() == list(range(1, now + 1))  # begun anew


def test_prepare_is_the_state_in_its_place_where_there_are_none():
    strategy = jdist.mirrored(jax.devices()[:N])
    step = jdist.distribute(train_step, strategy)
    prepared = step.prepare(start(), BATCH)
    assert list(prepared) == ["b", "w"]
    assert prepared["w"].sharding == strategy.replicated_sharding


def test_lower_shows_the_program_of_a_call():
    step = jdist.distribute(train_step, mirrored(reduction=jdist.reduction.compressed("bf16")))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (start(), BATCH))
    for state in (shapes[0], step(start(), BATCH)[0]):
        assert "all_to_all" in step.lower(state, shapes[1]).as_text()


def test_a_step_without_a_state_begins_anew_at_every_call():
    def gradient_norm(w, batch):
        return {"norm": optax.tree.norm(jdist.grad(loss)(w, batch))}

    for args in (("replicated", "batch"), ("state", "batch")):
        strategy = mirrored(reduction=jdist.reduction.compressed("bf16"))
        run = jdist.distribute(gradient_norm, strategy, args=args, returns=("metrics",))
        norms = [float(run(start(), BATCH)["norm"]) for _ in range(3)]
        assert norms == pytest.approx([float(optax.tree.norm(jax.grad(loss)(start(), BATCH)))] * 3, rel=1e-2)
        assert len(set(norms)) == 1


def test_an_exact_algorithm_may_keep_nothing():
    claims = constant()._replace(exact=True)
    with pytest.raises(
        StrategyError, match=r"constant keeps something .* `Reduction\(name, init, apply, exact=False\)`"
    ):
        jdist.distribute(train_step, mirrored(reduction=claims))(start(), BATCH)


@pytest.mark.parametrize("inner", ["scan", "jit"])
def test_gradients_inside_an_inner_function_are_refused(inner):
    def step(state, batch):
        def one(state, _):
            return train_step(state, batch)

        if inner == "jit":
            return jax.jit(one)(state, 0)
        state, metrics = jax.lax.scan(one, state, None, length=2)
        return state, jax.tree.map(jnp.mean, metrics)

    with pytest.raises(StepError, match=r'constant keeps .* not inside a `lax.scan`.*use `all_reduce="psum"`'):
        jdist.distribute(step, mirrored())(start(), BATCH)


def test_gradients_outside_a_distributed_step_are_refused():
    with pytest.raises(StepError, match=r"only for gradients taken in a distributed step"):
        mirrored().run(lambda: jdist.grad(lambda x: x**2)(3.0))


def test_residuals_of_another_step_or_number_of_replicas_are_refused():
    state, _ = jdist.distribute(train_step, mirrored(n=2))(start(), BATCH)
    with pytest.raises(StepError, match=r"shape \(2, 2\), for 2 replicas; mirrored has 4.*`state.user`"):
        jdist.distribute(train_step, mirrored(n=4))(jax.device_get(state), BATCH)

    def train_step_of_another_kind(state, batch):
        return {**state, "w": state["w"] - jdist.grad(lambda w: loss({**state, "w": w}, batch))(state["w"])}, {}

    train_step_of_another_kind.__name__ = "train_step"
    with pytest.raises(StepError, match=r"have shapes \[\(2, 2\)\], this step's gradients need \[\(2, 1\)\]"):
        jdist.distribute(train_step_of_another_kind, mirrored(n=2))(state, BATCH)


@pytest.mark.usefixtures("quick_collection")
def test_two_steps_of_one_name_in_turn_are_refused_and_one_that_was_defined_again_is_not():
    def make(sign):
        def step(state, batch):
            grad = jdist.grad(lambda w: loss({**state, "w": w}, batch))(state["w"])
            return {**state, "w": state["w"] - sign * grad}, {}

        return jdist.distribute(step, strategy)

    strategy = mirrored()
    one, other = make(1.0), make(-1.0)
    state, _ = one(start(), BATCH)
    with pytest.raises(
        StepError, match=r"residuals from another step named 'step'\. Rename one.*`step\.__name__ = \.\.\.`"
    ):
        other(state, BATCH)
    separate, _ = other(start(), BATCH)
    other(separate, BATCH)
    state, _ = one(state, BATCH)
    del one
    one = make(0.5)
    one(state, BATCH)


def test_a_static_argument_that_changes_the_gradients_is_refused():
    def step(state, batch, twice):
        state, metrics = train_step(state, batch)
        return train_step(state, batch) if twice else (state, metrics)

    run = jdist.distribute(step, mirrored(), args=("state", "batch", "static"))
    state, _ = run(start(), BATCH, False)
    with pytest.raises(StepError, match="a static argument that changes which gradients it takes"):
        run(state, BATCH, True)


@pytest.mark.parametrize("make", [jdist.mirrored, jdist.one_device, jdist.central_storage, jdist.default])
def test_a_strategy_that_keeps_none_refuses_them(make):
    state, _ = jdist.distribute(train_step, mirrored())(start(), BATCH)
    with pytest.raises(StepError, match=r"from steps with a compressed all-reduce.* Pass `state\.user`"):
        jdist.distribute(train_step, make())(state, BATCH)


def test_one_replica_needs_none():
    strategy = jdist.mirrored(["cpu:0"], all_reduce={"name": "compressed", "dtype": "int8"})
    state, _ = jdist.distribute(train_step, strategy)(start(), BATCH)
    assert_near(strategy.fetch(state), expected(1), atol=1e-6)
    assert type(state) is dict


def test_a_step_over_nnx_objects_holds_them_itself():
    strategy = mirrored(reduction=jdist.reduction.compressed("int8"))
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @jdist.nnx.distribute(strategy)
    def step(model, optimizer, batch):
        value, grads = jdist.nnx.value_and_grad(lambda m: jdist.mean((m(batch["x"])[:, 0] - batch["y"]) ** 2))(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer, BATCH)) for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]
    assert np.abs(np.asarray(step._around.residuals["step"][0])).max() > 0
    assert isinstance(step.last_state, nnx.State)
