"""Every metric of a data set, under any strategy: as the metrics of an evaluation and of training, and by scikit-learn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.metrics as theirs

import jdist

ROWS, GLOBAL_BATCH, CLASSES = 60, 16, 3
METRICS = {
    "loss": jdist.metrics.mean(),
    "accuracy": jdist.metrics.accuracy(),
    "top_2": jdist.metrics.top_k(2),
    "confusion": jdist.metrics.confusion_matrix(CLASSES),
    "f1": jdist.metrics.f1(CLASSES),
    "is_two": jdist.metrics.accuracy(threshold=0.5),
    "auc": jdist.metrics.auc(),
}
METRIC = jdist.metrics.collect(METRICS)


def rows() -> dict[str, np.ndarray]:
    """Inputs of few values, so that scores are often equal; with `w` of small integers the logits are exact anywhere."""
    rng = np.random.default_rng(5)
    x = rng.integers(-2, 3, (ROWS, 4)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, ROWS)}


def create(key: jax.Array | None = None) -> jdist.TrainState:
    w = jnp.array([[1.0, -1.0, 0.0], [0.0, 1.0, 1.0], [-1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    return jdist.TrainState.create(
        params={"w": w}, tx=optax.sgd(0.0)
    )  # it learns nothing: each step sees the same model


def update(logits: jax.Array, batch: Any) -> Any:
    labels, is_two, score = batch["y"], batch["y"] == 2, logits[:, 2] - logits[:, 0]
    both = logits, labels
    inputs = dict.fromkeys(("accuracy", "top_2", "confusion", "f1"), both)
    inputs |= {"loss": logits.sum(-1), "is_two": (score, is_two), "auc": (score, is_two)}
    return METRIC.update(inputs, batch["mask"])


def eval_step(state: jdist.TrainState, batch: Any) -> Any:
    return update(batch["x"] @ state.params["w"], batch)


def train_step(state: jdist.TrainState, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        logits = batch["x"] @ params["w"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jdist.mean(losses, batch["mask"]), logits

    (_, logits), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), update(logits, batch)


def evaluated(strategy: jdist.Strategy) -> dict[str, Any]:
    state = strategy.init(create, jax.random.key(0))
    step = jdist.distribute(eval_step, strategy, args=("state", "batch"), returns=("metrics",))
    batches = strategy.distribute_dataset(jdist.data.from_arrays(rows(), global_batch=GLOBAL_BATCH))
    return METRIC.compute(METRIC.total(step(state, batch) for batch in batches))


def trained(strategy: jdist.Strategy, options: dict[str, Any]) -> dict[str, Any]:
    """The same, by steps that also train; the last batch is short, and of `steps_per_call` there is a part of a call."""
    state = strategy.init(create, jax.random.key(0))
    step = jdist.distribute(train_step, strategy, **options)
    source = jdist.data.from_arrays(rows(), global_batch=GLOBAL_BATCH)
    contributions = []
    for batch in strategy.distribute_dataset(source, steps_per_call=options.get("steps_per_call", 1)):
        state, contribution = step(state, batch)
        contributions.append(contribution)
    return METRIC.compute(METRIC.total(contributions))


def by_scikit_learn() -> dict[str, Any]:
    """Of all rows at once."""
    arrays = rows()
    logits, labels = arrays["x"] @ np.asarray(create().params["w"]), arrays["y"]
    predictions, is_two, score = logits.argmax(-1), labels == 2, logits[:, 2] - logits[:, 0]
    return {
        "loss": float(np.mean(logits.sum(-1, dtype=np.float64))),
        "accuracy": theirs.accuracy_score(labels, predictions),
        "top_2": theirs.top_k_accuracy_score(labels, logits, k=2, labels=range(CLASSES)),
        "confusion": theirs.confusion_matrix(labels, predictions, labels=range(CLASSES)),
        "f1": theirs.f1_score(labels, predictions, labels=range(CLASSES), average="macro", zero_division=0),
        "is_two": theirs.accuracy_score(is_two, score > 0.5),
        "auc": theirs.roc_auc_score(is_two, score),
    }


def check(found: dict[str, Any]) -> None:
    expected = by_scikit_learn()
    assert list(found) == list(METRICS)
    assert found["confusion"].dtype == np.int64
    assert found["confusion"].sum() == ROWS
    for name, value in expected.items():
        # Sums of whole numbers: what differs is the order of a few operations in float64, if anything.
        np.testing.assert_allclose(found[name], value, rtol=1e-14, atol=0, err_msg=name)
