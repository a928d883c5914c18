"""The arguments of a call by role, and back in the step's own order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jdist.core.per_replica import is_per_replica
from jdist.core.sharded_leaf import is_sharded_leaf
from jdist.core.step_state import StepState, user_state, with_user_state
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import axes_of_leaves, rows_first, rows_in_place
from jdist.errors import StepError
from jdist.step.options import StepOptions
from jdist.step.tree_checks import check_arrays, kind_of, summary
from jdist.support.arrays import check_values_not_donated
from jdist.typing import PyTree

Step = Callable[..., Any]


class Others(NamedTuple):
    """The arrays of a call that are neither states nor batches."""

    replicated: tuple[PyTree, ...]  # by position
    named: dict[str, PyTree]  # by keyword
    loss_scale: Any = None  # set on a parameter server's worker, where no state carries it


@dataclass(frozen=True)
class Call:
    """The part of a call that is known before any array: equal ones share a compiled program."""

    roles: tuple[str, ...]  # of each positional argument
    static: tuple[Hashable, ...] = ()  # values of the static positional arguments, in order
    static_kwargs: tuple[tuple[str, Hashable], ...] = ()
    static_types: tuple[type, ...] = ()  # of both: 1, 1.0 and True are equal
    # keyword arguments that are batches; they follow the positional ones
    batch_names: tuple[str, ...] = ()
    batch_axes: tuple[int, ...] = ()  # axis of the rows, by leaf of the batches; empty: 0
    parts: tuple[int, ...] | None = None  # parts of the state that the step takes; None: all of it

    def apply(self, step: Step, state: PyTree, batches: PyTree, others: Others) -> Any:
        """Calls `step` with every argument in its place; the batches come with their rows first."""
        state = take_parts(state, self.parts)
        sources = {
            "state": iter(split_states(state, self.roles.count("state"))),
            "batch": iter(rows_in_place(batches, self.batch_axes) if self.batch_axes else batches),
            "replicated": iter(others.replicated),
            "static": iter(self.static),
        }
        sources["per_replica"] = map(_own_entry, sources["batch"])
        args = [next(sources[role]) for role in self.roles]
        named = {name: next(sources["batch"]) for name in self.batch_names}
        return step(*args, **named, **others.named, **dict(self.static_kwargs))


def join_states(states: Sequence[PyTree]) -> PyTree:
    """Joins the states that a step takes or returns: several as a tuple, a single one unchanged."""
    if len(states) == 1:
        return states[0]
    around = [state for state in states if isinstance(state, StepState)]
    if len(around) > 1:
        raise StepError(
            f"{len(around)} of the states come as a `jdist.StepState`, each with what a step of its own adds to it; a "
            "step adds one for all its states. Pass `.user` of all but one."
        )
    # Loss scale and residuals exist once, around all states together; a caller has them around one.
    joined = tuple(map(user_state, states))
    return with_user_state(around[0], joined) if around else joined


def split_states(state: PyTree, count: int) -> tuple[PyTree, ...]:
    """Undoes `join_states`, for a number of states."""
    if count <= 1:
        return (state,) * count
    first, *rest = user_state(state)
    return with_user_state(state, first), *rest


def take_parts(state: PyTree, parts: tuple[int, ...] | None) -> PyTree:
    """Takes a step's parts of a state that is a tuple; None: all of it, unchanged."""
    return state if parts is None else join_states([state[i] for i in parts])


def put_parts(state: PyTree, parts: tuple[int, ...] | None, new: PyTree) -> PyTree:
    """Replaces the parts of a state that a step takes."""
    if parts is None:
        return new
    replaced = dict(zip(parts, split_states(new, len(parts)), strict=True))
    return tuple(replaced.get(i, old) for i, old in enumerate(state))


