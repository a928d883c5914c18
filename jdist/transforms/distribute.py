"""The decorator, and the callable that it makes of a step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdist.errors import NonFiniteError, StepError
from jdist.strategy import Strategy
from jdist.transforms.in_flight import Window
from jdist.transforms.options import StepOptions, make_options
from jdist.transforms.over_mesh import Program, check_divides, compile_over_mesh
from jdist.transforms.placement import adopt_state
from jdist.transforms.replica_step import Call, Traced, output_roles, replica_step
from jdist.transforms.trees import check_no_deleted

PyTree = Any
Step = Callable[..., Any]


class DistributedStep:
    """A step that runs on all replicas of a strategy; `jdist.distribute` makes it.

    Attributes:
        strategy: the strategy it runs under.
        options: the options of `jdist.distribute`.
    """

    def __init__(self, step: Step, strategy: Strategy, options: StepOptions):
        self.__name__ = "the step"
        functools.update_wrapper(self, step)
        self.strategy, self.options = strategy, options
        self._step = step
        self._names = _positional_names(step)
        self._programs: dict[Call, tuple[Program, Traced]] = {}
        self._replicated = strategy.replicated_sharding
        self._token = self._new_token()
        lead = (None,) if options.steps_per_call > 1 else ()
        self._by_rows = (
            None if strategy.mesh is None else NamedSharding(strategy.mesh, PartitionSpec(*lead, strategy.axes))
        )
        self._plain_call = Call(("state", "batch")) if options.args == ("state", "batch") else None
        self._last_state: PyTree = None
        self._steps_before = 0
        self._last_traced: Traced | None = None
        self._window = Window(strategy, options.max_in_flight, self._inspect)
        self._steps_to_check = 0 if strategy.num_replicas == 1 or not options.check_replicas else 1

    @property
    def last_state(self) -> PyTree:
        """The newest state that a call returned; None before the first.

        After an interrupt or a NonFiniteError it is there although the state passed in was donated.
        """
        return self._last_state

    @property
    def num_skipped(self) -> int:
        """How many steps `non_finite="skip"` has left out so far; waits for the steps in flight."""
        return int(np.asarray(self._token)[0]) if self.options.non_finite == "skip" else 0

    def wait(self) -> None:
        """Waits for every call in flight.

        Raises:
            NonFiniteError: one of them met a NaN or infinite gradient, and `non_finite` is "raise".
        """
        self._window.drain()

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Traces and lowers the step without running it.

        Args:
            *args: as in a call; arrays, or `jax.ShapeDtypeStruct`s in their place.
            **kwargs: as in a call.

        Returns:
            JAX's `Lowered`: `.as_text()` is StableHLO, `.compile()` gives memory and cost.
        """
        call, state, batches, others = self._bind(args, kwargs)
        program, _ = self._program(call)
        whole = self._replicated
        token = _shapes(self._token, whole)
        return program.lower(token, _shapes(state, whole), _shapes(batches, self._by_rows), _shapes(others, whole))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._plain_call is not None and len(args) == 2 and not kwargs:
            call, state, batches, others = self._plain_call, args[0], (args[1],), ((), {})
        else:
            call, state, batches, others = self._bind(args, kwargs)
            if self._replicated is not None:
                others = jax.tree.map(self._replicate, others)
        if state is not self._last_state:
            state = adopt_state(self.strategy, state)
        if self._by_rows is not None:
            for leaf in jax.tree.leaves(batches):
                if not isinstance(leaf, jax.Array) or leaf.sharding != self._by_rows:
                    batches = self._place(batches)
                    break
        program, traced = self._program(call)
        try:
            token, state, outputs = program(self._token, state, batches, others)
        except (RuntimeError, ValueError):
            check_no_deleted(state)  # says it better than the runtime, if that was the reason
            raise
        self._token = token
        updated = "state" in traced.returns
        if updated:
            self._last_state = state
        self._last_traced = traced
        self._window.add(token)
        if self._steps_to_check and updated:
            self._check_replicas(state)
        return self._result(state, outputs, traced, batches)

    def _result(self, state: PyTree, outputs: tuple[PyTree, ...], traced: Traced, batches: PyTree) -> Any:
        returns = traced.returns
        if "examples" in returns:
            outputs = _without_padding(outputs, traced, batches)
        if returns == ("state", "metrics"):
            return state, outputs[0]
        if "state" in returns:
            i = returns.index("state")
            outputs = outputs[:i] + (state,) + outputs[i:]
        return outputs[0] if traced.bare else outputs

    def _check_replicas(self, state: PyTree) -> None:
        self._steps_to_check -= self.options.steps_per_call
        if self._steps_to_check <= 0:
            self._steps_to_check = self.options.check_replicas
            self.strategy.check(state)

    def _inspect(self, token: np.ndarray) -> None:
        code, count = int(token[0]), int(token[1])
        if self.options.non_finite != "raise" or code == 0:
            return
        self._window.clear()
        self._token = self._new_token()
        step = self._steps_before + count
        self._steps_before = step + 1
        assert self._last_traced is not None  # a token comes from a call, and a call from a trace
        name = self._last_traced.watched[code - 1]
        raise NonFiniteError(
            f"step {step}: {name} is NaN or infinite. The state is kept as it was before this step "
            f"(`{self.__name__}.last_state`), later calls changed nothing. Lower the learning rate, clip gradients, "
            'look at the batch; or choose `non_finite="skip"` to leave such steps out, "apply" to let them through.',
            name,
            step,
        )

    def _new_token(self) -> jax.Array:
        return jax.device_put(np.zeros(2, np.int32), self._replicated)

    def _program(self, call: Call) -> tuple[Program, Traced]:
        found = self._programs.get(call)
        if found is None:
            traced = Traced()
            function = replica_step(self._step, self.strategy, self.options, call, traced)
            donate = self.options.donate and self.options.may_update_state
            found = compile_over_mesh(function, self.strategy, self.options, traced, donate), traced
            self._programs[call] = found
        return found

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, PyTree, PyTree, PyTree]:
        """Sorts the arguments of one call by their roles."""
        kwargs = dict(kwargs)
        while len(args) < len(self._names) and self._names[len(args)] in kwargs:
            if self._names[len(args)] in self.options.static_argnames:
                break
            args = (*args, kwargs.pop(self._names[len(args)]))
        declared = self.options.args
        if len(args) < sum(role in ("state", "batch") for role in declared):
            raise StepError(
                f"{self.__name__} was called with {len(args)} positional arguments; its roles are {declared}. Pass the "
                "state and the batch by position."
            )
        roles = (declared + ("replicated",) * max(0, len(args) - len(declared)))[: len(args)]
        by_role: dict[str, list[Any]] = {"state": [], "batch": [], "replicated": [], "static": []}
        for role, arg in zip(roles, args, strict=True):
            by_role[role].append(arg)
        static_kwargs = tuple((k, kwargs.pop(k)) for k in self.options.static_argnames if k in kwargs)
        call = Call(roles, tuple(by_role["static"]), static_kwargs)
        try:
            hash(call)
        except TypeError as exc:
            raise StepError(
                f"a static argument of {self.__name__} cannot be hashed: {exc}. Pass it as replicated."
            ) from exc
        state = by_role["state"][0] if by_role["state"] else ()
        return call, state, tuple(by_role["batch"]), (tuple(by_role["replicated"]), kwargs)

    def _replicate(self, x: Any) -> Any:
        if isinstance(x, jax.Array) and x.sharding != self._replicated:
            return jax.device_put(x, self._replicated)
        return x

    def _place(self, batches: PyTree) -> PyTree:
        check_divides(batches, self.strategy, self.options)
        return jax.device_put(batches, self._by_rows)

    def __repr__(self) -> str:
        return f"<{self.__name__} distributed by {self.strategy!r}>"


