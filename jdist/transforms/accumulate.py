"""Gradient accumulation: the gradient part over microbatches, one all-reduce, one update."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jdist import gradients, replica
from jdist.boundary import Split, split
from jdist.context import ReplicaTrace, Residuals, tracing
from jdist.errors import BoundaryError
from jdist.reducible import countable
from jdist.strategy import Strategy
from jdist.transforms.loops import scan
from jdist.transforms.results import EXTREME, LOCAL, METRIC, ROWS

PyTree = Any
# (state, batches, others) -> (state, outputs, kinds of the outputs' leaves)
Pure = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, list[str]]]
Combine = Callable[[PyTree], PyTree]


@dataclass(frozen=True)
class Plan:
    """A step that was split for `k` microbatches.

    Attributes:
        k: the number of microbatches.
        parts: the step as one microbatch sees it.
        whole: the step as all of a replica's rows see it; its update part is the one to run.
        kinds: how each output comes together from the replicas.
    """

    k: int
    parts: Split
    whole: Split
    kinds: list[str]


@dataclass(frozen=True)
class Gradients:
    """What the gradient part gives, over all microbatches and replicas.

    Attributes:
        cuts: the combined gradients and losses.
        carried: the leaves of the state that the gradient part wrote.
        outputs: those outputs that do not wait for the update, None in place of the rest.
    """

    cuts: list[jax.Array]
    carried: list[jax.Array]
    outputs: list[jax.Array | None]


def accumulated(
    strategy: Strategy,
    pure: Pure,
    k: int,
    state: PyTree,
    batches: PyTree,
    others: PyTree,
    residuals: Residuals | None = None,
) -> tuple[PyTree, PyTree]:
    """One step over `k` microbatches.

    Args:
        strategy: what the step runs under.
        pure: the step.
        k: the number of microbatches.
        state: the state.
        batches: one replica's rows.
        others: further arguments.
        residuals: what the all-reduce keeps of each gradient.

    Returns:
        `(new state, outputs)`, as `pure` with the whole of `batches` gives them.

    Raises:
        BoundaryError: the step cannot be split.
    """
    plan = make_plan(strategy, pure, k, state, batches, others)
    sum_cuts = (lambda cuts: _sum_each(cuts, plan.parts.gradients_of)) if strategy.keeps_residuals else None
    made = gradient_part(strategy, plan, state, batches, others, sum_cuts, residuals)
    with tracing(ReplicaTrace(strategy)):
        new_leaves, late = plan.whole.update(state, others, made.cuts, made.carried, [])
        own = [
            x if mine and kind == METRIC else None
            for x, mine, kind in zip(late, plan.whole.own, plan.kinds, strict=True)
        ]
        if jax.tree.leaves(own):
            late = [x if mean is None else mean for x, mean in zip(late, replica.all_reduce(own, "mean"), strict=True)]
    outputs = [early if after is None else after for early, after in zip(made.outputs, late, strict=True)]
    outputs = jax.tree.unflatten(plan.parts.outputs_treedef, outputs)
    return jax.tree.unflatten(plan.parts.state_treedef, new_leaves), outputs


def make_plan(
    strategy: Strategy,
    pure: Pure,
    k: int,
    state: PyTree,
    batches: PyTree,
    others: PyTree,
    *,
    needs_cut: bool = True,
    otherwise: str = "leave `accumulate` at 1",
) -> Plan:
    """Splits a step for `k` microbatches; the arguments are those of `accumulated` and of `boundary.split`.

    Raises:
        BoundaryError: the step cannot be split.
    """
    kinds: list[str] = []

    def without_kinds(state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, PyTree]:
        new_state, outputs, kinds[:] = pure(state, batches, others)
        return new_state, outputs

    def split_for(batches: PyTree) -> Split:
        return split(
            strategy,
            without_kinds,
            state,
            batches,
            others,
            num_microbatches=k,
            needs_cut=needs_cut,
            otherwise=otherwise,
        )

    parts = split_for(jax.tree.map(lambda x: x[0], _microbatches(batches, k)) if k > 1 else batches)
    # The update is traced with the whole batch, so that a count made from its shape counts every row.
    whole = split_for(batches) if k > 1 else parts
    if (whole.cuts, whole.carried) != (parts.cuts, parts.carried):
        raise BoundaryError(
            "the step does different things for different numbers of rows; `accumulate` cannot split it."
        )
    if parts.crossing:
        results = "; ".join(dict.fromkeys(map(_readable, parts.crossing)))  # two values may go into the same results
        raise BoundaryError(
            "these results need values of a single microbatch or replica together with the combined gradients: "
            f"{results}. Compute each from the batch alone, or from the combined loss and gradients alone; or {otherwise}."
        )
    return Plan(k, parts, whole, kinds)


def _microbatches(batches: PyTree, k: int) -> PyTree:
    """`k` microbatches, stacked.

    Every k-th row: in the global view each device then keeps its own rows, and padding spreads evenly.
    """
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // k, k, *x.shape[1:]).swapaxes(0, 1), batches)


def gradient_part(
    strategy: Strategy,
    plan: Plan,
    state: PyTree,
    batches: PyTree,
    others: PyTree,
    sum_cuts: Combine | None = None,
    residuals: Residuals | None = None,
) -> Gradients:
    """Runs the gradient part over all microbatches and combines what the replicas computed.

    Args:
        strategy: what the step runs under.
        plan: the step.
        state: the state; leaves that the gradient part does not read may hold anything of their shape.
        batches: one replica's rows.
        others: further arguments.
        sum_cuts: sums gradients and losses over the replicas; None: an all-reduce.
        residuals: what the all-reduce keeps of each gradient.

    Returns:
        The combined gradients, and what else the gradient part gives.
    """
    run = _once if plan.k == 1 else _in_loop
    cuts, carried, outputs = run(strategy, plan, state, batches, others)
    with tracing(ReplicaTrace(strategy, residuals=residuals)):
        size = plan.k
        metrics = [leaf if kind == METRIC else None for leaf, kind in zip(outputs, plan.kinds, strict=True)]
        if replica.replica_axes() is not None:
            size *= replica.num_replicas()
            if sum_cuts is None:
                cuts, metrics = replica.all_reduce((cuts, metrics), "sum")
            else:
                cuts, metrics = (
                    sum_cuts(cuts),
                    replica.all_reduce(metrics, "sum") if jax.tree.leaves(metrics) else metrics,
                )
    cuts = [x if op == "sum" else x / size for x, op in zip(cuts, plan.parts.cuts, strict=True)]
    for i, metric in enumerate(metrics):
        if metric is not None:  # totals are the same on all replicas already, and those of the microbatches add up
            outputs[i] = metric / size
    return Gradients(cuts, carried, outputs)


def _summed_counts(strategy: Strategy, counts: list[jax.Array]) -> list[jax.Array]:
    with tracing(ReplicaTrace(strategy)):
        return replica.all_reduce(counts, "sum") if counts and replica.replica_axes() else counts


def _once(strategy: Strategy, plan: Plan, state: PyTree, batches: PyTree, others: PyTree) -> Any:
    """The gradient part on one replica whose rows are one microbatch."""
    counts = _summed_counts(strategy, plan.parts.counts(state, batches, others, jnp.int32(0)))
    cuts, carried, _, outputs = plan.parts.gradients(state, batches, others, jnp.int32(0), counts)
    return cuts, carried, outputs


def _in_loop(strategy: Strategy, plan: Plan, state: PyTree, batches: PyTree, others: PyTree) -> Any:
    """The gradient part on one replica, over its microbatches: sums for the cuts and metrics, means for what is local."""
    parts, kinds = plan.parts, plan.kinds
    micro, numbers = _microbatches(batches, plan.k), jnp.arange(plan.k)
    first = jax.tree.map(lambda x: x[0], micro)
    state_leaves, state_treedef = jax.tree.flatten(state)
    counts = [c.sum(0) for c in jax.lax.map(lambda x: parts.counts(state, x[1], others, x[0]), (numbers, micro))]
    counts = _summed_counts(strategy, counts)

    def one(carried: list[jax.Array], x: tuple[jax.Array, PyTree]) -> Any:
        leaves = list(state_leaves)
        for i, leaf in zip(parts.carried, carried, strict=True):
            leaves[i] = leaf
        now = jax.tree.unflatten(state_treedef, leaves)
        cuts, carried, _, outputs = parts.gradients(now, x[1], others, x[0], counts)
        early = [
            leaf if leaf is None or kind == ROWS else countable(jnp.asarray(leaf))
            for leaf, kind in zip(outputs, kinds, strict=True)
        ]
        for leaf, kind in zip(early, kinds, strict=True):
            _check_local(leaf, kind)
        rows = [leaf if kind == ROWS else None for leaf, kind in zip(early, kinds, strict=True)]
        sums = [None if kind == ROWS else leaf for leaf, kind in zip(early, kinds, strict=True)]
        return carried, ((cuts, sums), rows)

    # Summing the stacked results would keep k gradients alive, so the sum is part of the carry.
    carried = [state_leaves[i] for i in parts.carried]
    shapes = jax.eval_shape(lambda: one(carried, (jnp.int32(0), first))[1][0])
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, _wide(s.dtype)), shapes)

    def add(carry: Any, x: Any) -> Any:
        carried, total = carry
        carried, (now, rows) = one(carried, x)
        return (carried, jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, now)), rows

    (carried, total), rows = scan(strategy, add, (carried, zeros), (numbers, micro))
    cuts, sums = jax.tree.map(lambda x, s: x.astype(s.dtype), total, shapes)
    outputs = []
    for kind, total, row in zip(kinds, sums, rows, strict=True):
        if row is not None:
            outputs.append(row.swapaxes(0, 1).reshape(-1, *row.shape[2:]))
        else:
            outputs.append(jnp.divide(total, plan.k) if kind == LOCAL and total is not None else total)
    return cuts, carried, outputs


def _sum_each(cuts: list[jax.Array], sizes: tuple[int, ...]) -> list[jax.Array]:
    """Sums the replicas' losses and gradients, each gradient by itself."""
    summed, rest = [], iter(cuts)
    for size in sizes:
        loss, *grads = (next(rest) for _ in range(size))
        summed += jax.tree.leaves(gradients.reduce_gradients(loss, grads, "sum"))
    return summed


def _readable(names: str) -> str:
    """Names of results as the user knows them: in the split step the state comes first, then outputs by role, then flags."""
    return re.sub(r"\[1\]\[0\]\[\d+\]", "result ", re.sub(r"(^|, )\[0\]", r"\1state leaf ", names))


def _wide(dtype: Any) -> Any:
    """What to add up in: float32 for half precision, which would lose small microbatches."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _check_local(leaf: jax.Array | None, kind: str) -> None:
    if leaf is not None and kind == EXTREME:
        raise BoundaryError(
            "with `accumulate`, a metric that is a maximum or minimum over the replicas would be averaged over microbatches. "
            'Return it per example (role "examples"), or leave `accumulate` at 1.'
        )
    if leaf is not None and kind == LOCAL and not (leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.floating)):
        raise BoundaryError(
            f"with `accumulate`, a per-replica result is averaged over microbatches and must be a floating-point scalar; "
            f'this one is {leaf.dtype}{list(leaf.shape)}. Return rows with the role "examples".'
        )
