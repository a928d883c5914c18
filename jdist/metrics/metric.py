"""Metrics: each batch contributes to a total, from which the result is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

PyTree = Any

# How many contributions may wait to be read: steps run ahead, and a parameter server's workers all
# have work, while the memory that contributions take stays bounded.
_AHEAD = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """A metric, as a value: four pure functions and nothing that changes.

    A *contribution* is what one global batch adds, a tree of arrays that `update` makes on the replicas; a *total* is a tree of
    the same form, of numpy arrays on the host, in 64 bits. `add` is associative and `zero` is its neutral element, so any way
    to cut a data set into batches, replicas and processes gives the same total.

    Attributes:
        name: for errors.
        update: `(*inputs, mask=None) -> contribution`; called in a step, on every replica, with its slice of the batch. The
            contribution is that of the global batch, the same on every replica, and is returned among the step's metrics.
        zero: the total of nothing.
        add: `(total, contribution) -> total`. A leading axis of several steps (`steps_per_call`) is added up, too.
        compute: `(total) -> result`; of a single contribution as well.

    Example:
        >>> import jdist, jax.numpy as jnp
        >>> accuracy = jdist.metrics.accuracy()
        >>> total = accuracy.zero
        >>> for ids, labels in [([0, 1, 2], [0, 1, 1]), ([2], [2])]:
        ...     total = accuracy.add(total, accuracy.update(jnp.array(ids), jnp.array(labels)))
        >>> accuracy.compute(total)
        0.75
    """

    name: str
    update: Callable[..., PyTree]
    zero: PyTree
    add: Callable[[PyTree, PyTree], PyTree]
    compute: Callable[[PyTree], Any]

    def total(self, contributions: Iterable[PyTree]) -> PyTree:
        """Adds up contributions, and reads each only after some more were asked for, so that steps run ahead.

        Args:
            contributions: for example `eval_step(state, batch) for batch in batches`.

        Returns:
            The total, for `compute`, or to `add` more to.
        """
        total, waiting = self.zero, deque[PyTree]()
        for contribution in contributions:
            waiting.append(contribution)
            if len(waiting) > _AHEAD:
                total = self.add(total, waiting.popleft())
        for contribution in waiting:
            total = self.add(total, contribution)
        return total

    def __repr__(self) -> str:
        return f"<metric {self.name}>"
