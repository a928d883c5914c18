"""All-reduce round a ring."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jdist.reduction.algorithm import Reduction, axes_size, keeping_nothing
from jdist.reduction.bucketed import by_vectors, padded


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
