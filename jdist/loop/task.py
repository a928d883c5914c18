"""Tasks: a model, a loss and data, as five plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jdist.metrics import Metric
from jdist.typing import PyTree


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its loss and its data, for `jdist run`.

    A config names a function that returns one, by import path (`my_package.my_task:make`); its `task.options` are the
    keyword arguments, checked against the annotations. The function refuses one by a `jdist.tasks.options.OptionError`.

    Attributes:
        create_state: `(key, tx) -> state`; pure, so that a strategy can allocate it in its own layout.
        train_step: `(state, batch) -> (state, metrics)`, one replica's view, using `jdist.value_and_grad`
            and `jdist.mean`; `metrics` is a dict that holds "loss": scalars, and what `metrics` below contribute.
        eval_step: `(state, batch) -> metrics`, a dict of scalars, each a `jdist.mean` over the batch's rows, and of what
            `metrics` below contribute.
        train_data: `(global_batch, seed, epochs) -> source`; `epochs` None repeats without end. Another library's dataset
            that does not repeat is gone through as often as the run takes.
        eval_data: `(global_batch) -> source`, once through the held-out rows.
        metrics: by name the metrics of `jdist.metrics` that the steps return contributions to; or one metric, such as a
            `jdist.metrics.collect`, if its contribution is all that a step returns. None: scalars alone.
        baselines: figures to show next to the evaluation metrics, by name; called once, when the run ends.
    """

    create_state: Callable[[jax.Array, optax.GradientTransformation], PyTree]
    train_step: Callable[[PyTree, PyTree], tuple[PyTree, Mapping[str, jax.Array]]]
    eval_step: Callable[[PyTree, PyTree], Mapping[str, jax.Array]]
    train_data: Callable[[int, int, int | None], Any]
    eval_data: Callable[[int], Any]
    metrics: Mapping[str, Metric] | Metric | None = None
    baselines: Callable[[], Mapping[str, float]] | None = None
