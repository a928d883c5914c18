"""The decorator `jdist.distribute`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, Unpack, overload

from jdist.cluster.idle_launch import unused_job
from jdist.core.strategy import Strategy
from jdist.errors import StepError
from jdist.step.base import Distributed
from jdist.step.mesh_step import DistributedStep
from jdist.step.options import StepKeywords, StepOptions, make_options, spelling_keywords
from jdist.step.signature import Step
from jdist.support.tracebacks import callers_level, without_own_frames


@overload
def distribute(
    step: Strategy, strategy: None = None, **options: Unpack[StepKeywords]
) -> Callable[[Step], DistributedStep]: ...
@overload
def distribute(step: Step, strategy: Strategy, **options: Unpack[StepKeywords]) -> DistributedStep: ...
@spelling_keywords
@without_own_frames
def distribute(step: Any, strategy: Strategy | None = None, **options: Unpack[StepKeywords]) -> Any:
    """Runs a train step, written for one replica, on all replicas of a strategy.

    As a decorator, `@jdist.distribute(strategy, ...)`, or as a function, `jdist.distribute(step, strategy, ...)`.

    Args:
        step: a function `(state, batch) -> (state, metrics)` of one replica's slice of the batch; or what `args` and
            `returns` say. A method is bound to its object, which is a constant of the step; `args` leave `self` out.
        strategy: what `jdist.mirrored()` and its like return.
        args: role of each parameter in turn: "state" (laid out by the strategy), "batch" (rows are spread over the
            replicas), "per_replica" (leads with an axis of replicas, and each gets its entry, as in `pmap`),
            "replicated" (every replica gets it whole), "static" (a hashable constant; another value compiles again).
            Several states are listed one by one: ("state", "state", "batch") for a step `(params, opt_state, batch) ->
            (params, opt_state, loss)`. Further arguments and keyword arguments are replicated; one that
            `distribute_dataset` has made, or with as many rows in each of its arrays as the batch, is refused, under
            every strategy: say "batch" or "replicated".
        returns: role of each result: "state"; "metrics" (what differs between replicas is averaged over them entry by
            entry, unless wrapped in `PerReplica`; what is the same on all, as what `all_reduce` returns, is
            unchanged); "examples" (a row an example, in input order; the padding of `distribute_dataset` is left out, and of a
            mask from elsewhere the rows where it is zero); "per_replica" (a
            `PerReplica`; of a step that takes an argument of that role plain arrays [replicas, ...], as of `pmap`).
            By default ("state", "metrics"), or the state alone; of several states all, and then perhaps metrics.
        batch_axis: the axis of a batch that its rows are on, 0 by default: 1 for time-major batches [time, rows, ...].
            An int, or a tree of them with which the batch's tree begins, as in `jax.vmap`'s `in_axes`; of several
            batches a tuple with one for each. A `mask` of one axis has an entry for each row. Results with the role
            "examples" have their rows first. Pass the same to `strategy.distribute_dataset`.
        static_argnames: keyword arguments that are static.
        donate: reuse the old state's buffers for the new one; the state passed in is gone after the call.
        accumulate: number of microbatches that each replica's batch is cut into; one all-reduce and one update for all. Each
            microbatch counts as a replica: the step computes the same on so many times as many replicas (docs/step_laws.md).
        steps_per_call: number of optimiser steps in one call; batches and metrics lead with that axis, all other
            arguments are the same for all steps of the call.
        max_in_flight: number of calls that may run ahead of the host.
        check_replicas: compare the replicas after the first step and every so many steps; 0: never.
        non_finite: what a gradient does that is NaN or infinite, or that has such a sum in float32: "raise" (the state stays
            as it was before that step), "skip" the step, or "apply" it.
        precision: "bf16", "fp16", or what `jdist.precision` returns: forward and backward pass in 16 bits, parameters in
            float32.
        verify: what the first call does before it: "first" compares the step with one replica that sees the whole batch
            and warns where they differ, "strict" raises, "off" does neither, and `jdist.fit` neither. None: nothing,
            unless `jdist.fit` has an option of its own. See `jdist.verify`.

    Returns:
        A `DistributedStep`; called like the step, with whole, global batches.

    Raises:
        StepError: an option or role that is not allowed.
        VerificationError: by the first call, if `verify` is "strict" and the step differs.

    Warns:
        VerificationWarning: by the first call, if `verify` is "first" and the step differs.
        UserWarning: all replicas draw the same for their rows, the loss is divided twice, or filled rows are not masked.
        UserWarning: `jdist launch` has started this process as one of several, and the strategy is for one.

    Example:
        >>> import jdist, numpy as np
        >>> @jdist.distribute(jdist.one_device())
        ... def train_step(w, batch):
        ...     loss, grad = jdist.value_and_grad(lambda w: jdist.mean((w * batch["x"] - 2.0) ** 2))(w)
        ...     return w - 0.1 * grad, {"loss": loss}
        >>> w, metrics = train_step(0.0, {"x": np.ones(8, np.float32)})
        >>> float(metrics["loss"])
        4.0
    """
    if isinstance(step, Strategy):
        if strategy is not None:
            raise StepError("jdist.distribute takes the step first: write `distribute(step, strategy)`.")
        _check_job(step)
        checked = make_options(**options)
        return without_own_frames(lambda function: _distribute(function, step, checked))
    if not isinstance(strategy, Strategy):
        got = step if strategy is None else strategy
        raise StepError(
            f"jdist.distribute needs a strategy, it got {got!r}. Write `@jdist.distribute(jdist.mirrored())`, or "
            "`jdist.distribute(step, strategy)`."
        )
    if not callable(step):
        raise StepError(f"jdist.distribute needs a function to distribute, it got {step!r}.")
    _check_job(strategy)
    return _distribute(step, strategy, make_options(**options))


def _distribute(step: Step, strategy: Strategy, options: StepOptions) -> Any:
    distributed = strategy.operations.distribute(strategy, step, options)
    if isinstance(distributed, Distributed):
        distributed.rebind = lambda function: _distribute(function, strategy, options)
    if isinstance(distributed, DistributedStep):
        distributed.verifier = _verify
    return distributed


def _verify(step: DistributedStep, *args: Any, **kwargs: Any) -> Any:
    from jdist.step.verify import verify_first  # imported late, as it makes steps itself

    return verify_first(step, *args, **kwargs)


def _check_job(strategy: Strategy) -> None:
    if strategy.cluster.num_processes == 1 and (job := unused_job(os.environ, strategy.mesh)) is not None:
        warnings.warn(f"{strategy.name}: {job}", stacklevel=callers_level())
