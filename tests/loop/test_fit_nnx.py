"""`jdist.fit` of steps that `jdist.nnx.distribute` made, against a loop of one's own over the same step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist import callbacks
from jdist.errors import StepError
from jdist.reduction import compressed
from tests.loop.loop_programs import DATA, HELD_OUT
from tests.toys import TWO

# Batch statistics and dropout of each replica's own differ from one replica's on purpose.
QUIET: dict[str, Any] = {"progress": False, "log_to": None, "global_batch": 16, "verify": "off"}


def create() -> tuple[Any, ...]:
    rngs = nnx.Rngs(0, dropout=1)
    model = nnx.Sequential(
        nnx.Linear(3, 8, rngs=rngs),
        nnx.BatchNorm(8, rngs=rngs),
        nnx.Dropout(0.2, rngs=rngs),
        nnx.Linear(8, 1, rngs=rngs),
    )
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    return model, nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param), metrics


def loss_of(model: Any, batch: Any) -> Any:
    return jdist.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2, batch["mask"])


def step_of(strategy: Any, **options: Any) -> Any:
    @jdist.nnx.distribute(strategy, **options)
    def train_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
        loss, grads = jdist.nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        metrics.update(loss=loss)
        return {"loss": loss}

    return train_step


def by_own_loop(strategy: Any, *, epochs: int, **options: Any) -> tuple[Any, list[float]]:
    step, objects, losses = step_of(strategy, **options), create(), []
    data = jdist.data.from_arrays(DATA, global_batch=16, shuffle_seed=0, epochs=epochs)
    for batch in strategy.distribute_dataset(data):
        losses.append(float(step(*objects, batch)["loss"]))
    return objects, losses


def assert_same(ours: Any, theirs: Any) -> None:
    ours, theirs = (jax.tree.leaves(jax.tree.map(without_keys, nnx.state(objects))) for objects in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def without_keys(x: Any) -> Any:
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (TWO, {}),
        (TWO, {"accumulate": 2}),
        (jdist.one_device(), {"accumulate": 4}),
        (TWO, {"precision": jdist.precision("fp16")}),
        (jdist.mirrored(["cpu:0", "cpu:1"], transform="jit"), {}),
        (jdist.mirrored(["cpu:0", "cpu:1"], all_reduce=compressed("int8")), {}),
    ],
    ids=["mirrored", "accumulate", "one device", "fp16", "jit", "compressed"],
)
def test_it_equals_a_loop_of_ones_own(strategy, options):
    wanted, losses = by_own_loop(strategy, epochs=2, **options)
    objects = create()
    trained, history = jdist.fit(
        step_of(strategy, **options), objects, DATA, epochs=2, shuffle_seed=0, log_every=1, **QUIET
    )
    assert trained is objects
    assert_same(trained, wanted)
    assert history["loss"][1].tolist() == losses
    assert len(history.epochs) == 2


@pytest.mark.parametrize("all_reduce", [None, compressed("int8")])
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(all_reduce, tmp_path):
    strategy = TWO if all_reduce is None else jdist.mirrored(["cpu:0", "cpu:1"], all_reduce=all_reduce)

    def fit(folder: str, *others: Any) -> tuple[Any, jdist.History]:
        save = callbacks.checkpoint(tmp_path / folder, every=3)
        told = {"callbacks": [save, *others], "shuffle_seed": 0, "epochs": 2}
        return jdist.fit(step_of(strategy), create(), DATA, **told, **QUIET)

    whole, history = fit("whole")
    fit("stopped", lambda moment: callbacks.Stop("here") if moment.step == 8 else None)
    again, resumed = fit("stopped")
    assert_same(again, whole)
    assert [row["epoch/loss"] for row in resumed.rows if "epoch/loss" in row] == [
        row["epoch/loss"] for row in history.rows if "epoch/loss" in row
    ]
    finished, _ = fit("stopped")  # nothing is left to do: the objects have what was saved
    assert_same(finished, whole)


def test_it_evaluates_by_a_function_of_the_objects():
    def eval_step(objects: Any, batch: Any) -> Any:
        model = objects[0]
        model.eval()
        return {"loss": loss_of(model, batch)}

    objects, history = jdist.fit(
        step_of(TWO), create(), DATA, epochs=2, eval_data=HELD_OUT, eval_step=eval_step, **QUIET
    )
    measured = jdist.evaluate(eval_step, objects, HELD_OUT, strategy=TWO, global_batch=16)
    assert measured["loss"] == pytest.approx(history.evals[-1]["loss"], rel=1e-6)


def test_one_object_is_given_and_returned_alone():
    @jdist.nnx.distribute(TWO)
    def train_step(objects: Any, batch: Any) -> Any:
        model, optimizer = objects
        loss, grads = jdist.nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return {"loss": loss}

    objects = create()[:2]
    trained, history = jdist.fit(train_step, objects, DATA, epochs=2, **QUIET)
    assert trained is objects
    assert history.epochs[1]["loss"] < history.epochs[0]["loss"]


def test_after_an_error_the_objects_have_the_newest_state():
    def fail(moment: Any) -> None:
        if moment.step == 3:
            raise KeyError("here")

    objects = create()
    with pytest.raises(KeyError):
        jdist.fit(step_of(TWO), objects, DATA, callbacks=[fail], **QUIET)
    assert int(objects[1].step[...]) == 3
    assert np.isfinite(objects[0].layers[0].kernel[...]).all()


def test_objects_that_are_not_the_steps_are_refused():
    with pytest.raises(
        StepError, match=r"train_step takes 3 objects before the batch \(model, optimizer, metrics\), and"
    ):
        jdist.fit(step_of(TWO), create()[:2], DATA, **QUIET)
    with pytest.raises(StepError, match=r"which changes its objects in place. Give the function itself"):
        jdist.fit(step_of(TWO), create(), DATA, eval_data=HELD_OUT, eval_step=step_of(TWO), **QUIET)
