"""The likely causes of differences between one replica and many, read from both programs and from what differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jdist.jaxpr import graph, variation
from jdist.step.differences import as_numbers
from jdist.step.notices import divides_by_global_batch, last_reductions
from jdist.step.trial import Trial

_EXTREMES = ("reduce_max", "reduce_min", "argmax", "argmin", "pmax", "pmin")
_CURVED = ("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "integer_pow", "pow", "tanh", "logistic")
_STATISTICS = ("batch_stats", "BatchStat", "batch_statistics")


@dataclass(frozen=True)
class Cause:
    """A likely cause of a difference, as a clause, and the remedy, as a sentence."""

    description: str
    remedy: str


PADDING = Cause(
    "rows that only fill the batch up count, as losses, in statistics or in a divisor such as `x.shape[0]`",
    'Take means by `jdist.mean(losses, batch["mask"])`.',
)
APART = Cause(
    "each replica wrote values of its own rows to the state: a gradient that was never brought together (`jax.grad`, also of "
    "single examples), or a counter",
    "Take gradients by `jdist.value_and_grad`. Gradients of single examples are clipped first: average the clipped ones by "
    '`jdist.all_reduce(mean_of_clipped, "mean")`, and add noise, as of `dpsgd`, after that. Combine other state by '
    '`jdist.aggregate(x, "mean")` or "sum".',
)
STATISTICS = Cause(
    "rows are normalised by the statistics of each replica's own rows, as by batch normalisation",
    "Give the layer `axis_name=jdist.replica_axes()` (of nnx `axis_name=strategy.axes`), and a mean of your own to "
    '`jdist.all_reduce(x.mean(0))`; or keep it so, as many do with batch normalisation, and say `verify="off"`.',
)
GLOBAL = Cause(
    "a sum over a replica's own rows is divided by the rows of the global batch, and then averaged over the replicas",
    'Sum gradients, `jdist.value_and_grad(loss_fn, op="sum")`; or take `jdist.mean(losses, batch["mask"])`.',
)
CURVED = Cause(
    "it is a function of a mean, such as `exp` or `sqrt`, which each replica takes of its own part of the mean",
    "Combine the mean first: `jnp.exp(jdist.all_reduce(jdist.mean(losses, mask)))`.",
)
STATISTICS_OF_MICROBATCHES = Cause(
    "batch normalisation sees the rows of one microbatch at a time",
    'Do without `accumulate`; or keep it so, as most do, and say `verify="off"`. Between replicas '
    "`axis_name=jdist.replica_axes()` brings its statistics together, between microbatches nothing does.",
)
CUT = Cause(
    "minibatches are cut from each replica's own rows",
    "Feed minibatches as batches, with `accumulate` or `steps_per_call`.",
)
LOOPS = Cause(
    "the step loops over the first axis of its batch, which is cut among the replicas: is it time, not rows?",
    "Say where the rows are, `batch_axis=1`, to `jdist.distribute` and to `strategy.distribute_dataset`.",
)
BROADCAST = Cause(
    "[rows, 1] meets [rows], which makes an array of rows by rows: each row's value meets those of all rows",
    "Give both one shape, `x[:, 0]` or `jnp.squeeze(x, -1)`; where pairs of rows are meant, gather the others' by "
    "`jdist.all_gather(x)`.",
)
PAIRS = Cause(
    "rows are compared with one another, as by a contrastive loss, and a replica has only its own",
    "Gather the others' by `jdist.all_gather(x)` before they are compared.",
)
TOTAL = Cause(
    "it is a sum or a count over a replica's own rows, and metrics are averaged over the replicas",
    'Sum it over them, `jdist.all_reduce(x, "sum")`, or return a mean, `jdist.mean(x, batch["mask"])`.',
)
EXTREME = Cause(
    "it is a maximum or minimum over a replica's own rows, and metrics are averaged over the replicas",
    'Take that of all by `jdist.all_reduce(x, "max")`, or "min".',
)
NO_MEAN = Cause(
    "a loss or metric, such as `sum / sum(weights)`, is not a mean over the rows: a replica divides by a number of its own",
    "Take weighted means by `jdist.mean(losses, weights)`; of other ratios reduce both parts first, "
    '`jdist.all_reduce((a, b), "sum")`.',
)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence on a step that differs."""

    one: Trial
    many: Trial
    rows: int  # of one replica
    parts: int  # of the batch: replicas times microbatches
    accumulates: bool
    apart: bool  # whether the replicas' states differ from one another
    padded: bool  # whether the batch has rows that only fill it up