def is_same_state(a: PyTree, b: PyTree) -> bool:
    """Returns whether two states are the same objects; of several states, each by itself."""
    if a is b:
        return True
    if isinstance(a, StepState):
        if not isinstance(b, StepState) or not is_same_state(a.user, b.user):
            return False
        return a.loss_scale is b.loss_scale and a.residuals is b.residuals
    return type(a) is type(b) is tuple and len(a) == len(b) > 0 and all(x is y for x, y in zip(a, b, strict=True))


def _own_entry(argument: PyTree) -> PyTree:
    """Takes a replica's entry of an argument that leads with an axis of replicas."""

    def own(path: Any, x: Any) -> Any:
        if x.shape[0] != 1:
            raise StepError(
                f'an argument with the role "per_replica" has {x.shape[0]} entries for a replica at '
                f"{jax.tree_util.keystr(path) or 'its value'}; it needs a leading axis of one entry a replica, and has no "
                'meaning under transform="jit". A whole batch has the role "batch".'
            )
        return x[0]

    return jax.tree_util.tree_map_with_path(own, argument)


def unwrap_per_replica(outputs: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Unwraps the `PerReplica` results of a step with "per_replica" arguments, to arrays [replicas, ...] like these."""
    return tuple(x.value if is_per_replica(x) else x for x in outputs)


class Signature:
    """A step's parameters and their roles."""

    def __init__(self, step: Step, options: StepOptions, strategy: Strategy | None = None):
        parameters = inspect.signature(step).parameters.values()
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.name = getattr(step, "__name__", "the step")
        self.positional = [p.name for p in parameters if p.kind in by_position]
        by_name = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        any_number = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        # Roles are listed in the order of the parameters; after `*args` they would be those of further arguments.
        names = self.positional if any_number else [*self.positional, *by_name]
        self.role_of = {
            name: "static" if name in options.static_argnames else role
            for name, role in zip(names, options.args, strict=False)
        }
        self.options, self._strategy = options, strategy
        # A wrapper over another step may name its arguments as the wrapped one's caller does.
        self._names: Callable[[Hashable], Sequence[str]] | None = getattr(step, "names_of_arguments", None)
        self._refusal = ""
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        for name in options.static_argnames:
            if not open_ended and name not in {p.name for p in parameters}:
                raise StepError(
                    f"`static_argnames` has {name!r}, which is not a parameter of {self.name}; it has "
                    f"{', '.join(p.name for p in parameters)}."
                )
        for i, name in enumerate(self.positional):
            role = options.args[i] if i < len(options.args) else None
            # An argument declared replicated or static is meant so; one that is not declared at all was overlooked.
            misplaced = name in ("state", "batch") and role in {"state", "batch", None} - {name}
            if misplaced and name not in options.static_argnames:
                self._refusal = self._refusal or (
                    f"the parameter `{name}` of {self.name} has the role {role or 'replicated'!r}, as `args` is "
                    f"{options.args}. Say a role for each parameter in turn, for example "
                    f"`args={_likely_roles(self.positional)}`. A step that changes nnx objects is distributed by "
                    "`@jdist.nnx.distribute(strategy)`, which needs no roles for them."
                )
        if self._refusal and not _is_in_class(step):  # a method has its roles once it is bound to an object
            raise StepError(self._refusal)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, PyTree, PyTree, Others]:
        """Sorts a call's arguments into `(call, state, batches, others)`; several states are a tuple."""
        if self._refusal:
            raise StepError(self._refusal)
        kwargs, static_names, names = dict(kwargs), self.options.static_argnames, self.positional
        while len(args) < len(names) and names[len(args)] in kwargs:
            args = (*args, kwargs.pop(names[len(args)]))
        declared = self.options.args
        batch_names = tuple(name for name in sorted(kwargs) if self.role_of.get(name) == "batch")
        present = [*declared[: len(args)], *("batch" for _ in batch_names)]
        if any(present.count(role) < declared.count(role) for role in ("state", "batch", "per_replica")):
            raise StepError(
                f"{self.name} was called with {len(args)} arguments by position; its roles are {declared}. Pass at least "
                "the state and the batch."
            )
        by_role: dict[str, list[Any]] = {"state": [], "batch": [], "replicated": [], "static": []}
        roles: list[str] = []
        undeclared: dict[str, Any] = {}
        for i, arg in enumerate(args):
            role: str | None = declared[i] if i < len(declared) else None
            if i < len(names) and names[i] in static_names:
                role = "static"
            if role is None:
                undeclared[self._name_of(i, args)] = arg
            roles.append(role or "replicated")
            by_role["batch" if role == "per_replica" else roles[-1]].append(arg)
        by_role["batch"] += (kwargs.pop(name) for name in batch_names)
        static = tuple(by_role["static"])
        static_kwargs = tuple(
            (k, kwargs.pop(k)) for k in sorted(kwargs) if k in static_names or self.role_of.get(k) == "static"
        )
        types = tuple(type(value) for value in (*static, *(value for _, value in static_kwargs)))
        batches = tuple(by_role["batch"])
        axes = axes_of_leaves(batches, self.options.batch_axis, lead=self.options.num_step_axes)
        call = Call(tuple(roles), static, static_kwargs, types, batch_names, axes)
        try:
            hash(call)
        except TypeError as exc:
            raise StepError(
                f"a static argument of {self.name} cannot be hashed: {exc}. Pass it as replicated."
            ) from exc
        undeclared |= {f"keyword argument `{k}`": value for k, value in kwargs.items() if k not in self.role_of}
        if undeclared and batches:
            self._check_undeclared(undeclared, call, batches, len(args))
        return call, join_states(by_role["state"] or [()]), batches, Others(tuple(by_role["replicated"]), kwargs)

    def _check_undeclared(self, values: Mapping[str, Any], call: Call, batches: PyTree, count: int) -> None:
        options = self.options
        names = [*self.positional, *(name for name in self.role_of if name not in self.positional)]
        roles = [*options.args, *("batch" for _ in range(len(options.args), max(count, len(options.args) + 1)))]
        remedy = (
            f"Say what it is: `args={tuple(roles)}` if it has a row for each row of the batch, and the replicas are to share "
            f'them; "replicated" in that place if every replica gets it whole.'
        )
        if any(name.startswith("keyword") for name in values) and len(names) < len(roles):
            remedy += " A role is said of a parameter that the step names."
        check_no_batch(self.name, values, batches, call.batch_axes, options, self._strategy, remedy)

    def check_others(self, call: Call, others: Others) -> None:
        """Raises StepError for text and objects among the replicated arguments."""
        places = [i for i, role in enumerate(call.roles) if role == "replicated"]
        named = [(self._name_of(i, call.static), value) for i, value in zip(places, others.replicated, strict=True)]
        for name, value in [*named, *((f"keyword argument `{key}`", value) for key, value in others.named.items())]:
            check_arrays(
                value,
                f'{name} of {self.name}, role "replicated",',
                'Give a constant the role "static", or name it in `static_argnames`.',
            )

    def check_not_donated(self, call: Call, batches: PyTree, others: Others) -> None:
        """Raises DonatedStateError for an argument with buffers that an earlier call has consumed."""
        values = {"batch": iter(batches), "replicated": iter(others.replicated)}
        named = [
            (self._name_of(i, call.static), next(values[role])) for i, role in enumerate(call.roles) if role in values
        ]
        by_name = [(f"keyword argument `{key}`", value) for key, value in others.named.items()]
        check_values_not_donated(self.name, [*named, *by_name])

    def taken_as(self, call: Call, state: PyTree, batches: PyTree) -> str:
        """Lists the arguments that were taken for state and batches, with their first leaves."""
        values = {"state": iter(split_states(state, call.roles.count("state"))), "batch": iter(batches)}
        lines = [
            f'  {self._name_of(i, call.static)}, role "{role}": {summary(next(values[role]))}'
            for i, role in enumerate("batch" if role == "per_replica" else role for role in call.roles)
            if role in values
        ]
        lines += [
            f'  keyword argument `{name}`, role "batch": {summary(next(values["batch"]))}' for name in call.batch_names
        ]
        return "\n".join([f"{self.name} was called with:", *lines])

    def _name_of(self, place: int, statics: Sequence[Any]) -> str:
        return argument_name(place, self.positional) if self._names is None else self._names(statics[0])[place]


