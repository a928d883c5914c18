"""A run in words: its arithmetic before, its results after, and what to do if it fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.errors import NonFiniteError
from jdist.experiment.config import Config
from jdist.experiment.optimizer import explain
from jdist.experiment.prepare import Parts
from jdist.loop.report.metrics_file import Row
from jdist.loop.report.progress import readable
from jdist.support.checks import largest_divisor
from jdist.typing import PyTree


def arithmetic(config: Config, parts: Parts) -> str:
    """Works out the numbers of a config: `global batch 1,024 = 8 replicas x 128`, and what `scaling` makes of its options."""
    train, replicas = config.train, parts.strategy.num_replicas
    rows = -(-train.global_batch // replicas)
    batch = f"global batch {train.global_batch:,} = {replicas:,} replica{'s' if replicas > 1 else ''} x {rows:,}"
    if rows * replicas != train.global_batch:
        batch += f" - {rows * replicas - train.global_batch:,} padding"
        processes = parts.strategy.cluster.num_processes  # each pads its own rows
        if idle := processes * (replicas // processes - -(-train.global_batch // (processes * rows))):
            batch += f", so {idle:,} of {replicas:,} replicas train on padding alone"
    if train.accumulate > 1:
        batch += f", each worked through in {train.accumulate:,} parts"
    examples = parts.examples(parts.total_steps, train.global_batch)
    length = f"{parts.total_steps:,} steps = {examples:,} examples"
    if parts.steps_per_epoch is not None and parts.rows_per_epoch is not None:
        epochs = examples / parts.rows_per_epoch
        each = f"{parts.steps_per_epoch:,} step{'s' if parts.steps_per_epoch > 1 else ''} each"
        passes = readable(epochs) if epochs >= 1e-3 else "less than 0.001"
        length += f" = {passes} epochs of {parts.rows_per_epoch:,} ({each})"
    lines = [str(parts.strategy), batch, length]
    if train.optimizer.scaling is not None:
        lines.append(explain(train.optimizer.model_dump(), global_batch=train.global_batch))
    return "\n".join(lines)


def non_finite_advice(
    error: NonFiniteError, good: int, saved: int, *, total: int, steps_per_call: int, batch: PyTree = None
) -> str:
    """Advises what to do after a step that was not finite; `good` is the step before it."""
    # `saved` is the newest checkpoint's step, 0 without one. One call makes `steps_per_call` steps,
    # which must divide the remaining ones. `batch` is that of the step, if still known.
    if saved and saved == good:
        where, begin = f"The state before it, at step {good:,}, is saved.", "go on from here"
    elif saved:
        where, begin = f"The newest checkpoint is that of step {saved:,}.", "go on from there"
    else:
        where, begin = "The run has no checkpoint yet.", "start over"
    bad = [
        f"batch{jax.tree_util.keystr(path)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if jnp.issubdtype(np.asarray(leaf).dtype, jnp.inexact) and not np.isfinite(leaf).all()
    ]
    cause = f" The data themselves are: look at {', '.join(bad)} of that step." if bad else ""
    return (
        f"step {good + 1:,} was not applied: {error.leaf} is NaN or infinite.{cause} {where}\n"
        "The same command would come to the same step again: lower the learning rate or set train.clip_norm in a run "
        f"of another name, or {begin} and leave such steps out with train.non_finite=skip"
        f"{_calls_of(total - saved, steps_per_call)}."
    )


def _calls_of(left: int, steps_per_call: int) -> str:
    """Names the `steps_per_call` to go on with, where the one of the run does not divide the steps that are left."""
    if left % steps_per_call == 0:
        return ""
    fits = largest_divisor(left, steps_per_call)
    return f" and train.steps_per_call={fits}, as {steps_per_call} does not divide the {left:,} steps that are left"


def results(rows: Sequence[Row], baselines: Mapping[str, float]) -> str:
    """Formats the last evaluation, and below it the figures to compare it with."""
    last = next((row for row in reversed(rows) if any(name.startswith("eval/") for name in row)), {})
    measured = {name.removeprefix("eval/"): value for name, value in last.items() if name.startswith("eval/")}
    width = max(map(len, [*measured, *baselines]), default=0)
    lines = ["evaluation", *(f"  {name:<{width}}  {_figure(value)}" for name, value in measured.items())]
    if baselines:
        lines += ["for comparison", *(f"  {name:<{width}}  {_figure(value)}" for name, value in baselines.items())]
    return "\n".join(lines)


def _figure(value: Any) -> str:
    if value is None:
        return "not finite"
    if isinstance(value, list):
        return f"{' x '.join(map(str, np.shape(value)))} numbers, in metrics.jsonl"
    return f"{value:,.4f}" if value == 0 or 1e-3 <= abs(value) < 1e9 else readable(value)
