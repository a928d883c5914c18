"""Steps over nnx's mutable objects."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist.errors import NonFiniteError, StepError
from tests.toys import EVERY, TWO

X = np.arange(1, 9, dtype=np.float32).reshape(8, 1)
BATCH = {"x": X, "y": 3 * X}


def loss_fn(model, batch):
    return jdist.mean((model(batch["x"]) - batch["y"])[:, 0] ** 2)


def train(model, optimizer, metrics, batch):
    loss, grads = jdist.nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    metrics.update(loss=loss, values=batch["x"][:, 0])
    return {"loss": loss}


@pytest.mark.parametrize(
    "strategy", [TWO, EVERY["pmap"], EVERY["default"], jdist.central_storage(["cpu:0", "cpu:1"])], ids=str
)
def test_a_batch_norm_with_the_strategys_axes_sees_the_whole_batch(strategy):
    def trained(strategy, axis_name):
        norm = nnx.BatchNorm(1, axis_name=axis_name, rngs=nnx.Rngs(0))
        model = nnx.Sequential(norm, nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
        state = model, nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)

        @jdist.distribute(strategy)
        def step(state, batch):
            model, optimizer = state
            loss, grads = jdist.value_and_grad(loss_fn)(model, batch)
            optimizer.update(model, grads)
            return state, {"loss": loss}

        for _ in range(3):
            state, metrics = step(state, BATCH)
        return float(metrics["loss"]), np.asarray(
            strategy.fetch(nnx.state(state[0], nnx.BatchStat))["layers"][0]["mean"][...]
        )

    alone = trained(jdist.one_device(), None)
    for found, wanted in zip(trained(strategy, strategy.axes), alone, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    if strategy.num_replicas > 1:  # what `jdist.replica_axes()` is there
        assert abs(trained(strategy, jdist.replica_axes())[0] - alone[0]) > 1e-2


def objects():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), x=nnx.metrics.Average("values"))
    return model, nnx.Optimizer(model, optax.sgd(0.01, momentum=0.9), wrt=nnx.Param), metrics


def plain(steps):
    held = objects()
    step = nnx.jit(train)
    losses = [float(step(*held, BATCH)["loss"]) for _ in range(steps)]
    return held, losses


@pytest.mark.parametrize("name", EVERY)
def test_three_steps_equal_nnx_jit(name):
    (model, optimizer, metrics), losses = plain(3)
    held = objects()
    step = jdist.nnx.distribute(EVERY[name])(train)
    got = [float(step(*held, BATCH)["loss"]) for _ in range(3)]
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    for a, b in zip(held[:2], (model, optimizer), strict=True):
        leaves = zip(jax.tree.leaves(nnx.state(a)), jax.tree.leaves(nnx.state(b)), strict=True)
        for x, y in leaves:
            np.testing.assert_allclose(x, y, rtol=1e-5)
    assert float(held[2].compute()["x"]) == float(metrics.compute()["x"]) == 4.5
    np.testing.assert_allclose(held[2].compute()["loss"], np.mean(losses), rtol=1e-5)


def test_sums_of_metrics_are_exact():
    metrics = nnx.metrics.Average("values")
    step = jdist.nnx.distribute(TWO)(lambda metrics, batch: metrics.update(values=batch["x"]))
    for _ in range(3):
        step(metrics, BATCH)
    assert float(metrics.total.get_value()) == 3 * X.sum()
    assert int(metrics.count.get_value()) == 24


class Largest(nnx.metrics.Metric):
    """A metric of a user's own that does not add up."""

    def __init__(self):
        self.largest = nnx.metrics.MetricState(jnp.float32(-1e9))

    def reset(self):
        self.largest[...] = jnp.float32(-1e9)

    def update(self, **values):
        self.largest[...] = jnp.maximum(self.largest[...], values["values"].max())

    def compute(self):
        return self.largest[...]


