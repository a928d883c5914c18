"""Steps as a loop takes them: plain functions, distributed ones, or those of a task."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jdist.core.remote import RemoteTree
from jdist.core.strategy import Strategy
from jdist.errors import StepError, StrategyError
from jdist.loop.metric_totals import Metrics
from jdist.loop.task import Task
from jdist.nnx import NNXStep
from jdist.step.base import Distributed
from jdist.step.decorator import distribute
from jdist.step.options import ReturnRole
from jdist.strategies.default import get_strategy


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
    if step.options.args != ("state", "batch"):
        raise StepError(
            f"{step.__name__} has args={step.options.args!r}; `jdist.fit` calls a step with a state and a batch. Write a step "
            "`(state, batch) -> (state, metrics)` that keeps what else it needs in its state, or closes over it."
        )
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
    if isinstance(step, NNXStep):
        raise StepError(
            f"{call} got {step.__name__} as jdist.nnx.distribute made it, which changes its objects in place. Give the "
            f"function itself, with all objects in one argument as the state has them: `(objects, batch) -> {returns}`."
        )
    if not isinstance(step, Distributed):
        return _distribute_once(_check_callable(step, call), strategy, returns)
    if step.options.args != ("state", "batch"):
        raise StepError(
            f"{step.__name__} has args={step.options.args!r}; {call} calls a step with a state and a batch. Distribute it "
            "without `args`, or give the plain function."
        )
    if step.options.returns != (returns,):
        raise StepError(
            f"{step.__name__} was distributed with returns={step.options.returns!r}; {call} needs "
            f'`jdist.distribute(step, strategy, returns=("{returns}",))`, or the plain function.'
        )
    return step


def metrics_of(step: Any, metrics: Metrics) -> Metrics:
    """Finds the metrics to use: those given, else a task's own."""
    return step.metrics if metrics is None and isinstance(step, Task) else metrics


def _check_callable(step: Any, call: str = "jdist.fit") -> Callable[..., Any]:
    if not callable(step):
        raise StepError(
            f"{call} needs a step, it got a {type(step).__name__}: give a function of a state and a batch, or a "
            "`jdist.tasks.Task`."
        )
    return step
