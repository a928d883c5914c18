"""The decorator `jdist.nnx.distribute`, and the steps that it makes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, get_args

import jax
from flax import nnx

from jdist.core.step_state import StepState, user_state, with_user_state
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import axes_of_leaves
from jdist.errors import StepError
from jdist.nnx.replica import MetricOps, Objects, holds_objects, pure_step
from jdist.replica import collectives
from jdist.step.base import Distributed, Preview
from jdist.step.decorator import distribute as distribute_pure
from jdist.step.mesh_step import DistributedStep
from jdist.step.options import ArgRole, ReturnRole, RunKeywords, Verify, spelling_keywords
from jdist.step.signature import check_no_batch
from jdist.support import checks
from jdist.support.tracebacks import without_own_frames
from jdist.typing import PyTree


@spelling_keywords
@without_own_frames
def distribute(
    strategy: Strategy,
    *,
    args: Sequence[ArgRole] | ArgRole = ("batch",),
    returns: Sequence[ReturnRole] | ReturnRole = ("metrics",),
    metrics: Mapping[type, collectives.ReduceOp] | None = None,
    **options: Unpack[RunKeywords],
) -> Callable[[Callable[..., Any]], NNXStep]:
    """Runs a step over mutable nnx objects on all replicas; takes the place of `@nnx.jit`.

    Arguments that hold nnx objects are the step's state and are changed in place.

    Args:
        strategy: what `jdist.mirrored()` and its like return.
        args: roles of the arguments that hold no objects, in turn; further ones are replicated, and refused where they look
            like a batch.
        returns: roles of what the step returns in addition to the objects.
        metrics: how the replicas' states of a metric of another class than `nnx.metrics.Average` and `Accuracy` come together:
            `{MyMetric: "sum"}`, "mean", "max" or "min"; with "sum", each replica's addition is added to the old value once.
        **options: the other options of `jdist.distribute`.

    Returns:
        A decorator.

    Example:
        >>> import jdist, optax, jax.numpy as jnp
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> @jdist.nnx.distribute(jdist.one_device())
        ... def train_step(model, optimizer, batch):
        ...     loss, grads = jdist.nnx.value_and_grad(lambda m: jdist.mean(m(batch["x"]) ** 2))(model)
        ...     optimizer.update(model, grads)
        ...     return loss
        >>> losses = [float(train_step(model, optimizer, {"x": jnp.ones((4, 2))})) for _ in range(2)]
        >>> losses[1] < losses[0]
        True
    """
    args = (args,) if isinstance(args, str) else tuple(args)
    if "state" in args:
        raise StepError(
            f"`args` is {args!r}; jdist.nnx.distribute finds the objects itself. Give only the roles of the other "
            'arguments: `args=("batch", "batch")`.'
        )
    returns = ("state", *((returns,) if isinstance(returns, str) else returns))
    metric_ops: dict[type, collectives.ReduceOp] = dict(metrics or {})
    for kind, op in metric_ops.items():
        name = f"metrics[{getattr(kind, '__name__', kind)}]"
        checks.choice(name, op, get_args(collectives.ReduceOp), StepError, call="jdist.nnx.distribute")

    def decorate(step: Callable[..., Any]) -> NNXStep:
        distributed = NNXStep(step, strategy, {**options, "args": args, "returns": returns}, metric_ops)
        distributed.rebind = decorate
        return distributed

    return without_own_frames(decorate)


class NNXStep(Distributed):
    """A step over nnx objects that runs on all replicas; `jdist.nnx.distribute` makes it.

    Attributes:
        strategy: the strategy it runs under.
        options: the options of `jdist.distribute`, `args` with "state" for the objects.
    """

    holds_objects = True

    def __init__(self, step: Callable[..., Any], strategy: Strategy, options: dict[str, Any], metric_ops: MetricOps):
        functools.update_wrapper(self, step)
        options = {**options, "args": ("static", "state", *options["args"])}
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = [p.name for p in inspect.signature(step).parameters.values() if p.kind in by_position]
        distributed = distribute_pure(pure_step(step, self._positional, metric_ops), strategy, **options)
        if not isinstance(distributed, DistributedStep):
            raise StepError(
                f"under {strategy.name} the state lives in other processes and is updated there later, so objects of "
                "this one cannot be changed in place. Split them, `graphdef, state = nnx.split((model, optimizer))`, "
                "keep `strategy.init(lambda: state)`, merge them in the step, `model, optimizer = nnx.merge(graphdef, "
                "state)`, return `nnx.state((model, optimizer))` as the new state, and use `jdist.distribute`."
            )
        self._distributed: DistributedStep = distributed
        self.strategy = strategy
        self.options = dataclasses.replace(distributed.options, args=distributed.options.args[1:])
        self._held: Objects | None = None  # of the newest call
        self._around: Any = None  # nnx objects have no room for residuals and loss scale, so the step holds them

    @property
    def verification(self) -> Any:
        """The result of verifying the step before its first call; None if it was not verified."""
        return self._distributed.verification

    @property
    def last_state(self) -> PyTree:
        """The newest state of the objects, as `nnx.update(objects, state)` takes it."""
        state = user_state(self._distributed.last_state)
        # Copies: a caller may change the variables.
        return None if state is None else jax.tree.map(lambda x: x, nnx.merge_state(*state))

    def wait(self) -> None:
        """Waits for every call in flight; raises what `DistributedStep.wait` raises."""
        self._distributed.wait()

    def prepare(self, *args: Any, **kwargs: Any) -> PyTree:
        """Returns the objects' pure state as a call with `*args` and `**kwargs` keeps it; see `DistributedStep.prepare`."""
        args, kwargs = self._by_position(args, kwargs)
        distributed, args = self.pure(args)
        return distributed.prepare(*args, **kwargs)

    def over(self, objects: PyTree) -> ObjectsStep:
        """Makes a step over the pure state of some objects, as a loop takes it.

        Args:
            objects: the step's arguments before the batch: a tuple of them, or the only one.

        Raises:
            StepError: the step takes other arguments.
        """
        declared = len(self.options.args) - 1
        names = self._positional[: len(self._positional) - declared]
        arguments = objects if isinstance(objects, tuple) and len(names) != 1 else (objects,)
        if self._positional and len(arguments) != len(names):
            raise StepError(
                f"{self.__name__} takes {len(names)} objects before the batch ({', '.join(names) or 'none'}), and the state "
                f"has {len(arguments)}. Give them in a tuple, in the order of the arguments."
            )
        return ObjectsStep(self, objects, arguments)

    def pure(self, args: tuple[Any, ...]) -> tuple[DistributedStep, tuple[Any, ...]]:
        held = self._hold(args)
        return self._distributed, (held.structure, self._state(held), *held.rest(args))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Traces and lowers a call with `*args` and `**kwargs`, without running it; see `DistributedStep.lower`."""
        args, kwargs = self._by_position(args, kwargs)
        held = self._hold(args)
        self._check_undeclared(args, held.rest(args), kwargs)
        return self._distributed.lower(held.structure, user_state(held.state()), *held.rest(args), **kwargs)

    @without_own_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._by_position(args, kwargs)
        held = self._hold(args)
        rest = held.rest(args)
        self._check_undeclared(args, rest, kwargs)
        _, *results = self.run(held, self._state(held), rest, kwargs)
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, held: Objects, state: PyTree, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Runs the step over a pure state and gives the objects the new one.

        Args:
            held: the objects.
            state: their state, with what the step adds to it.
            rest: the arguments other than objects.
            kwargs: the arguments by keyword.

        Returns:
            The new state, then what the step returns.
        """
        new = None
        try:
            new, *results = self._distributed(held.structure, state, *rest, **kwargs)
            return new, *results
        finally:
            if new is None:  # after an error or interrupt, which may come once the objects' arrays were donated
                newest = self._distributed.last_state
                gone = any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
                new = newest if gone and newest is not None else state
            self._put(held, new)

    def _put(self, held: Objects, state: PyTree) -> None:
        self._around = with_user_state(state, None)
        held.put(state)

    def _hold(self, args: tuple[Any, ...]) -> Objects:
        """Splits the arguments of a call, unless they are those of the newest one."""
        held = self._held  # another thread may replace it
        if held is None or not held.are_in(args):
            held = self._held = Objects(args)
        return held

    def _state(self, held: Objects) -> PyTree:
        """Returns the state of the objects with what the step adds to it."""
        state = held.state()
        return state if isinstance(state, StepState) else with_user_state(self._around, state)

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Puts arguments that are named by position where they can be."""
        kwargs = dict(kwargs)
        while len(args) < len(self._positional) and self._positional[len(args)] in kwargs:
            args = (*args, kwargs.pop(self._positional[len(args)]))
        return args, kwargs

    def _check_undeclared(self, args: tuple[Any, ...], rest: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        options = self._distributed.options
        declared = options.args[2:]
        if len(rest) <= len(declared) and not kwargs:
            return
        places = [i for i, arg in enumerate(args) if not holds_objects(arg)][len(declared) :]
        names = [f"`{self._positional[i]}`" if i < len(self._positional) else f"argument {i + 1}" for i in places]
        values = dict(zip(names, rest[len(declared) :], strict=True))
        values |= {f"`{name}`": value for name, value in kwargs.items() if name not in options.static_argnames}
        batches = tuple(value for value, role in zip(rest, declared, strict=False) if role == "batch")
        axes = axes_of_leaves(batches, options.batch_axis, lead=options.num_step_axes)
        remedy = (
            f"Pass it by position and say what it is, of the arguments without objects in turn: `args={(*declared, 'batch')}` "
            'if the replicas are to share its rows; "replicated" in that place if every replica gets it whole.'
        )
        check_no_batch(self.__name__, values, batches, axes, options, self._distributed.strategy, remedy)


class ObjectsStep(Distributed):
    """An nnx step over its objects as a step over their pure state; `NNXStep.over` makes it."""

    # After each call the objects have the new state.

    def __init__(self, step: NNXStep, objects: PyTree, arguments: tuple[Any, ...]):
        # The user's objects, a tuple or one; the arguments before the batch.
        self._step, self._user_objects, self._objects = step, objects, arguments
        self._held = Objects((*arguments, None))
        # With the values that the step carries next to it.
        self.state: PyTree = with_user_state(step._around, self._held.state())
        self.strategy, self.options, self.__name__ = step.strategy, step.options, step.__name__

    def __call__(self, state: PyTree, batch: PyTree) -> tuple[Any, ...]:
        """Runs the step; returns the new state and what the step returns."""
        return self._step.run(self._held, state, (batch,), {})

    def prepare(self, state: PyTree, batch: PyTree) -> PyTree:
        """Returns the state as a call takes and returns it."""
        return self._step._distributed.prepare(self._held.structure, state, batch)

    def preview(self, state: PyTree, batch: PyTree) -> Preview:
        """Describes what a call would do, with nothing compiled."""
        return self._step._distributed.preview(self._held.structure, state, batch)

    def count_left_out(self, state: PyTree) -> Any:
        return self._step._distributed.count_left_out(state)

    @property
    def newest_token(self) -> jax.Array | None:
        return self._step._distributed.newest_token

    def pure(self, args: tuple[Any, ...]) -> tuple[DistributedStep, tuple[Any, ...]]:
        return self._step._distributed, (self._held.structure, *args)

    def verify_next(self, how: Verify, *, pads: bool = False, tell: Callable[[str], Any] | None = None) -> None:
        self._step._distributed.verify_next(how, pads=pads, tell=tell)

    def wait(self) -> None:
        """Waits for every call in flight."""
        self._step.wait()

    def of_state(self, function: Callable[[Any, PyTree], Any]) -> Callable[[PyTree, PyTree], Any]:
        """Makes of a function `(objects, batch) -> results` one of the objects' state."""

        @functools.wraps(function)
        def of_state(state: PyTree, batch: PyTree) -> Any:
            objects = nnx.merge(self._held.structure.graphdef, *user_state(state))
            return function(objects if self._user_objects is self._objects else objects[0], batch)

        return of_state

    def with_state(self, state: PyTree) -> PyTree:
        """Gives the objects this state; returns them in the form in which they were passed."""
        self._held.put(state)
        return self._user_objects