class TestMetrics:
    """The state of a metric is that of one replica, whatever the number of devices and microbatches."""

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_one_that_is_reset_in_the_step(self, name, accumulate):
        def step(model, metrics, batch):
            loss, _ = jdist.nnx.value_and_grad(lambda m: m(batch["x"]).mean())(model)
            metrics.reset()
            metrics.update(values=batch["x"])
            return loss

        model, metrics = nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.metrics.Average("values")
        run = jdist.nnx.distribute(EVERY[name], accumulate=accumulate)(step)
        for _ in range(3):
            run(model, metrics, BATCH)
        assert (float(metrics.total[...]), int(metrics.count[...])) == (X.sum(), len(X))

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_a_maximum_that_is_declared(self, accumulate):
        def step(model, metrics, batch):
            loss, _ = jdist.nnx.value_and_grad(lambda m: m(batch["x"]).mean())(model)
            metrics.update(values=batch["x"])
            return loss

        model, metrics = (
            nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
            nnx.MultiMetric(it=Largest(), mean=nnx.metrics.Average("values")),
        )
        run = jdist.nnx.distribute(TWO, metrics={Largest: "max"}, accumulate=accumulate)(step)
        for _ in range(2):
            run(model, metrics, BATCH)
        assert float(metrics.it.compute()) == X.max()
        assert float(metrics.mean.compute()) == X.mean()

    def test_one_of_which_nothing_is_known_is_refused(self):
        run = jdist.nnx.distribute(TWO)(lambda metrics, batch: metrics.update(values=batch["x"]))
        with pytest.raises(StepError, match=r"metric 0 is an Largest.*metrics=\{Largest: \"sum\"\}"):
            run(Largest(), BATCH)
        with pytest.raises(StepError, match=r"`metrics\[Largest\]` is 'maximum'; it must be one of"):
            jdist.nnx.distribute(TWO, metrics={Largest: "maximum"})

    def test_reading_one_in_the_step_is_refused(self):
        def step(metrics, batch):
            metrics.update(values=batch["x"])
            return metrics.compute()

        metrics = nnx.metrics.Average("values")
        with pytest.raises(StepError, match=r"computes an nnx metric.*outside of the step"):
            jdist.nnx.distribute(TWO)(step)(metrics, BATCH)
        metrics.update(values=jnp.ones(2))
        assert float(metrics.compute()) == 1
        assert float(jdist.nnx.distribute(jdist.one_device())(step)(nnx.metrics.Average("values"), BATCH)) == X.mean()


def test_dropout_differs_by_replica_and_by_step_and_the_kept_key_is_the_same():
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    before = jax.random.key_data(jax.tree.leaves(nnx.state(dropout, nnx.RngKey))[0]).tolist()
    step = jdist.nnx.distribute(TWO, returns="examples")(lambda model, batch: model(batch["x"]))
    ones = {"x": np.ones((64, 1), np.float32)}
    first, second = np.asarray(step(dropout, ones)), np.asarray(step(dropout, ones))
    assert not np.array_equal(first[:32], first[32:])
    assert not np.array_equal(first, second)
    assert jax.random.key_data(jax.tree.leaves(nnx.state(dropout, nnx.RngKey))[0]).tolist() == before
    TWO.check(step.last_state)


def test_keys_of_stacked_layers():
    class Stacked(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(()))
            self.rngs = rngs.split(3)

    model = Stacked(nnx.Rngs(0))
    step = jdist.nnx.distribute(TWO)(lambda model, batch: (batch["x"] * model.scale[...]).mean())
    assert float(step(model, BATCH)) == 4.5


def test_batch_statistics_are_averaged():
    model = nnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
    step = jdist.nnx.distribute(TWO, returns="examples")(lambda model, batch: model(batch["x"]))
    step(model, BATCH)
    assert model.mean.get_value().tolist() == [4.5]  # of 2.5 and 6.5
    np.testing.assert_allclose(model.var.get_value(), [1.25])  # of each replica's rows
    TWO.check(step.last_state)


def test_a_synced_batch_norm_sees_the_global_batch():
    model = nnx.BatchNorm(1, momentum=0.0, axis_name="replica", rngs=nnx.Rngs(0))
    step = jdist.nnx.distribute(TWO, returns="examples")(lambda model, batch: model(batch["x"]))
    out = step(model, BATCH)
    np.testing.assert_allclose(model.var.get_value(), [X.var()], rtol=1e-6)
    np.testing.assert_allclose(np.std(out), 1, rtol=1e-5)


def test_accumulation_equals_the_larger_batch():
    held, expected = objects(), objects()
    jdist.nnx.distribute(TWO)(train)(*expected, BATCH)
    jdist.nnx.distribute(TWO, accumulate=2)(train)(*held, BATCH)
    np.testing.assert_allclose(held[0].kernel.get_value(), expected[0].kernel.get_value(), rtol=1e-6)
    assert int(held[1].step.get_value()) == 1
    assert float(held[2].compute()["x"]) == 4.5


