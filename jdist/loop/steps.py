"""Steps as a loop takes them (plain functions, distributed ones, a task's), and checks of a run against their traces."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jdist.callbacks.callback import Callback, Keeps
from jdist.checkpoint import CheckpointWarning
from jdist.core.remote import RemoteTree
from jdist.core.strategy import Strategy
from jdist.errors import StepError, StrategyError
from jdist.loop.data import Feed
from jdist.loop.metric_totals import Metrics, MetricTotals
from jdist.loop.report.metrics_file import EPOCH, EVAL
from jdist.loop.task import Task
from jdist.step.base import IGNORES_MASK, Distributed
from jdist.step.decorator import distribute
from jdist.step.options import ReturnRole
from jdist.strategies.default import get_strategy
from jdist.support.words import did_you_mean
from jdist.typing import PyTree


def strategy_of(step: Any, strategy: Strategy | None, state: Any) -> Strategy:
    """Finds the strategy to use: the one given, else the step's own, else the current one."""
    if strategy is not None and not isinstance(strategy, Strategy):
        raise StrategyError(f"`strategy` is {strategy!r}; give what `jdist.mirrored()` and its like return.")
    place = step.strategy if isinstance(step, Distributed) else strategy
    if isinstance(state, RemoteTree) and (place or get_strategy()).coordinator is None:
        raise StrategyError(
            "the state lives on parameter servers, and the step does not run there: give `strategy.fetch(state)`, of the "
            "strategy that trained it; or that strategy."
        )
    if not isinstance(step, Distributed):
        return _current_strategy(state) if strategy is None else strategy
    if strategy is not None and strategy is not step.strategy:
        raise StrategyError(
            f"{step.__name__} is distributed under {step.strategy!r}, and `strategy` is {strategy!r}. Leave `strategy` out, "
            "or give the plain function."
        )
    return step.strategy


def _current_strategy(state: Any) -> Strategy:
    strategy = get_strategy()
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    devices = max((len(leaf.sharding.device_set) for leaf in arrays), default=1)
    if strategy.num_replicas == 1 and devices > 1:
        raise StrategyError(
            f"`strategy` is missing: the state lies on {devices} devices, and the current strategy is {strategy!r}, which "
            "would not divide the batch among them. Give the strategy that made the state; or `strategy=jdist.default()`, if "
            "the arrays' own shardings are to say where the step runs."
        )
    return strategy


def train_step_of(step: Any, strategy: Strategy, *, steps_per_call: int | None) -> Distributed:
    """Makes the distributed train step of `jdist.fit`'s argument."""
    if isinstance(step, Task):
        step = step.train_step
    if not isinstance(step, Distributed):
        step = _check_callable(step)
        return distribute(step, strategy, returns=("state", "metrics"), steps_per_call=steps_per_call or 1)
    if steps_per_call not in (None, step.options.steps_per_call):
        raise StepError(
            f"`steps_per_call` is {steps_per_call}, but {step.__name__} was distributed with "
            f"steps_per_call={step.options.steps_per_call}. Say it there, and leave it out here."
        )
    _check_args(step, "jdist.fit")
    if step.options.returns not in (None, ("state", "metrics")):
        raise StepError(
            f"{step.__name__} has returns={step.options.returns!r}; `jdist.fit` needs a step that returns `state, metrics`, "
            "metrics a dict of scalars. Distribute it without `returns`."
        )
    return step


@functools.lru_cache(maxsize=32)  # so that an evaluation in a loop is compiled once
def _distribute_once(step: Callable[..., Any], strategy: Strategy, returns: ReturnRole) -> Distributed:
    """Distributes a plain function of state and batch, once for each function and strategy."""
    return distribute(step, strategy, args=("state", "batch"), returns=(returns,))


def eval_step_of(step: Any, strategy: Strategy, *, call: str, returns: ReturnRole = "metrics") -> Distributed:
    """Makes the distributed step of the argument of `jdist.evaluate` or `jdist.predict`."""
    if isinstance(step, Task):
        step = step.eval_step
    if isinstance(step, Distributed) and step.holds_objects:
        raise StepError(
            f"{call} got {step.__name__} as jdist.nnx.distribute made it, which changes its objects in place. Give the "
            f"function itself, with all objects in one argument as the state has them: `(objects, batch) -> {returns}`."
        )
    if not isinstance(step, Distributed):
        return _distribute_once(_check_callable(step, call), strategy, returns)
    _check_args(step, call)
    if step.options.returns != (returns,):
        raise StepError(
            f"{step.__name__} was distributed with returns={step.options.returns!r}; {call} needs "
            f'`jdist.distribute(step, strategy, returns=("{returns}",))`, or the plain function.'
        )
    return step


def metrics_of(step: Any, metrics: Metrics) -> Metrics:
    """Finds the metrics to use: those given, else a task's own."""
    return step.metrics if metrics is None and isinstance(step, Task) else metrics


def _check_args(step: Distributed, call: str) -> None:
    if step.options.args != ("state", "batch"):
        raise StepError(
            f"{step.__name__} has args={step.options.args!r}; {call} calls a step with a state and a batch. Distribute a step "
            "`(state, batch)` without `args`, which keeps what else it needs in its state, or closes over it."
        )


