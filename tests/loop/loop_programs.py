"""A small regression to train, whose numbers can be computed by hand."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

import jdist

ROWS = 100
RNG = np.random.default_rng(3)
DATA = {"x": RNG.normal(size=(ROWS, 3)).astype(np.float32), "y": RNG.normal(size=ROWS).astype(np.float32)}
HELD_OUT = {"x": DATA["x"][:10] + 1, "y": DATA["y"][:10]}
QUIET: dict[str, Any] = {"progress": False, "log_to": None}


def create_state(key: jax.Array | None = None) -> jdist.TrainState:
    return jdist.TrainState.create(params={"w": np.zeros(3, np.float32)}, tx=optax.sgd(0.1))


def errors(params: Any, batch: Any) -> Any:
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def train_step(state: Any, batch: Any) -> Any:
    loss, grads = jdist.value_and_grad(lambda params: jdist.mean(errors(params, batch), batch["mask"]))(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def eval_step(state: Any, batch: Any) -> Any:
    return {"loss": jdist.mean(errors(state.params, batch), batch["mask"])}


def predict_step(state: Any, batch: Any) -> Any:
    return {"predicted": batch["x"] @ state.params["w"], "y": batch["y"]}


EVAL: dict[str, Any] = {"eval_data": HELD_OUT, "eval_step": eval_step}


def fit(
    *told: Any, step: Any = train_step, state: Any = None, data: Any = DATA, **options: Any
) -> tuple[Any, jdist.History]:
    """Trains without a bar or a file, with callbacks, on batches of 16 rows of arrays."""
    assert not (told and "callbacks" in options)
    given = {"callbacks": told, **QUIET, **({"global_batch": 16} if isinstance(data, dict) else {})} | options
    return jdist.fit(step, create_state() if state is None else state, data, **given)


def in_batches(rows: int) -> list[Any]:
    """Cuts the data into batches of so many rows."""
    return [{name: x[i : i + rows] for name, x in DATA.items()} for i in range(0, ROWS, rows)]


def by_numpy(epochs: int, *, global_batch: int) -> tuple[np.ndarray, list[float]]:
    """The parameters after training in the data's order, and the mean loss of each epoch's rows."""
    w, means = np.zeros(3), []
    for _ in range(epochs):
        losses = []
        for at in range(0, ROWS, global_batch):
            x, y = DATA["x"][at : at + global_batch].astype(float), DATA["y"][at : at + global_batch].astype(float)
            error = x @ w - y
            losses += list(error**2)
            w = w - 0.1 * 2 * x.T @ error / len(y)
        means.append(float(np.mean(losses)))
    return w, means
