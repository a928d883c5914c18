"""All-reduce in several exchanges of vectors: round a ring, along a tree, in two stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jdist.errors import StrategyError
from jdist.reduction.algorithm import Reduction, axes_size, keeping_nothing
from jdist.reduction.bucketed import by_vectors, padded
from jdist.support import xla
from jdist.support.checks import as_int
from jdist.typing import PyTree


def ring() -> Reduction:
    """Sums round a ring: each replica sends to the next one only, and the vector travels in parts, twice round.

    Every replica sends `2 (num_replicas - 1) / num_replicas` times the size of the tree, the least possible, in as many
    steps as there are replicas: for large trees over slow links, not for small ones.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.

    Example:
        >>> import jdist
        >>> jdist.mirrored(all_reduce="ring").reduction.name
        'ring'
    """

    def total(vector: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        n = axes_size(axes)
        own = jax.lax.axis_index(axes)
        to_next = [(i, (i + 1) % n) for i in range(n)]
        parts = padded(vector, n).reshape(n, -1)

        def send(parts: jax.Array, number: jax.Array) -> jax.Array:
            part = jax.lax.dynamic_index_in_dim(parts, number % n, keepdims=False)
            return jax.lax.ppermute(part, axes, to_next)

        def add(k: jax.Array, parts: jax.Array) -> jax.Array:
            return parts.at[(own - k - 1) % n].add(send(parts, own - k))

        def copy(k: jax.Array, parts: jax.Array) -> jax.Array:
            return parts.at[(own - k) % n].set(send(parts, own + 1 - k))

        parts = jax.lax.fori_loop(0, n - 1, add, parts)  # replica i then has the sum of part i + 1
        parts = jax.lax.fori_loop(0, n - 1, copy, parts)
        return parts.reshape(-1)[: vector.size]

    return keeping_nothing("ring", lambda tree, axes: by_vectors(lambda vector: total(vector, axes), tree))


def to_one_device() -> Reduction:
    """Sums to replica 0 and copies the sum to all others, both along a binary tree.

    It takes `2 log2(num_replicas)` steps, each of the whole tree: for trees so small that the number of steps counts.
    What `tf.distribute.ReductionToOneDevice` does, with a tree in place of a star.

    Example:
        >>> import jdist
        >>> jdist.mirrored(all_reduce="to_one_device").reduction.name
        'to_one_device'
    """

    def total(vector: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        n = axes_size(axes)
        own = jax.lax.axis_index(axes)
        distances = [2**k for k in range((n - 1).bit_length())]
        for far in reversed(distances):  # a replica that nobody sends to receives zeros
            vector = vector + jax.lax.ppermute(vector, axes, [(i + far, i) for i in range(min(far, n - far))])
        for far in distances:
            sent = jax.lax.ppermute(vector, axes, [(i, i + far) for i in range(min(far, n - far))])
            vector = jnp.where((own >= far) & (own < 2 * far), sent, vector)
        return vector

    return keeping_nothing("to_one_device", lambda tree, axes: by_vectors(lambda vector: total(vector, axes), tree))


def hierarchical(inner: int | str, outer: int | str) -> Reduction:
    """Sums by reduce-scatter within each inner group, all-reduce of the parts across groups, all-gather within each group.

    Only `1 / inner` of the tree crosses from group to group, so use it where that is the slow way: the machines of a
    cluster, the slices of a TPU pod.

    Args:
        inner: how many replicas, next to each other in the strategy's order, make one group; or the name of a mesh axis.
        outer: how many groups there are; or the name of the other mesh axis.

    Returns:
        The Reduction. A strategy of another number of replicas than the sizes make refuses it with a StrategyError, and
        where it is traced one tells if the step's mesh has no such axes.

    Raises:
        StrategyError: `inner` and `outer` are neither two positive integers nor two names.

    Example:
        >>> import jdist
        >>> jdist.reduction.hierarchical(inner=4, outer=2).name
        'hierarchical(4, 2)'
    """
    sizes = all(as_int(x, least=1) is not None for x in (inner, outer))
    names = all(isinstance(x, str) and x for x in (inner, outer)) and inner != outer
    if not sizes and not names:
        raise StrategyError(
            f"hierarchical: `inner` is {inner!r} and `outer` is {outer!r}; they must be two integers of at least 1 with a "
            "product equal to the number of replicas, or the names of two mesh axes."
        )
    name = f"hierarchical({inner}, {outer})"

    def sum_of(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
        within, across, group_size = _stages(inner, outer, axes)

        def total(vector: jax.Array) -> jax.Array:
            part = _sum_scatter(padded(vector, group_size), group_size, within)
            part = jax.lax.psum(part, **across)
            return jax.lax.all_gather(part, **within, axis=0, tiled=True)[: vector.size]

        return by_vectors(total, tree)

    if isinstance(inner, int) and isinstance(outer, int):
        return keeping_nothing(name, sum_of, num_replicas=inner * outer)
    return keeping_nothing(name, sum_of)


def _sum_scatter(vector: jax.Array, group_size: int, within: dict[str, Any]) -> jax.Array:
    """Sums a vector within a group; each replica receives its part."""
    if xla.gloo_scatters_wrongly():
        parts = jax.lax.all_to_all(vector.reshape(group_size, -1), **within, split_axis=0, concat_axis=0, tiled=True)
        return parts.sum(0, dtype=vector.dtype)
    return jax.lax.psum_scatter(vector, **within, scatter_dimension=0, tiled=True)


def _stages(inner: Any, outer: Any, axes: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Makes the arguments of collectives within a group and across groups, and the size of a group."""
    if isinstance(inner, str):
        if {inner, outer} != set(axes):
            raise StrategyError(
                f"hierarchical: the replicas are spread over the mesh axes {axes}, not over {inner!r} and {outer!r}. Name "
                "these, or give two sizes with a product equal to the number of replicas."
            )
        return {"axis_name": inner}, {"axis_name": outer}, jax.lax.axis_size(inner)
    n = axes_size(axes)
    if inner * outer != n:
        raise StrategyError(
            f"hierarchical: `inner` is {inner} and `outer` is {outer}, which makes {inner * outer} replicas; there are "
            f"{n}. Their product must be the number of replicas."
        )
    groups = [[outer_i * inner + i for i in range(inner)] for outer_i in range(outer)]
    same_place = [[outer_i * inner + i for outer_i in range(outer)] for i in range(inner)]
    within = {"axis_name": axes, "axis_index_groups": groups}
    across = {"axis_name": axes, "axis_index_groups": same_place}
    return within, across, inner