def _check_callable(step: Any, call: str = "jdist.fit") -> Callable[..., Any]:
    if not callable(step):
        raise StepError(
            f"{call} needs a step, it got a {type(step).__name__}: give a function of a state and a batch, or a "
            "`jdist.tasks.Task`."
        )
    return step


def names_of(
    step: Distributed, state: PyTree, feed: Feed, metrics: Metrics, *, depth: int = 3
) -> frozenset[str] | None:
    """Lists the names of a step's metrics; None where only a call shows them."""
    # Warns of problems in the trace. `depth` counts the calls up to the user's own, for the
    # location of warnings.
    preview = step.preview(state, feed.batches.element_spec)
    if preview is None:
        return None
    if "metrics" not in preview.results:
        raise StepError(
            f'{step.__name__} returns the state alone. Let it return its metrics too: `return state, {{"loss": loss}}`.'
        )
    totals = MetricTotals(metrics, steps_per_call=step.options.steps_per_call)
    names = totals.names(preview.results["metrics"], by=step.__name__)
    if "state" in preview.results and not preview.changes_state:
        warnings.warn(
            f"{step.__name__} returns the state unchanged: nothing is learned. Return the new one: "
            "`return state.apply_gradients(grads=grads), metrics`.",
            stacklevel=depth + 1,
        )
    if feed.pads and preview.ignores_mask:
        warnings.warn(f"{step.__name__} {IGNORES_MASK}", stacklevel=depth + 1)
    return names


def check_returned(metrics: Metrics, trained: frozenset[str] | None, evaluated: frozenset[str] | None) -> None:
    """Raises a `StepError` for a metric without a contribution from any step; see `check_watched` for the names."""
    if not isinstance(metrics, Mapping) or trained is None or evaluated is None:
        return
    there = sorted(trained | evaluated)
    for name in metrics:
        if name not in there:
            raise StepError(
                f"`metrics` has {name!r}, which no step returns; they return {', '.join(map(repr, there))}."
                f"{did_you_mean(name, there)} Let one return `{{{name!r}: metric.update(...)}}`, or leave it out."
            )


def check_resumes(callbacks: Sequence[Callback], feed: Feed, *, depth: int) -> None:
    """Warns of the cost of resuming a run on data without a position, if a callback resumes runs."""
    names = [callback.name for callback in callbacks if callback.on_resume is not None]
    if names and not feed.has_position:
        warnings.warn(
            f"{names[0]}: `data` is {feed.kind}, and its position cannot be saved: {feed.advice}. A run that goes on reads the "
            "pass again from its beginning, up to where it was, and leaves those batches out: that takes as long as reading "
            "them, and each row counts once only if they come in the same order as before.",
            CheckpointWarning,
            stacklevel=depth + 1,
        )


def check_watched(
    callbacks: Sequence[Callback],
    *,
    trained: frozenset[str] | None,
    evaluated: frozenset[str] | None,
    evaluates: bool,
) -> None:
    """Refuses callbacks that watch a metric that is never measured, or log another in its place; None: not known yet."""
    logged = _logged(callbacks)
    measured = {prefix + name for prefix in ("", EPOCH) for name in trained or ()}
    measured |= {EVAL + name for name in evaluated or ()}
    for callback in callbacks:
        for name in callback.logs or ():
            if name in measured:
                raise StepError(
                    f"{callback.name}: it logs {name!r}, which a step returns already. Choose another name."
                )
        for metric in callback.watches:
            is_eval = metric.startswith(EVAL)
            if is_eval and not evaluates:
                # Checkpoints go by an evaluation's metric alone.
                other = "" if callback.on_save is not None else ", or take a metric of training, such as 'epoch/loss'"
                raise StepError(
                    f"{callback.name}: {metric!r} is never measured, as this run does not evaluate. Give `eval_data` and "
                    f"`eval_step`{other}."
                )
            names = evaluated if is_eval else trained
            if names is None or logged is None or metric in logged:
                continue
            prefix = EVAL if is_eval else EPOCH if metric.startswith(EPOCH) else ""
            name = metric.removeprefix(prefix)
            if name not in names and name.partition("/")[0] not in names:
                there = sorted(prefix + each for each in names)
                raise StepError(
                    f"{callback.name}: {metric!r} will not be measured; there will be "
                    f"{', '.join(map(repr, there)) or 'none'}.{did_you_mean(metric, there)}"
                )


def _logged(callbacks: Sequence[Callback]) -> frozenset[str] | None:
    """Collects the names that callbacks add to a row before others read it; None: any."""
    names: set[str] = set()
    for callback in callbacks:
        functions = (callback.on_eval, callback.on_epoch, callback.on_step, callback.on_row)
        if any(function is not None for function in functions):
            if callback.logs is None:
                return None
            names.update(callback.logs)
    return frozenset(names)


def keeps_by_name(callbacks: Sequence[Callback]) -> dict[str, Keeps]:
    """Finds what callbacks keep, by their names."""
    keeps: dict[str, Keeps] = {}
    for callback in callbacks:
        if callback.keeps is not None:
            if callback.name in keeps:
                raise StepError(f"two callbacks of the name {callback.name!r} keep something; give one another `name`.")
            keeps[callback.name] = callback.keeps
    return keeps
