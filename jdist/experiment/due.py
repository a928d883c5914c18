"""When something that happens every so many steps is due."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Due:
    """Whether something that happens every so many steps falls into one call of the step.

    Attributes:
        before: steps done before the call.
        step: steps done after it.
        total: steps of the run; at its end everything is due.
    """

    before: int
    step: int
    total: int

    def __call__(self, every: int | None) -> bool:
        """Whether a multiple of `every` lies in the call; None: the end only."""
        return self.step >= self.total or (every is not None and self.step // every > self.before // every)
