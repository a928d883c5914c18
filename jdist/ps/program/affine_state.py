"""Carries what a step puts into its state besides the gradient (a counter, a running mean), so that no worker overwrites
another's.

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
from jdist.step.microbatches import PhaseResults, Plan, microbatches
from jdist.support.arrays import is_key
from jdist.typing import PyTree


@dataclass(frozen=True)
class CarriedLeaves:
    """The leaves that a step computes from a batch without a gradient."""

    leaves: tuple[int, ...]  # their numbers in the state
    affine: tuple[int, ...]  # those with a rule `new = slope * old + offset`
    slopes: tuple[
        float | jax.ShapeDtypeStruct, ...
    ]  # of these: a number, or the shape of one that only the worker knows
    rules: tuple[AffineRule, ...]  # of these: computes the slope on the worker
    known: tuple[Any, ...]  # variables of the traced step from which the slopes are computed

    def pushed(self, plan: Plan, state: PyTree, batches: PyTree, others: PyTree, of_phases: PhaseResults) -> list[Any]:
        """Computes a worker's push: new values (keys as their data), then offsets, then slopes."""
        # Traced on the worker, after the phases; `batches` are one replica's rows.
        traced, old = plan.split.traced, jax.tree.leaves(state)
        after_phases = traced.piece([traced.new_state[i] for i in self.leaves])
        new = after_phases(state, others, of_phases.combined, of_phases.carried)
        computed = self._computed_slopes(plan, state, batches, others, of_phases.combined)
        offsets = []
        for i, slope in zip(self.affine, self._slopes(computed), strict=True):
            kept, value = _times(slope, old[i]), wide(new[self.leaves.index(i)])
            if jnp.issubdtype(kept.dtype, jnp.floating):  # infinity less itself is NaN
                offset = jnp.where(jnp.isfinite(kept), value - kept, value)
                offsets.append(jnp.where(value == kept, jnp.zeros_like(value), offset))
            else:
                offsets.append(value - kept)
        return [*(jax.random.key_data(x) if is_key(x) else x for x in new), *offsets, *computed]

    def written_by_phases(self, split: Split, pushed: Sequence[Any], impls: Sequence[Any]) -> list[Any]:
        """Picks the leaves that the phases wrote (`Split.carried`) from the pushed arrays."""
        # `impls`: the implementation of each leaf that is a PRNG key, else None.
        written = [(pushed[self.leaves.index(c.leaf)], impls[c.leaf]) for c in split.carried]
        return [x if impl is None else jax.random.wrap_key_data(x, impl=impl) for x, impl in written]

    def applied(self, state: Sequence[Any], new: Sequence[Any], pushed: Sequence[Any]) -> list[Any]:
        """Computes new leaves from the server's old ones, the worker's new ones and the push."""
        leaves, n = list(new), len(self.leaves)
        offsets, slopes = pushed[n : n + len(self.affine)], pushed[n + len(self.affine) :]
        for i, offset, slope in zip(self.affine, offsets, self._slopes(slopes), strict=True):
            leaves[i] = (_times(slope, state[i]) + offset).astype(state[i].dtype)
        return leaves

    def _computed_slopes(
        self, plan: Plan, state: PyTree, batches: PyTree, others: PyTree, combined: list[Any]
    ) -> list[Any]:
        """Computes the slopes that only the worker knows: the means of its microbatches'."""
        both = zip(self.rules, self.slopes, strict=True)
        wanted = [(rule, shape) for rule, shape in both if isinstance(shape, jax.ShapeDtypeStruct)]
        if not wanted:
            return []
        by_variable = dict(zip(plan.split.traced.combined, combined, strict=True))
        rest = [by_variable[v] for v in self.known if v in by_variable]

        def one(number: jax.Array, batch: PyTree) -> list[jax.Array]:
            values = [*jax.tree.leaves((state, batch, others)), number, *rest]
            return [
                jnp.broadcast_to(jnp.asarray(rule(values)), shape.shape).astype(shape.dtype) for rule, shape in wanted
            ]

        micro = microbatches(plan.strategy, batches, plan.k)
        if plan.k == 1:
            return one(jnp.int32(0), jax.tree.map(lambda x: x[0], micro))
        each = jax.lax.map(lambda x: one(*x), (jnp.arange(plan.k, dtype=jnp.int32), micro))
        return [x.mean(0).astype(x.dtype) for x in each]

    def _slopes(self, computed: Sequence[Any]) -> list[Slope]:
        """Puts the computed slopes in their places among all."""
        rest = iter(computed)
        return [next(rest) if isinstance(slope, jax.ShapeDtypeStruct) else slope for slope in self.slopes]


def find_carried(split: Split, leaves: Sequence[int], by_slope: Sequence[int], sizes: tuple[int, int]) -> CarriedLeaves:
    """Finds the rules of a step's carried leaves; called where the replica axes are bound."""
    # `split` is the step as one microbatch sees it; slopes are looked for in `by_slope`. `sizes`:
    # the number of replicas, and of each replica's microbatches.
    traced = split.traced
    of_leaves = traced.depends([traced.state[i] for i in leaves])
    known = [
        *traced.state,
        *traced.batch,
        *traced.others,
        traced.microbatch,
        *(v for v in traced.combined if v not in of_leaves),
    ]
    affine, slopes, rules = [], [], []
    for i in by_slope:
        old = traced.state[i]
        if not jnp.issubdtype(old.aval.dtype, jnp.floating) and not jnp.issubdtype(old.aval.dtype, jnp.integer):
            continue  # a key or a flag
        rule = AffineRule(traced.closed, old, traced.new_state[i], sizes, known)
        if (slope := rule.of_program()) is not None and slope != 0:
            affine.append(i)
            slopes.append(slope)
            rules.append(rule)
    return CarriedLeaves(tuple(leaves), tuple(affine), tuple(slopes), tuple(rules), tuple(known))


def _times(slope: Slope, old: Any) -> Any:
    """The part of the old value that stays; nothing of one that is forgotten, infinity as well."""
    old = wide(old)
    if isinstance(slope, float | int):
        return old * jnp.asarray(slope).astype(old.dtype) if slope != 1 else old
    return jnp.where(slope == 0, jnp.zeros_like(old), old * slope)