def test_evaluation_changes_nothing_but_metrics():
    model, _, metrics = objects()

    @jdist.nnx.distribute(TWO, returns=("metrics", "examples"))
    def evaluate(model, metrics, batch):
        metrics.update(loss=loss_fn(model, batch), values=batch["x"][:, 0])
        return {"loss": loss_fn(model, batch)}, model(batch["x"])

    before = float(model.kernel.get_value()[0, 0])
    out, predictions = evaluate(model, metrics, BATCH)
    assert float(model.kernel.get_value()[0, 0]) == before
    np.testing.assert_allclose(predictions, X * before, rtol=1e-6)
    np.testing.assert_allclose(out["loss"], ((X * before - 3 * X) ** 2).mean(), rtol=1e-5)


def test_a_tuple_of_objects_and_replicated_arguments():
    @jdist.nnx.distribute(TWO, static_argnames="power")
    def step(both, batch, scale, power):
        model, optimizer = both
        grads = jdist.nnx.grad(lambda m: scale * jdist.mean(m(batch["x"]) ** power))(model)
        optimizer.update(model, grads)
        return jnp.abs(grads["kernel"][...]).sum()

    model, optimizer, _ = objects()
    one = float(step((model, optimizer), BATCH, 0.0, power=2))
    assert one == 0.0
    assert float(step((model, optimizer), BATCH, jnp.float32(1), power=2)) > 0
    assert int(optimizer.step.get_value()) == 2


def test_value_and_grad_and_grad_with_aux_outside_a_strategy():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    f = lambda m: (m(X).sum(), {"rows": len(X)})  # noqa: E731
    (value, aux), grads = jdist.nnx.value_and_grad(f, has_aux=True)(model)
    expected, _ = nnx.value_and_grad(f, has_aux=True)(model)
    assert (float(value), aux["rows"]) == (float(expected[0]), 8)
    assert grads["kernel"][...].tolist() == [[36.0]]
    grads, aux = jdist.nnx.grad(f, has_aux=True)(model)
    assert (grads["bias"][...].tolist(), aux["rows"]) == ([8.0], 8)


class TestRefused:
    def test_a_step_that_changes_the_structure(self):
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

        def step(model, batch):
            model.extra = nnx.Param(jnp.zeros(()))
            return 0.0

        with pytest.raises(StepError, match=r"changed the structure of its nnx objects.*outside of the step"):
            jdist.nnx.distribute(TWO)(step)(model, BATCH)
        assert model.kernel.get_value().shape == (1, 1)

    def test_welford_by_its_path(self):
        metrics = nnx.MultiMetric(w=nnx.metrics.Welford("values"))
        step = jdist.nnx.distribute(TWO)(lambda metrics, batch: metrics.update(values=batch["x"]))
        with pytest.raises(StepError, match=r"metric .*w.* is an nnx\.metrics\.Welford.*nnx\.metrics\.Average"):
            step(metrics, BATCH)

    def test_no_object_first(self):
        with pytest.raises(StepError, match=r"first argument holds no nnx object.*jdist\.distribute"):
            jdist.nnx.distribute(TWO)(lambda state, batch: state)({"w": 1.0}, BATCH)

    def test_a_loss_an_example(self):
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        with pytest.raises((StepError, TypeError), match="scalar"):
            jdist.nnx.value_and_grad(lambda m: m(X)[:, 0])(model)


