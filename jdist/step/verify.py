"""The verification that a step computes on many replicas what it computes on one with the whole batch."""

from __future__ import annotations

import warnings
from typing import Any

from jdist.core import context
from jdist.errors import StepError, VerificationError
from jdist.step.base import Distributed
from jdist.step.comparison import Comparison, NotComparableError, Verification
from jdist.step.mesh_step import DistributedStep
from jdist.support.tracebacks import callers_level


class VerificationWarning(UserWarning):
    """A step differs on many replicas from what it is on one with the whole batch."""


def verify(train_step: Any, *args: Any, **kwargs: Any) -> Verification:
    """Compares a step on one replica, which sees the whole batch, with the same step as it is distributed.

    Both run once, on copies: state, metrics and the step itself stay as they were. Random draws are replaced by one constant
    in both, as each replica draws for its own rows; with `precision` and under an all-reduce that is not exact both compute
    in float32. Where leaves differ at all, further runs on one device, with errors of rounding in each sum, measure how far
    apart rounding may leave each leaf.

    Args:
        train_step: what `jdist.distribute` or `jdist.nnx.distribute` made.
        *args: as in a call: the state, a global batch, and what else the step takes.
        **kwargs: as in a call.

    Returns:
        A `Verification`, false if any leaf differs by more than rounding. It raises nothing where they differ: see `verify`
        of `jdist.distribute`.

    Raises:
        StepError: `train_step` is no distributed step.
        JDistError: what a call with these arguments would raise.

    Example:
        >>> import jdist, numpy as np
        >>> @jdist.distribute(jdist.mirrored())
        ... def train_step(w, batch):
        ...     loss, grad = jdist.value_and_grad(lambda w: jdist.mean((w * batch["x"] - 2.0) ** 2))(w)
        ...     return w - 0.1 * grad, {"loss": loss, "rows": batch["x"].shape[0]}
        >>> found = jdist.verify(train_step, np.float32(0), {"x": np.ones(8, np.float32)})
        >>> found.ok or [each.leaf for each in found.differences]
        ["metrics['rows']"]
    """
    return _verified(train_step, args, kwargs)


def _verified(train_step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, pads: bool = False) -> Verification:
    step, args = train_step.pure(args) if isinstance(train_step, Distributed) else (train_step, args)
    if not isinstance(step, DistributedStep):
        raise StepError(
            f"jdist.verify needs a step that `jdist.distribute` made for devices of this process, it got a "
            f"{type(train_step).__name__}. Under a parameter server, whose workers see other parameters each, distribute the "
            "function under `jdist.mirrored()` and verify that."
        )
    with context.outside_scopes(), context.own_settings(step.strategy):
        try:
            return Comparison(step, args, kwargs).compare(pads=pads)
        except NotComparableError as exc:
            return _left_out(f"the step, {exc}", step.strategy.num_replicas * step.options.accumulate)


def verify_first(
    step: DistributedStep, args: tuple[Any, ...], kwargs: dict[str, Any], *, strict: bool, pads: bool = False
) -> Verification:
    """Verifies a step before its first call and warns where it differs; `strict` raises instead."""
    # `strict` also raises if nothing could be compared. With `pads`, a later batch will be padded:
    # the step is verified on a padded batch as well.
    try:
        verification = _verified(step, args, kwargs, pads=pads)
    except Exception as exc:  # noqa: BLE001 - the call that follows raises it again
        verification = _left_out(f"the step, as that failed: {type(exc).__name__}: {exc}", 0)
    if strict and not (verification.ok and (verification.num_compared or verification.parts == 1)):
        raise VerificationError(
            f"{step.__name__} differs between one replica and many, or could not be verified. {verification}\n"
            '`verify="first"` warns of it and goes on; `verify="off"` says nothing.',
            verification,
        )
    if not verification.ok:
        warnings.warn(
            f'{step.__name__}: {verification}\nIf it is meant so, say `verify="off"`; `jdist.verify` compares again.',
            VerificationWarning,
            stacklevel=callers_level(),
        )
    return verification


def _left_out(what: str, parts: int) -> Verification:
    return Verification((), "", (what,), num_compared=0, parts=parts)