def argument_name(place: int, positional: Sequence[str]) -> str:
    """Names an argument of a call by its number and its parameter."""
    return f"argument {place + 1}" + (f" `{positional[place]}`" if place < len(positional) else "")


def check_no_batch(
    name: str,
    values: Mapping[str, PyTree],  # by the argument's name in the message
    batches: PyTree,  # the declared batches
    batch_axes: tuple[int, ...],
    options: StepOptions,
    strategy: Strategy | None,
    remedy: str,
) -> None:
    """Refuses batch-like arguments without a role: each replica would get all their rows."""
    lead = options.num_step_axes
    # Shapes are checked under every strategy, so that a step that runs on one device runs on many.
    leaves = [np.shape(x) for x in jax.tree.leaves(rows_first(batches, batch_axes, lead=lead, shapes_only=True))]
    shape = next((shape[: lead + 1] for shape in leaves if len(shape) > lead), None)
    for what, value in values.items():
        arrays = [x for x in jax.tree.leaves(value, is_leaf=is_sharded_leaf) if isinstance(x, _ARRAYS) and x.shape]
        # `distribute_dataset` made it, as its sharding shows, or each array has as many rows as the
        # batch. With one row a replica it would broadcast against the replica's rows without an
        # error.
        of_dataset = [x for x in arrays if strategy is not None and _lies_by_rows(x, strategy)]
        by_shape = shape is not None and shape[-1] > 1 and all(_has_rows(x, shape) for x in arrays)
        if not of_dataset and not (arrays and by_shape):
            continue
        first = (of_dataset or arrays)[0]
        why = "comes out of `distribute_dataset`" if of_dataset else "has as many rows as the batch"
        raise StepError(f"{what} of {name}, {kind_of(first)}, has no role in `args`, and {why}. {remedy}")


