"""Error feedback: what a compressed all-reduce leaves out of a gradient, carried with the user's state to the next step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax

from jdist.core.step_state import StepState, carrying, residuals_of
from jdist.core.strategy import Strategy
from jdist.errors import StepError
from jdist.reduction.algorithm import apply_reduction
from jdist.step.in_flight import is_newest
from jdist.typing import PyTree


@dataclass
class ErrorFeedback:
    """The residuals of one tracing of a step: each gradient takes its own, in call order."""

    strategy: Strategy  # its all-reduce keeps the residuals
    name: str  # the step's
    all: dict[str, tuple[PyTree, ...]]  # those of every step that the state has been through
    # the residuals of this step's gradients so far
    after: list[PyTree] = field(default_factory=list)

    @classmethod
    def of(cls, strategy: Strategy, name: str, state: PyTree) -> tuple[PyTree, ErrorFeedback]:
        """Takes the residuals out of a state: `(state, feedback)`."""
        return carrying(state, residuals=None), cls(strategy, name, residuals_of(state))

    def sum(self, tree: PyTree, axes: tuple[str, ...]) -> PyTree:
        """Sums one gradient over the replicas, with the earlier remainder, and keeps the new one."""
        reduction = self.strategy.reduction
        fresh = reduction.init(tree)
        carry = fresh
        if self.name in self.all:
            i = len(self.after)
            check_fit(self.name, self.all[self.name][i : i + 1], (fresh,))
            carry = self.all[self.name][i]
        total, left = apply_reduction(reduction, tree, carry, axes)
        self.after.append(left)
        return total

    def close(self, state: PyTree) -> StepState:
        """Adds what is left out now to the state that the step returned."""
        return carrying(state, residuals={**self.all, self.name: tuple(self.after)})


_slots: weakref.WeakSet[ResidualSlot] = weakref.WeakSet()


class ResidualSlot:
    """A step's place, named like the step, among the residuals of a state."""

    def __init__(self, name: str, step: Callable[..., Any], newest: Callable[[], PyTree]):
        self._name, self._step, self._newest = name, step, newest
        self._shapes: dict[Any, PyTree] = {}  # by kind of call and shapes of the state
        _slots.add(self)

    def filled(
        self,
        call: Hashable,
        state: PyTree,
        state_shapes: PyTree,
        after: Callable[[PyTree], StepState],
        make: Callable[[Any], Any] | None,
    ) -> StepState:
        """Gives a state residuals for this step, unless it has some."""
        # The kind of `call` decides which gradients there are. `state_shapes` has no residuals;
        # `after` maps shapes of a state to those of the step's returned state. `make` makes an
        # array of a shape; None leaves the shapes.
        key = (call, jax.tree.structure(state_shapes), tuple((x.shape, x.dtype) for x in jax.tree.leaves(state_shapes)))
        if key not in self._shapes:
            self._shapes[key] = after(state_shapes).residuals[self._name]
        residuals, shapes = residuals_of(state) or {}, self._shapes[key]
        if self._name in residuals:
            check_fit(self._name, residuals[self._name], shapes)
            self._check_own(state)
            return state
        new = shapes if make is None else jax.tree.map(make, shapes)
        return carrying(state, residuals={**residuals, self._name: new})

    def _check_own(self, state: PyTree) -> None:
        if self._has_namesake(state):
            gc.collect()  # a notebook's cell that ran again has left the old step behind
            if self._has_namesake(state):
                raise StepError(
                    f"the state has residuals from another step named {self._name!r}. Rename one of them before "
                    "`jdist.distribute`, `step.__name__ = ...`; delete an older version of this step."
                )

    def _has_namesake(self, state: PyTree) -> bool:
        """Returns whether the state comes from another step of the same name."""
        others = [slot for slot in list(_slots) if slot._name == self._name and slot._step is not self._step]
        return any(is_newest(slot._newest(), state) for slot in others)


def check_residuals(strategy: Strategy, residuals: PyTree) -> None:
    """Raises StepError for residuals where the strategy keeps none, and for those of another number of replicas."""
    if not strategy.keeps_residuals:
        raise StepError(
            f"the state has residuals, from steps with a compressed all-reduce; {strategy.name} keeps none. Pass "
            "`state.user`, the state without them."
        )
    for leaf in jax.tree.leaves(residuals):
        if leaf.shape[0] != strategy.num_replicas:
            raise StepError(
                f"the state has residuals of shape {leaf.shape}, for {leaf.shape[0]} replicas; {strategy.name} has "
                f"{strategy.num_replicas}. Pass `state.user`, the state without them; residuals then begin at zero."
            )


def check_fit(name: str, residuals: PyTree, wanted: PyTree) -> None:
    """Raises StepError for residuals that differ in number or shape from what the step's gradients need."""
    shapes = [[tuple(leaf.shape) for leaf in jax.tree.leaves(tree)] for tree in (residuals, wanted)]
    if shapes[0] != shapes[1]:
        raise StepError(
            f"the state's residuals for a step named {name!r} have shapes {shapes[0]}, this step's gradients need {shapes[1]}: "
            "another step of the same name (rename one), or a static argument that changes which gradients it takes. Pass "
            "`state.user` to begin without residuals."
        )
