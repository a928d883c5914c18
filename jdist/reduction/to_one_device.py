"""All-reduce by way of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jdist.reduction.algorithm import Reduction, axes_size, keeping_nothing
from jdist.reduction.vectors import by_vectors


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