_ARRAYS = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def _lies_by_rows(x: Any, strategy: Strategy) -> bool:
    """Returns whether an array is spread over a strategy's replicas along one of its axes."""
    sharding = x.sharding if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
    if not isinstance(sharding, NamedSharding) or sharding.mesh != strategy.mesh:
        return False
    return any(strategy.axes == ((entry,) if isinstance(entry, str) else entry) for entry in sharding.spec)


def _has_rows(x: Any, batch: tuple[int, ...]) -> bool:
    """Returns whether an array leads with the batch's axes: its rows, or steps and rows."""
    is_old_key = x.dtype == np.uint32 and x.shape in ((2,), (4,))  # as `jax.random.PRNGKey` makes it
    return not is_old_key and (x.shape[: len(batch)] == batch or x.shape[0] == batch[-1])


def _is_in_class(step: Step) -> bool:
    """Returns whether a function was defined in the body of a class."""
    outer, _, _ = getattr(step, "__qualname__", "").rpartition(".")
    is_named = inspect.isfunction(step) and step.__name__ != "<lambda>"
    return is_named and bool(outer) and not outer.endswith("<locals>")


def _likely_roles(parameters: Sequence[str]) -> tuple[str, ...]:
    """Suggests roles for parameters with a `batch` or a `state` among them."""
    if "state" in parameters:
        return tuple(name if name in ("state", "batch") else "replicated" for name in parameters)
    before = parameters.index("batch")
    return ("state",) * before + ("batch",) + ("replicated",) * (len(parameters) - before - 1)