class TestWordsOfAnError:
    """An error within the step names the arguments as its caller counts them."""

    def test_an_error_in_the_model(self):
        model, optimizer, metrics = objects()
        with pytest.raises(TypeError, match="dot_general") as caught:
            jdist.nnx.distribute(TWO)(train)(model, optimizer, metrics, {"x": np.ones((4, 3), np.float32)})
        (note,) = caught.value.__notes__[-1:]
        assert '\n  argument 1 `model`, argument 2 `optimizer`, argument 3 `metrics`, role "state": ' in note
        assert note.endswith("\n  argument 4 `batch`, role \"batch\": ['x'] float32[4, 3]")

    def test_an_object_behind_the_batch(self):
        def step(model, x, dropout):
            return {}["none"]

        held = nnx.Linear(1, 1, rngs=nnx.Rngs(0)), X, nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        with pytest.raises(KeyError) as caught:
            jdist.nnx.distribute(TWO)(step)(*held)
        assert "  argument 1 `model`, argument 3 `dropout`, role" in caught.value.__notes__[-1]
        assert '  argument 2 `x`, role "batch": float32[8, 1]' in caught.value.__notes__[-1]

    def test_buffers_that_are_gone(self):
        x = jnp.asarray(X)
        x.delete()
        with pytest.raises(jdist.errors.DonatedStateError, match=r"^argument 4 `batch` of train was donated"):
            jdist.nnx.distribute(TWO)(train)(*objects(), {"x": x})

    def test_the_gradient_of_jax(self):
        def step(model, batch):
            return jdist.value_and_grad(lambda model: jdist.mean(model(batch["x"])[:, 0]))(model)[0]

        model = nnx.Sequential(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
        with pytest.raises(TypeError, match="uint32") as caught:
            jdist.nnx.distribute(TWO)(step)(model, BATCH)
        assert any("take `jdist.nnx.value_and_grad`" in note for note in caught.value.__notes__)

    def test_an_object_from_outside(self):
        model, optimizer, _ = objects()

        def step(optimizer, batch):
            optimizer.update(model, jdist.nnx.grad(loss_fn)(model, batch))

        with pytest.raises(
            StepError, match=r"closes over\. Pass each object as an argument.*train_step\(model, optimizer"
        ):
            jdist.nnx.distribute(TWO)(step)(optimizer, BATCH)


class TestAfterAnError:
    def test_nan_leaves_the_objects_as_they_were_before_that_step(self):
        held = objects()
        step = jdist.nnx.distribute(TWO, max_in_flight=2)(train)
        step(*held, BATCH)
        step.wait()
        before = float(held[0].kernel.get_value()[0, 0])
        bad = {**BATCH, "x": X * np.float32(np.nan)}

        def until_raised():
            for _ in range(8):
                step(*held, bad)

        with pytest.raises(NonFiniteError) as caught:
            until_raised()
        assert caught.value.step == 1
        assert float(held[0].kernel.get_value()[0, 0]) == before
        assert float(step(*held, BATCH)["loss"]) > 0
        assert float(held[0].kernel.get_value()[0, 0]) != before

    @pytest.mark.parametrize("donate", [True, False])
    def test_an_interrupt_leaves_objects_that_can_be_used(self, donate, monkeypatch):
        held = objects()
        step = jdist.nnx.distribute(TWO, donate=donate)(train)
        step(*held, BATCH)

        def interrupt(token, lineage):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(step._distributed._window, "add", interrupt)
            with pytest.raises(KeyboardInterrupt):
                step(*held, BATCH)
        assert np.isfinite(held[0].kernel.get_value()).all()
        np.testing.assert_allclose(step(*held, BATCH)["loss"], plain(3)[1][2 if donate else 1], rtol=1e-4)

    def test_an_error_in_the_step_leaves_the_objects_alone(self):
        held = objects()
        with pytest.raises(jdist.errors.BatchError):
            jdist.nnx.distribute(TWO)(train)(*held, {"x": X[:3], "y": X[:3]})
        assert np.isfinite(held[0].kernel.get_value()).all()


def test_lower_and_wait():
    held = objects()
    step = jdist.nnx.distribute(TWO)(train)
    assert step.last_state is None
    assert "all_reduce" in step.lower(*held, BATCH).as_text()
    step(*held, BATCH)
    step.wait()
    nnx.update(held, step.last_state)
    assert step.__name__ == "train"


class TestRolesOfOtherArguments:
    def step(self, model, x, y):
        return ((model(x)[:, 0] - y) ** 2).mean()

    def arguments(self):
        x = np.arange(16, dtype=np.float32).reshape(8, 2)
        return nnx.Linear(2, 1, rngs=nnx.Rngs(0)), x, x.sum(1)

    def test_two_batches(self):
        strategy = jdist.mirrored([f"cpu:{i}" for i in range(8)])
        model, x, y = self.arguments()
        expected = float(self.step(model, x, y))
        run = jdist.nnx.distribute(strategy, args=("batch", "batch"))(self.step)
        assert float(run(model, x, y)) == pytest.approx(expected, rel=1e-5)
        assert float(run(model, x, y=y)) == pytest.approx(expected, rel=1e-5)

    def test_undeclared(self):
        for strategy in (jdist.one_device(), jdist.mirrored([f"cpu:{i}" for i in range(8)])):
            model, x, y = self.arguments()
            run = jdist.nnx.distribute(strategy)(self.step)
            for args, kwargs in (((model, x, y), {}), ((model, x), {"y": y})):
                with pytest.raises(StepError, match=r"`y` of step, .*as many rows.*`args=\('batch', 'batch'\)`"):
                    run(*args, **kwargs)
            assert float(jdist.nnx.distribute(strategy, args=("batch", "replicated"))(self.step)(model, x, y[:1])) > 0

    def test_objects_need_no_role(self):
        with pytest.raises(StepError, match=r"finds the objects itself\. Give only the roles of the other arguments"):
            jdist.nnx.distribute(jdist.one_device(), args=("state", "batch"))
