"""`jdist.evaluate` and `jdist.predict`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.core.remote import RemoteTree
from jdist.errors import BatchError, DatasetError, StepError, StrategyError, VerificationError
from tests.loop.loop_programs import DATA, create_state, errors, eval_step, in_batches, predict_step

W = np.array([1.0, -2.0, 0.5], np.float32)


def state() -> jdist.TrainState:
    made = create_state()
    return made.replace(params={"w": W})


@pytest.mark.parametrize("make", [lambda: jdist.data.from_arrays(DATA, global_batch=20), lambda: in_batches(20)])
def test_a_dataset_that_was_left_in_the_middle_is_gone_through_whole(make):
    strategy = jdist.mirrored(jax.devices()[:2])
    dataset, expected = strategy.distribute_dataset(make()), np.mean(errors({"w": W}, DATA))
    for _ in range(2):
        next(iter(dataset))
        measured = jdist.evaluate(eval_step, state(), dataset, strategy=strategy)
        assert measured["loss"] == pytest.approx(expected, rel=1e-5)
    next(iter(dataset))
    results = jdist.predict(predict_step, state(), dataset, strategy=strategy)
    np.testing.assert_array_equal(results["y"], DATA["y"])


def test_a_state_on_parameter_servers_is_asked_to_be_fetched():
    class Elsewhere(RemoteTree):
        shapes = property(lambda self: self.fetch())

        def fetch(self) -> Any:
            return state()

        def show(self) -> Any:
            return jdist.show(state())

    for call in (jdist.evaluate, jdist.predict, jdist.fit):
        with pytest.raises(StrategyError, match=r"lives on parameter servers, .* give `strategy.fetch\(state\)`"):
            call(eval_step, Elsewhere(), DATA, strategy=jdist.one_device(), global_batch=20)


def test_a_step_that_never_reads_the_mask_of_padded_batches_is_told_of():
    def careless(state: Any, batch: Any) -> Any:
        return {"loss": jdist.mean(errors(state.params, batch))}

    with pytest.warns(UserWarning, match=r'careless never reads batch\["mask"\]') as warned:
        jdist.evaluate(careless, state(), DATA, strategy=jdist.mirrored(), global_batch=64, verify="off")
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize("strategy", [jdist.default, jdist.one_device, jdist.mirrored, jdist.central_storage])
class TestUnderEachStrategy:
    def test_each_row_counts_once(self, strategy):
        expected = np.mean(errors({"w": W}, DATA))
        for batch in (100, 64, 7):
            measured = jdist.evaluate(eval_step, state(), DATA, strategy=strategy(), global_batch=batch)
            assert measured["loss"] == pytest.approx(expected, rel=1e-5)

    def test_predictions_come_in_order_without_padding(self, strategy):
        results = jdist.predict(predict_step, state(), DATA, strategy=strategy(), global_batch=16)
        np.testing.assert_array_equal(results["y"], DATA["y"])
        np.testing.assert_allclose(results["predicted"], DATA["x"] @ W, rtol=1e-4, atol=1e-6)


def test_an_evaluation_in_a_loop_is_compiled_once(compiled):
    strategy, own = jdist.one_device(), state()
    jdist.evaluate(eval_step, own, DATA, strategy=strategy, global_batch=16)
    compiled.clear()
    jdist.evaluate(eval_step, own, DATA, strategy=strategy, global_batch=16)
    assert not compiled


def test_metrics_by_name_and_all_at_once():
    metric = jdist.metrics.collect({"loss": jdist.metrics.mean(), "right": jdist.metrics.accuracy(threshold=0.0)})

    def step(own: Any, batch: Any) -> Any:
        inputs = {"loss": errors(own.params, batch), "right": (batch["x"] @ own.params["w"], batch["y"] > 0)}
        return metric.update(inputs, batch["mask"])

    expected = {"loss": np.mean(errors({"w": W}, DATA)), "right": np.mean((DATA["x"] @ W > 0) == (DATA["y"] > 0))}
    for strategy in (jdist.one_device(), jdist.mirrored(jax.devices()[:2])):
        found = jdist.evaluate(step, state(), DATA, strategy=strategy, global_batch=16, metrics=metric)
        assert found == pytest.approx(expected, rel=1e-5)
        options = {"strategy": strategy, "global_batch": 16, "metrics": {"all": metric}}
        named = jdist.evaluate(lambda own, batch: {"all": step(own, batch)}, state(), DATA, **options)
        assert named == pytest.approx({f"all/{name}": value for name, value in expected.items()}, rel=1e-5)


@pytest.mark.parametrize("ignored", [np.zeros(100, bool), np.arange(100) % 3 == 0])
def test_means_weigh_by_the_real_rows_whatever_a_leaf_of_the_masks_name_holds(ignored):
    strategy = jdist.mirrored(jax.devices()[:2])
    data = strategy.distribute_dataset(
        jdist.data.from_arrays(DATA | {"mask": ignored}, global_batch=16, epochs=1), with_mask=True
    )

    def step(own, pair):
        batch, real = pair
        return {"loss": jdist.mean(errors(own.params, batch), real)}

    measured = jdist.evaluate(step, state(), data, strategy=strategy)
    assert measured["loss"] == pytest.approx(errors({"w": W}, DATA).mean(), rel=1e-5)


OF_METRICS = jdist.distribute(eval_step, jdist.one_device(), args=("state", "batch"), returns=("metrics",))
OTHER_ROLES = jdist.distribute(lambda batch, own: {}, jdist.one_device(), args=("batch", "state"), returns=("metrics",))


@pytest.mark.parametrize(
    ("call", "step", "data", "error", "text"),
    [
        (
            functools.partial(jdist.evaluate, metrics={"los": jdist.metrics.mean()}),
            eval_step,
            DATA,
            StepError,
            r"`metrics` has 'los', but the step returned 'loss'\. Did you mean 'loss'",
        ),
        (jdist.predict, OF_METRICS, DATA, StepError, r'jdist\.predict needs .*returns=\("examples",\)'),
        (
            jdist.evaluate,
            OTHER_ROLES,
            DATA,
            StepError,
            r"has args=\('batch', 'state'\); jdist.evaluate calls a step with a state and a batch",
        ),
        (jdist.evaluate, eval_step, {name: x[:0] for name, x in DATA.items()}, DatasetError, "empty"),
        (
            jdist.evaluate,
            eval_step,
            DATA | {"mask": np.zeros(100, np.int32)},
            BatchError,
            r"leaf `mask` of its own \(int32\[rows\]\).*Rename the leaf",
        ),
        (
            jdist.evaluate,
            lambda own, batch: batch["x"].mean(),
            DATA,
            StepError,
            r"returned float32\[\] for metrics; return a dict",
        ),
    ],
)
def test_what_is_refused(call, step, data, error, text):
    with pytest.raises(error, match=text):
        call(step, state(), data, global_batch=16)


OWN_ROWS = {
    "perplexity": lambda error, mask: jnp.exp(jdist.mean(error, mask)),
    "signal to noise": lambda error, mask: -10 * jnp.log10(jdist.mean(error, mask)),
    "r squared": lambda error, mask: 1 - (error * mask).sum() / ((error - error.mean()) ** 2 * mask).sum(),
}


@pytest.mark.parametrize("name", OWN_ROWS)
def test_the_first_batch_is_verified_once_for_each_step(name):
    strategy = jdist.mirrored(jax.devices()[:2])
    rows = {"x": np.arange(1.0, 12.0, dtype=np.float32) / 4}

    def measured(w, batch):
        return {"result": OWN_ROWS[name](w * batch["x"], batch["mask"])}

    run = functools.partial(jdist.evaluate, measured, 1.0, rows, strategy=strategy, global_batch=4)
    with pytest.raises(VerificationError, match="measured differs between one replica and many"):
        run(verify="strict")
    with pytest.warns(jdist.VerificationWarning, match=r"metrics\['result'\]"):
        run()
    run()  # it has been said
    with pytest.raises(StepError, match="`verify` is 'frist'"):
        run(verify="frist")


def test_verify_warns_goes_on_or_is_off():
    strategy = jdist.mirrored(jax.devices()[:2])
    rows = np.arange(12, dtype=np.float32)

    def standardised(w, batch):
        return w * (batch - batch.mean()) / batch.std()

    def centred(w, batch):
        return w * (batch - batch.mean())

    run = functools.partial(jdist.predict, strategy=strategy, global_batch=4)
    with pytest.warns(jdist.VerificationWarning, match="statistics of each replica's own rows"):
        assert run(standardised, 1.0, rows).shape == (12,)
    run(centred, 1.0, rows, verify="off")


def test_of_a_batch_that_is_filled_up_the_real_rows_are_compared():
    strategy = jdist.mirrored(jax.devices()[:2])
    rows = {"x": np.arange(3, dtype=np.float32)}

    def centred(w, batch):
        return w * (batch["x"] - batch["x"].mean())

    run = functools.partial(jdist.predict, state=1.0, data=rows, strategy=strategy, global_batch=4, verify="strict")
    assert run(lambda w, batch: w * batch["x"]).shape == (3,)
    with pytest.raises(VerificationError):
        run(centred)
