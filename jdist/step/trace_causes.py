"""The likely causes of differences between one replica and many, read from both programs and from what differs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core as jex

from jdist.jaxpr import graph
from jdist.jaxpr.graph import ClosedJaxpr
from jdist.step.rounding import as_numbers

_ONE_OPERAND = (
    "convert_element_type",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
    "copy",
    "psum",
    "psum_invariant",
    "pmean",
)
_WITH_CONSTANT = ("mul", "div", "sub", "add", "neg", "max", "min")
_EXTREMES = ("reduce_max", "reduce_min", "argmax", "argmin", "pmax", "pmin")
_STATISTICS = ("batch_stats", "BatchStat", "batch_statistics")


@dataclass(frozen=True)
class Cause:
    """A likely cause of a difference.

    Attributes:
        description: what it is, as a clause.
        remedy: what to write instead, as a sentence.
    """

    description: str
    remedy: str


PADDING = Cause(
    "rows that only fill the batch up count: the step does not leave them out everywhere",
    'Take means by `jdist.mean(losses, batch["mask"])`.',
)
APART = Cause(
    "each replica wrote values of its own rows to the state: a gradient that was never brought together (`jax.grad`, also of "
    "single examples), or a counter",
    "Take gradients by `jdist.value_and_grad`; average what was computed example by example by `jdist.all_reduce(grads, "
    '"mean")`, and other state by `jdist.aggregate(x, "mean")` or "sum".',
)
STATISTICS = Cause(
    "batch normalisation sees each replica's own rows",
    "Give the layer `axis_name=jdist.replica_axes()` (of nnx `axis_name=strategy.axes`); or keep it so, as many do, and say "
    '`verify="off"`.',
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
    "Lead every leaf of the batch with its rows, `jnp.swapaxes(x, 0, 1)` inside the step.",
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
    "a loss or metric is no mean over the rows, as `sum / sum(weights)` is none: a replica divides by a number of its own",
    "Take weighted means by `jdist.mean(losses, weights)`; of other ratios reduce both parts first, "
    '`jdist.all_reduce((a, b), "sum")`.',
)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence on a step that differs.

    Attributes:
        one: its jaxpr as one replica.
        many: its jaxpr as it is distributed.
        rows: rows that one replica sees.
        parts: into how many parts the batch is cut, microbatches counted.
        accumulates: whether a replica's rows are cut into microbatches.
        apart: whether the replicas' states differ from one another.
        padded: whether the batch has rows that only fill it up.
    """

    one: Any
    many: Any
    rows: int
    parts: int
    accumulates: bool
    apart: bool
    padded: bool


def of_step(evidence: Evidence, names: list[str]) -> Cause:
    """Finds the likely cause of differences that reach the state, or a metric that shows no cause of its own."""
    own = evidence.rows // evidence.parts
    if evidence.padded:
        return PADDING
    if evidence.apart:
        return APART
    if any(part in name for name in names for part in _STATISTICS):
        return STATISTICS_OF_MICROBATCHES if evidence.accumulates else STATISTICS
    if _pairs(evidence.one, evidence.rows) and (own < 2 or _pairs(evidence.many, own)):
        return PAIRS
    if _cuts(evidence.one, evidence.rows):
        return CUT
    lengths = Counter(_lengths(evidence.one)) - Counter(_lengths(evidence.many))
    if any(length >= evidence.parts and length % evidence.parts == 0 for length in lengths):
        return LOOPS
    return NO_MEAN


def of_metric(evidence: Evidence, one: Any, many: Any, place: int) -> Cause | None:
    """Finds the cause of a metric's difference in its values or its computation; None: the step's.

    Args:
        evidence: of the step.
        one: the metric as one replica.
        many: the metric as it is distributed.
        place: of the metric among the results of the step's jaxpr.
    """
    value, other = as_numbers(one).ravel(), as_numbers(many).ravel()
    last = _last_reduction(evidence.one, evidence.one.jaxpr.outvars[place])
    if last in _EXTREMES:
        return EXTREME
    if value.any() and np.allclose(other * evidence.parts, value, rtol=1e-3):
        return TOTAL
    return None


def of_shape(one: tuple[int, ...], many: tuple[int, ...]) -> Cause:
    """Names the cause of a result whose shape follows the rows that a replica sees."""
    return Cause(
        f"its shape follows a replica's rows: {one} as one replica, {many} distributed, where what is in one place belongs to "
        "different rows",
        'Return results of rows with the rows first, in a role of their own, `returns=("state", "metrics", "examples")`, or '
        "take their mean.",
    )


def _lengths(closed: Any) -> list[int]:
    return [eqn.params["length"] for eqn in graph.all_equations(closed) if eqn.primitive.name == "scan"]


def _pairs(closed: Any, rows: int) -> bool:
    """Whether anything has two axes of rows."""
    shapes = (getattr(v.aval, "shape", ()) for eqn in graph.all_equations(closed) for v in eqn.outvars)
    return rows > 1 and any(sum(size == rows for size in shape) > 1 for shape in shapes)


def _cuts(closed: Any, rows: int) -> bool:
    """Whether an array of all rows is cut along them."""
    for eqn in graph.all_equations(closed):
        if eqn.primitive.name not in ("slice", "dynamic_slice", "gather", "reshape", "split"):
            continue
        before = getattr(eqn.invars[0].aval, "shape", ())
        for v in eqn.outvars:
            after = v.aval.shape
            if len(before) < 1 or before[0] != rows:
                continue
            if eqn.primitive.name == "reshape":
                if len(after) == len(before) + 1 and after[2:] == before[1:] and 1 < after[0] < rows:
                    return True
            elif len(after) == len(before) and after[1:] == before[1:] and 1 < after[0] < rows:
                return True
    return False


def _last_reduction(closed: Any, wanted: Any) -> str:
    """Finds the primitive that a result comes from, past what changes its form or scales it; "" if it comes from none."""
    jaxpr = getattr(closed, "jaxpr", closed)
    made_by = {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}
    while not isinstance(wanted, jex.Literal) and wanted in made_by:
        eqn, place = made_by[wanted]
        inner = [param for param in eqn.params.values() if isinstance(param, ClosedJaxpr | jex.Jaxpr)]
        if inner and len(getattr(inner[0], "jaxpr", inner[0]).outvars) == len(eqn.outvars):
            inside = getattr(inner[0], "jaxpr", inner[0])
            return _last_reduction(inside, inside.outvars[place])
        known = [v for v in eqn.invars if not isinstance(v, jex.Literal)]
        if eqn.primitive.name in _ONE_OPERAND and len(eqn.invars) > place:
            wanted = eqn.invars[place]
        elif eqn.primitive.name in _WITH_CONSTANT and len(known) == 1:
            wanted = known[0]
        else:
            return eqn.primitive.name
    return ""
