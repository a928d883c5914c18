"""A linear model or an MLP on the arrays `x` and `y` of an `.npz` file: classification or regression."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from pydantic import Field

import jdist
from jdist.errors import ConfigError
from jdist.loop.task import Task
from jdist.tasks import options
from jdist.tasks.options import OptionError, near

Kind = Literal["classification", "regression"]


@options.checked
def make(
    *,
    # an `.npz` file with `x`, numbers [rows, ...], and `y`: [rows] classes (whole numbers, bools or
    # strings), or numbers [rows] or [rows, outputs]
    path: options.Text,
    kind: Kind | None = None,  # None: regression if `y` is floating point, else classification
    hidden: Sequence[options.Count] = (),  # widths of the hidden layers; empty for a linear model
    dropout: options.Fraction = 0.0,  # share of each hidden layer dropped in training
    standardise: bool = True,  # `x`, and `y` in regression, to mean 0 and variance 1 on the training rows
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2,  # share of the rows to evaluate on
    split_seed: options.Natural = 0,  # seeds the choice of those rows
) -> Task:
    """Makes the task of predicting `y` from `x`: batches {"x": float32 [rows, features], "y": ...}."""
    # Its metrics are "loss" and "accuracy", or "loss" (squared error, in variances of `y` if
    # standardised) and "mean_absolute_error" (in units of `y`).
    with options.blaming("path"):
        data = load(path, kind=kind, standardise=standardise, held_out=held_out, split_seed=split_seed)
    model = MLP(widths=tuple(hidden), outputs=data.outputs, dropout=dropout)
    classify = data.classes is not None

    def losses_and_scores(logits: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        if classify:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses, logits.argmax(-1) == y
        return jnp.square(logits - y), jnp.abs(logits - y) * data.y_scale

    score = "accuracy" if classify else "mean_absolute_error"

    def create_state(key: jax.Array, tx: optax.GradientTransformation) -> jdist.TrainState:
        init_key, step_key = jax.random.split(key)
        params = model.init(init_key, jnp.zeros((1, data.train["x"].shape[1])))["params"]
        return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=tx, rng=step_key)

    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        key = jdist.replica_rng(jax.random.fold_in(state.rng, state.step))

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = state.apply_fn({"params": params}, batch["x"], train=True, rngs={"dropout": key})
            losses, scores = losses_and_scores(logits, batch["y"])
            return jdist.mean(losses, batch["mask"]), scores

        (loss, scores), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, score: jdist.mean(scores, batch["mask"])}

    def eval_step(state: Any, batch: Any) -> dict[str, jax.Array]:
        logits = state.apply_fn({"params": state.params}, batch["x"])
        losses, scores = losses_and_scores(logits, batch["y"])
        return {"loss": jdist.mean(losses, batch["mask"]), score: jdist.mean(scores, batch["mask"])}

    return Task(
        create_state=create_state,
        train_step=train_step,
        eval_step=eval_step,
        train_data=lambda global_batch, seed, epochs: jdist.data.from_arrays(
            data.train, global_batch=global_batch, shuffle_seed=seed, epochs=epochs
        ),
        eval_data=lambda global_batch: jdist.data.from_arrays(data.test, global_batch=global_batch),
        baselines=lambda: {f"constant_{score}": constant_score(data)},
    )


class MLP(nn.Module):
    """Dense layers with ReLU between them; without hidden layers a linear model."""

    widths: tuple[int, ...]  # features of each hidden layer
    outputs: int  # classes, or numbers predicted
    dropout: float  # share of each hidden layer dropped in training

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.outputs)(x)


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """The rows of an `.npz` file to train on and to evaluate on, checked, split and standardised."""

    train: dict[str, np.ndarray]  # {"x": float32 [rows, features], "y": int32 [rows] or float32 [rows, outputs]}
    test: dict[str, np.ndarray]  # the same of the held-out rows
    outputs: int  # number of classes, or of numbers predicted
    classes: np.ndarray | None  # what the values of "y" stand for, in classification; None in regression
    y_scale: np.ndarray  # size of one unit of "y" in units of the file, float32 [outputs]; ones unless standardised


def load(path: str, *, kind: Kind | None, standardise: bool, held_out: float, split_seed: int) -> Table:
    """Reads, checks, splits and standardises the rows of an `.npz` file."""
    # `kind` None decides by the dtype of `y`. Standardising uses the training rows' mean and
    # deviation. At least one row is held out, and at least one is not.
    x, y = _read(path)
    x = _numbers(x, name="x", path=path)
    classify = kind == "classification" or (kind is None and y.dtype.kind in "iubU")
    classes = None
    if classify:
        classes, y = _classes(y, inferred=kind is None, path=path)
    else:
        y = _numbers(y, name="y", path=path)
    order = np.random.default_rng(split_seed).permutation(len(x))
    test = max(1, min(len(x) - 1, round(held_out * len(x))))
    chosen, rest = np.sort(order[:test]), np.sort(order[test:])
    scale = np.ones(1 if classify else y.shape[1], np.float32)
    if standardise:
        x, _ = _standardised(x, rest)
        if not classify:
            y, scale = _standardised(y, rest)
    y = y.astype(np.int32) if classify else y.astype(np.float32)
    x = x.astype(np.float32)
    return Table(
        train={"x": x[rest], "y": y[rest]},
        test={"x": x[chosen], "y": y[chosen]},
        outputs=y.shape[1] if classes is None else len(classes),
        classes=classes,
        y_scale=scale,
    )


def constant_score(data: Table) -> float:
    """Scores the best constant prediction on the held-out rows."""
    # The accuracy of the commonest training class, or the mean absolute error, in units of the
    # file, of the training median.
    if data.classes is not None:
        commonest = np.bincount(data.train["y"], minlength=data.outputs).argmax()
        return float(np.mean(data.test["y"] == commonest))
    return float(np.mean(np.abs(data.test["y"] - np.median(data.train["y"], axis=0)) * data.y_scale))


def _read(path: str) -> tuple[np.ndarray, np.ndarray]:
    place = Path(path).expanduser()
    how = f"Save it with np.savez({path!r}, x=x, y=y)."
    try:
        # Opened here, since np.load leaves the file open when it is not a sound archive.
        with place.open("rb") as stream:
            content = np.load(stream, allow_pickle=False)
            names = content.files if isinstance(content, np.lib.npyio.NpzFile) else None
            arrays = {name: content[name] for name in ("x", "y") if name in (names or ())}
    except FileNotFoundError as error:
        remedy = near(place, ending=".npz")
        raise OptionError("path", f"the file {place.resolve()} does not exist", remedy=remedy) from error
    except OSError as error:
        raise ConfigError(f"{place.resolve()} cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{place} is not an intact .npz file of plain arrays ({error}). {how}") from error
    if names is None:
        raise ConfigError(f"{place} holds a single array without a name. {how}")
    missing = [name for name in ("x", "y") if name not in arrays]
    if missing:
        raise ConfigError(
            f"{place} has no array {' and no array '.join(missing)}; it holds {', '.join(names) or 'none'}. {how}"
        )
    x, y = arrays["x"], arrays["y"]
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
        raise ConfigError(
            f"{place}: x has shape {x.shape} and y has shape {y.shape}; both must start with the same number of rows."
        )
    if len(x) < 2 or x.size == 0 or y.size == 0:
        raise ConfigError(
            f"{place}: x has shape {x.shape} and y has shape {y.shape}; at least 2 rows are needed, one to hold out."
        )
    return x, y


def _numbers(values: np.ndarray, *, name: str, path: str) -> np.ndarray:
    """Converts values to float64 [rows, features], every one finite."""
    if values.dtype.kind not in "fiub":
        raise ConfigError(
            f"{path}: {name} has dtype {values.dtype}, but it must hold real numbers. Encode or convert it first."
        )
    numbers = values.reshape(len(values), -1).astype(np.float64)
    bad = np.argwhere(~np.isfinite(numbers))
    if len(bad):
        row, column = bad[0]
        raise ConfigError(
            f"{path}: {name} holds {len(bad)} value(s) that are NaN or infinite, the first in row {row}, "
            f"column {column}. Fill them or leave those rows out."
        )
    return numbers


def _classes(y: np.ndarray, *, inferred: bool, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Finds the different values of `y`, sorted, and for each row the index of its own."""
    if y.ndim > 1 and y.size == len(y):
        y = y.reshape(-1)
    if y.ndim != 1 or y.dtype.kind not in "fiubU":
        raise ConfigError(
            f"{path}: y has shape {y.shape} and dtype {y.dtype}; classes are [rows] whole numbers, bools or "
            "strings. For numbers set `task.options.kind=regression`."
        )
    if y.dtype.kind == "f" and not np.all(y == np.round(y)):
        raise ConfigError(
            f"{path}: y holds numbers that are not whole, which can't name classes. Set `task.options.kind=regression`."
        )
    classes, index = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise ConfigError(f"{path}: y holds one class only, {classes[0]!r}; at least 2 are needed.")
    if inferred and y.dtype.kind in "iu" and len(classes) > max(20, len(y) // 2):
        raise ConfigError(
            f"{path}: y holds {len(classes)} different whole numbers in {len(y)} rows, which looks like "
            "regression. Set `task.options.kind` to regression or classification."
        )
    return classes, index


def _standardised(values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shifts and scales values to mean 0 and deviation 1 on `rows` (a constant column: 0 there); returns the deviation too."""
    deviation = values[rows].std(axis=0)
    deviation = np.where(deviation > 0, deviation, 1.0)
    return (values - values[rows].mean(axis=0)) / deviation, deviation.astype(np.float32)
