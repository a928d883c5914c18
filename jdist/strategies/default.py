"""The default strategy: a pass-through that binds nothing."""

from __future__ import annotations

from jdist.core.context import current_strategy, set_process_wide
from jdist.core.strategy import Strategy
from jdist.errors import StrategyError
from jdist.reduction import psum
from jdist.strategies.local import LOCAL

_DEFAULT = Strategy(name="default", reduction=psum(), operations=LOCAL)


def default() -> Strategy:
    """Runs a step unchanged: compiled, on the device that JAX chooses, with no mesh bound.

    Returns:
        Always the same value.

    Example:
        >>> import jdist
        >>> jdist.default() is jdist.default()
        True
    """
    return _DEFAULT


def get_strategy() -> Strategy:
    """Returns the current strategy: that of the innermost `strategy.scope()` or step, else `set_strategy`'s, else default's."""
    return current_strategy() or _DEFAULT


def set_strategy(strategy: Strategy | None) -> None:
    """Makes a strategy the current one for the whole process, outside every `scope()`.

    Args:
        strategy: the strategy; None: the default one again.

    Raises:
        StrategyError: it is not a strategy.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise StrategyError(
            f"jdist.set_strategy needs a strategy, or None to undo it; it got {strategy!r}. Write "
            "`jdist.set_strategy(jdist.mirrored())`."
        )
    set_process_wide(strategy)
