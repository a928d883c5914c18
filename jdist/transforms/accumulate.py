"""Gradient accumulation: the gradient part over microbatches, one all-reduce, one update."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jdist import replica
from jdist.boundary import split
from jdist.context import ReplicaTrace, Residuals, tracing
from jdist.errors import BoundaryError
from jdist.strategy import Strategy
from jdist.transforms.loops import scan
from jdist.transforms.results import EXTREME, LOCAL, METRIC, ROWS, TOTAL, countable

PyTree = Any
# (state, batches, others) -> (state, outputs, kinds of the outputs' leaves)
Pure = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, list[str]]]


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
    # Every k-th row: in the global view each device then keeps its own rows, and padding spreads evenly.
    micro = jax.tree.map(lambda x: x.reshape(x.shape[0] // k, k, *x.shape[1:]).swapaxes(0, 1), batches)
    first = jax.tree.map(lambda x: x[0], micro)
    kinds: list[str] = []

    def without_kinds(state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, PyTree]:
        new_state, outputs, kinds[:] = pure(state, batches, others)
        return new_state, outputs

    parts = split(strategy, without_kinds, state, first, others, num_microbatches=k)
    # The update is traced with the whole batch, so that a count made from its shape counts every row.
    whole = split(strategy, without_kinds, state, batches, others, num_microbatches=k)
    if (whole.cuts, whole.carried) != (parts.cuts, parts.carried):
        raise BoundaryError(
            "the step does different things for different numbers of rows; `accumulate` cannot split it."
        )
    if parts.crossing:
        raise BoundaryError(
            f"with `accumulate`, these results need values of a single microbatch together with the combined gradients: "
            f"{'; '.join(map(_readable, parts.crossing))}. Compute each from "
            "the batch alone, or from the combined loss and gradients alone."
        )
    state_leaves, state_treedef = jax.tree.flatten(state)
    numbers = jnp.arange(k)

    counts = [c.sum(0) for c in jax.lax.map(lambda x: parts.counts(state, x[1], others, x[0]), (numbers, micro))]
    with tracing(ReplicaTrace(strategy)):
        counts = replica.all_reduce(counts, "sum") if counts and replica.replica_axes() else counts

    def one(carried: list[jax.Array], x: tuple[jax.Array, PyTree]) -> Any:
        leaves = list(state_leaves)
        for i, leaf in zip(parts.carried, carried, strict=True):
            leaves[i] = leaf
        now = jax.tree.unflatten(state_treedef, leaves)
        cuts, carried, _, outputs = parts.gradients(now, x[1], others, x[0], counts)
        early = [
            leaf if leaf is None or kind == ROWS else countable(leaf) for leaf, kind in zip(outputs, kinds, strict=True)
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

    with tracing(ReplicaTrace(strategy, residuals=residuals)):
        metrics = [leaf if kind == METRIC else None for leaf, kind in zip(sums, kinds, strict=True)]
        size = k
        if replica.replica_axes() is not None:
            size *= replica.num_replicas()
            if strategy.keeps_residuals:
                metrics, cuts = replica.all_reduce(metrics, "sum"), _sum_each(cuts, parts.gradients_of)
            else:
                cuts, metrics = replica.all_reduce((cuts, metrics), "sum")
        cuts = [x if op == "sum" else x / size for x, op in zip(cuts, parts.cuts, strict=True)]
        new_leaves, late = whole.update(state, others, cuts, carried, [])

    outputs = []
    for kind, metric, local, row, after in zip(kinds, metrics, sums, rows, late, strict=True):
        if after is not None:
            outputs.append(after)
        elif row is not None:
            outputs.append(row.swapaxes(0, 1).reshape(-1, *row.shape[2:]))
        elif kind == TOTAL:  # the same on all replicas already; those of the microbatches add up
            outputs.append(local)
        elif metric is not None:
            outputs.append(metric / size)
        else:
            outputs.append(jnp.divide(local, k))
    outputs = jax.tree.unflatten(parts.outputs_treedef, outputs)
    return jax.tree.unflatten(parts.state_treedef, new_leaves), outputs


def _sum_each(cuts: list[jax.Array], sizes: tuple[int, ...]) -> list[jax.Array]:
    """Sums the replicas' losses and gradients, each gradient by itself."""
    summed, rest = [], iter(cuts)
    for size in sizes:
        loss, *grads = (next(rest) for _ in range(size))
        summed += jax.tree.leaves(replica.reduce_gradients(loss, grads, "sum"))
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
