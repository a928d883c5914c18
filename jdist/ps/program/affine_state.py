"""What a step carries besides the gradient (a counter, a running mean), so that no worker writes over what others
wrote.

A worker computes such a leaf's new value from the old one that it has pulled, which may be old by now. Where the traced
step shows that `new = slope * old + offset`, and neither number depends on the leaf, the worker pushes the offset, and
the server applies the same rule to what it has: a counter counts everything, and a mean takes every batch in, once, as
if the workers had taken turns. (Adding `new - old` would do for a counter. A running mean would be pulled back several
times for each new batch, and with many workers swing beyond all bounds.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jdist.jaxpr.affine import AffineRule, Slope, wide
from jdist.jaxpr.phases import Split
from jdist.step.microbatches import Gradients, Plan, microbatches
from jdist.support.arrays import is_key

PyTree = Any


@dataclass(frozen=True)
class Affine:
    """A leaf that becomes `slope * old + offset`.

    Attributes:
        leaf: its number in the state.
        slope: a number of the program; None if only the worker knows it.
        rule: computes it there.
        shape: of one that is computed.
    """

    leaf: int
    slope: float | None
    rule: AffineRule
    shape: Any


@dataclass(frozen=True)
class Carrying:
    """What a step computes from a batch and puts into its state by way of no gradient.

    Attributes:
        leaves: the numbers of all these leaves.
        affine: those that are found by a slope.
        given: variables of the traced step whose values the slopes are computed from.
        own_places: of each leaf that microbatches write without combining it (`Split.carried`) the place among
            `leaves`.
    """

    leaves: tuple[int, ...]
    affine: tuple[Affine, ...]
    given: tuple[Any, ...]
    own_places: tuple[int, ...]

    def pushed(self, plan: Plan, state: PyTree, batches: PyTree, others: PyTree, made: Gradients) -> list[Any]:
        """Returns what can be pushed: the new values, keys as their data, then offsets, then slopes.

        Traced on the worker, behind the phases.

        Args:
            plan: the step.
            state: the old state.
            batches: one replica's rows.
            others: further arguments.
            made: what the phases gave.
        """
        traced, old = plan.parts.traced, jax.tree.leaves(state)
        behind = traced.piece([traced.new_state[i] for i in self.leaves])
        new = behind(state, others, made.combined, made.carried)
        slopes = self._computed(plan, state, batches, others, made.combined)
        offsets = []
        for found, slope in zip(self.affine, self._slopes(slopes), strict=True):
            kept, value = _times(slope, old[found.leaf]), wide(new[self.leaves.index(found.leaf)])
            if jnp.issubdtype(kept.dtype, jnp.floating):  # infinity less itself is no number
                offset = jnp.where(jnp.isfinite(kept), value - kept, value)
                offsets.append(jnp.where(value == kept, jnp.zeros_like(value), offset))
            else:
                offsets.append(value - kept)
        return [*(jax.random.key_data(x) if is_key(x) else x for x in new), *offsets, *slopes]

    def own(self, pushed: Sequence[Any], impls: Sequence[Any]) -> list[Any]:
        """Returns the leaves that microbatches wrote, among what was pushed.

        Args:
            pushed: what `pushed` gave.
            impls: the implementation of each leaf of the state that is a PRNG key, None of the others.
        """
        written = [(pushed[place], impls[self.leaves[place]]) for place in self.own_places]
        return [x if impl is None else jax.random.wrap_key_data(x, impl=impl) for x, impl in written]

    def applied(self, state: Sequence[Any], new: Sequence[Any], pushed: Sequence[Any]) -> list[Any]:
        """The new leaves of a state.

        Args:
            state: the old leaves, as the server has them.
            new: the new leaves as the worker has them.
            pushed: what `pushed` gave.
        """
        leaves, n = list(new), len(self.leaves)
        offsets, slopes = pushed[n : n + len(self.affine)], pushed[n + len(self.affine) :]
        for found, offset, slope in zip(self.affine, offsets, self._slopes(slopes), strict=True):
            old = state[found.leaf]
            leaves[found.leaf] = (_times(slope, old) + offset).astype(old.dtype)
        return leaves

    def _computed(self, plan: Plan, state: PyTree, batches: PyTree, others: PyTree, combined: list[Any]) -> list[Any]:
        """The slopes that only the worker knows: the mean of its microbatches'."""
        wanted = [found for found in self.affine if found.slope is None]
        if not wanted:
            return []
        known = dict(zip(plan.parts.traced.combined, combined, strict=True))
        rest = [known[v] for v in self.given if v in known]

        def one(number: jax.Array, batch: PyTree) -> list[jax.Array]:
            values = [*jax.tree.leaves((state, batch, others)), number, *rest]
            return [
                jnp.broadcast_to(jnp.asarray(found.rule(values)), found.shape.shape).astype(found.shape.dtype)
                for found in wanted
            ]

        micro = microbatches(plan.strategy, batches, plan.k)
        if plan.k == 1:
            return one(jnp.int32(0), jax.tree.map(lambda x: x[0], micro))
        each = jax.lax.map(lambda x: one(*x), (jnp.arange(plan.k), micro))
        return [x.mean(0).astype(x.dtype) for x in each]

    def _slopes(self, computed: Sequence[Any]) -> list[Slope]:
        """For each of `affine`."""
        rest = iter(computed)
        return [next(rest) if found.slope is None else found.slope for found in self.affine]


def find_carrying(parts: Split, leaves: Sequence[int], by_slope: Sequence[int], sizes: tuple[int, int]) -> Carrying:
    """Finds which leaves that a step carries have a slope; called where the replica axes are bound.

    Args:
        parts: the step as one microbatch sees it.
        leaves: the leaves that it carries.
        by_slope: those of them whose slope is looked for.
        sizes: the number of replicas, and of microbatches of each.
    """
    traced = parts.traced
    carried = set(traced.depends([traced.state[i] for i in leaves]))
    given = [
        *traced.state,
        *traced.batch,
        *traced.others,
        traced.microbatch,
        *(v for v in traced.combined if v not in carried),
    ]
    found = []
    for i in by_slope:
        old = traced.state[i]
        if not _is_number(old.aval):
            continue
        rule = AffineRule(traced.closed, old, traced.new_state[i], sizes, given)
        slope = rule.of_program()
        if isinstance(slope, float | int):
            if slope != 0:
                found.append(Affine(i, slope, rule, None))
        elif slope is not None:
            found.append(Affine(i, None, rule, slope))
    places = tuple(list(leaves).index(c.leaf) for c in parts.carried)
    return Carrying(tuple(leaves), tuple(found), tuple(given), places)


def _is_number(aval: Any) -> bool:
    """Whether a leaf is of real numbers, no key and no flag."""
    return jnp.issubdtype(aval.dtype, jnp.floating) or jnp.issubdtype(aval.dtype, jnp.integer)


def _times(slope: Slope, old: Any) -> Any:
    """The part of the old value that stays; nothing of one that is forgotten, infinity as well."""
    old = wide(old)
    if isinstance(slope, float | int):
        return old * jnp.asarray(slope).astype(old.dtype) if slope != 1 else old
    return jnp.where(slope == 0, jnp.zeros_like(old), old * slope)