@overload
def distribute(step: Strategy, strategy: None = None, **options: Any) -> Callable[[Step], DistributedStep]: ...
@overload
def distribute(step: Step, strategy: Strategy, **options: Any) -> DistributedStep: ...
def distribute(step: Any, strategy: Strategy | None = None, **options: Any) -> Any:
    """Runs a train step, written for one replica, on all replicas of a strategy.

    As a decorator, `@jdist.distribute(strategy, ...)`, or as a function, `jdist.distribute(step, strategy, ...)`.

    Args:
        step: a function `(state, batch) -> (state, metrics)` of one replica's slice of the batch; or what `args` and
            `returns` say.
        strategy: what `jdist.mirrored()` and its like return.
        args: role of each positional argument: "state" (laid out by the strategy), "batch" (rows are spread over the
            replicas), "replicated" (every replica gets it whole), "static" (a hashable constant; another value
            compiles again). Further arguments and keyword arguments are replicated.
        returns: role of each result: "state", "metrics" (averaged over the replicas unless wrapped in `PerReplica`),
            "examples" (a row an example, in input order; rows whose `mask` is False are left out), "per_replica".
            By default ("state", "metrics"), or the state alone.
        static_argnames: keyword arguments that are static.
        donate: reuse the old state's buffers for the new one; the state passed in is gone after the call.
        accumulate: number of microbatches that each replica's batch is cut into; one all-reduce and one update for all.
        steps_per_call: number of optimiser steps in one call; batches and metrics lead with that axis.
        max_in_flight: number of calls that may run ahead of the host.
        check_replicas: compare the replicas after the first step and every so many steps; 0: never.
        non_finite: what a NaN or infinite gradient does: "raise" (the state stays as it was before that step), "skip"
            the step, or "apply" it.

    Returns:
        A `DistributedStep`; called like the step, with whole, global batches.

    Raises:
        StepError: an option or role that is not allowed.

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
            raise StepError("jdist.distribute was given two strategies; write `distribute(step, strategy)`.")
        checked = make_options(**options)
        return lambda function: step.operations.distribute(step, function, checked)
    if not isinstance(strategy, Strategy):
        raise StepError(
            f"jdist.distribute needs a strategy, it got {strategy!r}. Write `@jdist.distribute(jdist.mirrored())`, or "
            "`jdist.distribute(step, strategy)`."
        )
    if not callable(step):
        raise StepError(f"jdist.distribute needs a function to distribute, it got {step!r}.")
    return strategy.operations.distribute(strategy, step, make_options(**options))


def distribute_locally(strategy: Strategy, step: Step, options: StepOptions) -> DistributedStep:
    """`Operations.distribute` of every strategy whose replicas this process drives itself."""
    return DistributedStep(step, strategy, options)


def _positional_names(step: Step) -> list[str]:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, p in inspect.signature(step).parameters.items() if p.kind in kinds]


def _shapes(tree: PyTree, sharding: Any) -> PyTree:
    def shape(x: Any) -> jax.ShapeDtypeStruct:
        aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

    return jax.tree.map(shape, tree)


def _without_padding(outputs: tuple[PyTree, ...], traced: Traced, batches: PyTree) -> tuple[PyTree, ...]:
    """Drops the rows of "examples" results whose row of the batch was padding."""
    masks = [b["mask"] for b in batches if isinstance(b, dict) and "mask" in b and jnp.ndim(b["mask"]) == 1]
    if not masks:
        return outputs
    keep = np.asarray(masks[0]).astype(bool)
    if keep.all():
        return outputs
    return tuple(
        jax.tree.map(lambda x: x[keep], tree) if role == "examples" else tree
        for role, tree in zip(output_roles(traced), outputs, strict=True)
    )
