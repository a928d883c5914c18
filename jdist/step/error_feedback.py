"""What a compressed all-reduce leaves out of a gradient, carried from step to step beside the user's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from jdist.core.step_state import StepState, carrying, residuals_of
from jdist.core.strategy import Strategy
from jdist.errors import StepError
from jdist.reduction.algorithm import apply_reduction

PyTree = Any


@dataclass
class ErrorFeedback:
    """The residuals of one tracing of a step: each gradient takes its own, in the order of the calls.

    Attributes:
        strategy: whose all-reduce keeps them.
        name: the step's.
        all: those of every step that the state has been through.
        after: what this step's gradients have left out so far.
    """

    strategy: Strategy
    name: str
    all: dict[str, tuple[PyTree, ...]]
    after: list[PyTree] = field(default_factory=list)

    @classmethod
    def of(cls, strategy: Strategy, name: str, state: PyTree) -> tuple[PyTree, ErrorFeedback | None]:
        """The state without its residuals, and what hands these out; None where the strategy keeps none."""
        residuals = residuals_of(state)
        return (state, None) if residuals is None else (carrying(state, residuals=None), cls(strategy, name, residuals))

    def sum(self, tree: PyTree, axes: tuple[str, ...]) -> PyTree:
        """See `context.Residuals`."""
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
        """The state that the step returned, with what is left out now."""
        return carrying(state, residuals={**self.all, self.name: tuple(self.after)})


def has_residuals(state: PyTree, name: str) -> bool:
    """Whether a state comes with the residuals of the step of that name."""
    return name in (residuals_of(state) or {})


def check_residuals(strategy: Strategy, residuals: PyTree) -> None:
    """Refuses residuals where the strategy keeps none, and those of another number of replicas.

    Raises:
        StepError: says what the strategy does, and names both numbers.
    """
    if not strategy.keeps_residuals:
        raise StepError(
            f"the state has residuals, from steps whose all-reduce compresses gradients; {strategy.name} keeps none. Pass "
            "`state.user`, the state without them."
        )
    for leaf in jax.tree.leaves(residuals):
        if leaf.shape[0] != strategy.num_replicas:
            raise StepError(
                f"the state has residuals of shape {leaf.shape}, for {leaf.shape[0]} replicas; {strategy.name} has "
                f"{strategy.num_replicas}. Pass `state.user`, the state without them; residuals then begin at zero."
            )


def check_fit(name: str, there: PyTree, wanted: PyTree) -> None:
    """Refuses residuals that are not those of a step's gradients.

    Args:
        name: the step's name.
        there: the residuals in the state, arrays or shapes.
        wanted: the shapes that the step needs.

    Raises:
        StepError: they differ in number or shape.
    """
    shapes = [[tuple(leaf.shape) for leaf in jax.tree.leaves(tree)] for tree in (there, wanted)]
    if shapes[0] != shapes[1]:
        raise StepError(
            f"the state's residuals for a step named {name!r} have shapes {shapes[0]}, this step's gradients need "
            f"{shapes[1]} for each gradient. Is it another step of the same name (rename one), or a static argument that "
            "changes which gradients it takes? `state.user` is the state without them; residuals then begin at zero."
        )