def of_step(evidence: Evidence, names: list[str]) -> Cause:
    """Finds the likely cause of differences that reach the state, or a metric that shows no cause of its own."""
    if evidence.padded:
        return PADDING
    if evidence.apart:
        return APART
    if any(map(is_statistic, names)):
        return STATISTICS_OF_MICROBATCHES if evidence.accumulates else STATISTICS
    if divides_by_global_batch(evidence.many.closed, evidence.rows // evidence.parts, evidence.parts):
        return GLOBAL
    # Combined values are known as such in the program of many, and microbatches are cut there.
    signs = _signs(evidence.many) & {BROADCAST, PAIRS, STATISTICS} | _signs(evidence.one) & {CUT, LOOPS}
    return next((cause for cause in (BROADCAST, CUT, LOOPS, PAIRS, STATISTICS) if cause in signs), NO_MEAN)


def is_statistic(name: str) -> bool:
    """Returns whether a leaf's name is that of batch statistics."""
    return any(part in name for part in _STATISTICS)


def has_statistics(one: Trial, many: Trial, names: list[str]) -> bool:
    """Returns whether a step normalises rows by statistics of the batch."""
    return any(map(is_statistic, names)) or STATISTICS in _signs(one) | _signs(many)


def of_metric(evidence: Evidence, one: Any, many: Any, place: int) -> Cause | None:
    """Finds the cause of a metric's difference in its values or its computation, at its place; None: the step's."""
    value, other, closed = as_numbers(one).ravel(), as_numbers(many).ravel(), evidence.one.closed
    last = {eqn.primitive.name for eqn, _ in last_reductions(closed, closed.jaxpr.outvars[place])}
    if last.intersection(_EXTREMES):
        return EXTREME
    if value.any() and not evidence.padded and np.allclose(other * evidence.parts, value, rtol=1e-3):
        return TOTAL
    return CURVED if last.intersection(_CURVED) and not evidence.apart else None


def of_shape(one: tuple[int, ...], many: tuple[int, ...]) -> Cause:
    """Names the cause of a result with a shape that follows the rows that a replica sees."""
    return Cause(
        f"its shape follows a replica's rows: {one} as one replica, {many} distributed, where one place holds values "
        "of different rows",
        'Return results of rows with the rows first, in a role of their own, `returns=("state", "metrics", "examples")`, or '
        "take their mean.",
    )


def _signs(trial: Trial) -> set[Cause]:
    """Finds the causes with their pattern somewhere in a program."""
    signs = set[Cause]()
    for eqn, origins in variation.origins(trial.closed, trial.batch):
        name, axes = eqn.primitive.name, [origin.rows for origin in origins]
        if any(len(each) > 1 for each in axes):
            signs.add(PAIRS)
        if name in ("add", "sub", "mul", "div") and set(axes) == {frozenset({0}), frozenset({1})}:
            signs.add(BROADCAST if eqn.outvars[0].aval.ndim == 2 else PAIRS)
        if name == "sub" and all(origin.varies for origin in origins) and axes[0] ^ axes[1]:
            signs.add(STATISTICS)
        if name in ("slice", "dynamic_slice", "reshape", "split") and _is_cut(axes[0], eqn):
            signs.add(CUT)
        if name == "scan":
            first = graph.number_not_scanned(eqn.invars, graph.body_of(graph.nested_jaxprs(eqn)[0]).invars)
            signs.update(LOOPS for each in axes[first:] if 0 in each)
    return signs


def _is_cut(rows: frozenset[int], eqn: Any) -> bool:
    """Returns whether an equation makes of all rows several parts, or one that is more than a row."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    is_split = len(after) > len(before) and after[2:] == before[1:]
    return 0 in rows and 1 < after[0] < before[0] and (is_split or after[1:] == before[1:])
