"""In synchronous mode: whether closures become one update, and what the update needs besides the mean of their gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jdist.errors import ClosureError, NonFiniteClosureError
from jdist.ps.closures import Closure, Installable


@dataclasses.dataclass(frozen=True)
class Decision:
    """What becomes of closures that are staged.

    Attributes:
        commit: whether they become an update.
        scalars: what that needs besides.
        is_skipped: whether it was left out, as a gradient was not finite.
        error: what the user is to be told.
    """

    commit: bool
    scalars: list[np.ndarray] = dataclasses.field(default_factory=list)
    is_skipped: bool = False
    error: ClosureError | None = None


def decide(numbers: Sequence[int], closures: Sequence[Closure], installed: Installable) -> Decision:
    """Puts together what closures reported.

    Args:
        numbers: the closures' numbers.
        closures: the closures; all have reported.
        installed: their function.
    """
    try:
        assert installed.combine is not None  # only functions that have it are staged
        combined = installed.combine([closure.pending.wait(0) for closure in closures])
    except Exception as exc:  # noqa: BLE001  # whatever it is, the round must not wait for this thread for ever
        return Decision(False, error=ClosureError(f"closures {numbers}: what they gave cannot be put together: {exc}"))
    policy = installed.function.non_finite
    if combined.finite or policy == "apply":
        return Decision(True, combined.scalars)
    error = NonFiniteClosureError(numbers[0]) if policy == "raise" else None
    return Decision(False, is_skipped=policy == "skip", error=error)
