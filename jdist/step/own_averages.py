"""Moving averages of a replica's own rows, as batch normalisation keeps them, that a step forgot to bring together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.collective_marks import collective_of
from jdist.errors import ReplicaDivergenceError
from jdist.jaxpr import graph, variation
from jdist.jaxpr.affine import AffineRule

PyTree = Any
# With these a step may bring values together in a way of its own, which cannot be seen.
_BY_HAND = ("ppermute", "all_to_all", "reduce_scatter", "psum_scatter")


def check_averages_combined(
    closed: Any,
    old: Sequence[Any],
    new: Sequence[Any],
    batch: Sequence[Any],
    state: PyTree,
    sizes: tuple[int, int],
) -> None:
    """Refuses a step whose replicas would keep moving averages of their own rows, where the state is one for all.

    What else differs is found by comparing the replicas after a step; a moving average is known for what it is from the
    traced step, before anything is compiled.

    Args:
        closed: the traced step.
        old: the arguments of it that are the state's leaves.
        new: its results that are the new state's leaves.
        batch: the arguments that are a replica's rows.
        state: the new state, arrays or shapes.
        sizes: the number of replicas, and of microbatches of each.

    Raises:
        ReplicaDivergenceError: names the leaves, and how to bring them together.
    """
    found, paths = variation.varying(closed, batch), jax.tree_util.tree_leaves_with_path(state)
    if len(paths) != len(old) or len(old) != len(new):
        return  # the state has changed its tree, which is refused elsewhere
    own = [
        (jax.tree_util.keystr(path) or "the state", before, after)
        for (path, _), before, after in zip(paths, old, new, strict=True)
        if graph.is_in(after, found) and jnp.issubdtype(after.aval.dtype, jnp.floating)
    ]
    if not own or any(_is_by_hand(eqn) for eqn in graph.body_of(closed).eqns):
        return
    slopes = [AffineRule(closed, before, after, sizes).of_program() for _, before, after in own]
    moving = [
        (name, slope)
        for (name, _, _), slope in zip(own, slopes, strict=True)
        if isinstance(slope, float | int) and 0 < slope < 1
    ]
    if not moving:
        return
    (name, slope), *others = moving
    more = f", and {len(others)} more like it," if others else ""
    # Parameters that differ as well are those of an optimiser whose gradients differ: it keeps moving averages of these.
    if len(moving) < len(own):
        remedy = (
            "Take gradients by `jdist.value_and_grad` (not `jax.`; of nnx modules by `jdist.nnx.value_and_grad`), and bring "
            'other averages together by `jdist.aggregate(new, "mean")`.'
        )
    else:
        remedy = (
            'Bring it together: `jdist.aggregate(new, "mean")`, or `aggregation={"batch_stats": "mean"}` of '
            "`jdist.TrainState.create`; or give the layer the rows of all replicas, "
            "`BatchNorm(axis_name=jdist.replica_axes())`."
        )
    raise ReplicaDivergenceError(
        f"state leaf {name}{more} becomes {slope:.6g} times its old value and something computed from a replica's own rows: a "
        "moving average, such as batch normalisation and optimisers keep, which the replicas would hold different values of. "
        f"{remedy}",
        tuple(name for name, _ in moving),
        tuple(tuple(range(sizes[0])) for _ in moving),
    )


def _is_by_hand(eqn: Any) -> bool:
    return collective_of(eqn) is None and any(graph.uses_primitive(eqn, name) for name in _BY_HAND)
