"""The arguments of one call, sorted by their roles and put back in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax

from jdist.errors import StepError
from jdist.transforms.options import StepOptions
from jdist.transforms.trees import check_arrays, summary
from jdist.values import is_per_replica

PyTree = Any
Step = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """What of a call is known before any array: two calls that are equal share a compiled program.

    Attributes:
        roles: role of each positional argument.
        static: values of the static positional arguments, in order.
        static_kwargs: static keyword arguments.
        static_types: types of both, as 1, 1.0 and True are equal.
    """

    roles: tuple[str, ...]
    static: tuple[Hashable, ...] = ()
    static_kwargs: tuple[tuple[str, Hashable], ...] = ()
    static_types: tuple[type, ...] = ()

    def apply(self, step: Step, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        """Calls `step` with every argument in its place."""
        sources = {"batch": iter(batches), "replicated": iter(others[0]), "static": iter(self.static)}
        sources["per_replica"] = map(_own_entry, sources["batch"])
        args = [state if role == "state" else next(sources[role]) for role in self.roles]
        return step(*args, **others[1], **dict(self.static_kwargs))


def _own_entry(argument: PyTree) -> PyTree:
    """A replica's entry of an argument that leads with an axis of replicas."""

    def own(path: Any, x: Any) -> Any:
        if x.shape[0] != 1:
            raise StepError(
                f'an argument with the role "per_replica" has {x.shape[0]} entries for a replica at '
                f"{jax.tree_util.keystr(path) or 'its value'}; it needs a leading axis of as many entries as there are "
                'replicas, as `common_utils.shard` makes it, and has no meaning under transform="jit". A whole batch has the '
                'role "batch".'
            )
        return x[0]

    return jax.tree_util.tree_map_with_path(own, argument)


def as_taken(outputs: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """The results of a step with "per_replica" arguments, which returns such values as it takes them: [replicas, ...]."""
    return tuple(x.value if is_per_replica(x) else x for x in outputs)


class Signature:
    """A step's parameters and their roles.

    Args:
        step: the user's step.
        options: its roles.

    Raises:
        StepError: a name in `static_argnames` is no parameter of the step, or a parameter named `state` or `batch` does
            not have that role.
    """

    def __init__(self, step: Step, options: StepOptions):
        parameters = inspect.signature(step).parameters.values()
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.name = getattr(step, "__name__", "the step")
        self.positional = [p.name for p in parameters if p.kind in by_position]
        self.options = options
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        for name in options.static_argnames:
            if not open_ended and name not in {p.name for p in parameters}:
                raise StepError(
                    f"`static_argnames` has {name!r}, which is no parameter of {self.name}; it has "
                    f"{', '.join(p.name for p in parameters)}."
                )
        for i, name in enumerate(self.positional):
            role = options.args[i] if i < len(options.args) else None
            # What is declared replicated or static is meant to be; what is not declared at all has been overlooked.
            misplaced = name in ("state", "batch") and role in {"state", "batch", None} - {name}
            if misplaced and name not in options.static_argnames:
                roles = tuple(p if p in ("state", "batch") else "replicated" for p in self.positional)
                raise StepError(
                    f"the parameter `{name}` of {self.name} has the role {role or 'replicated'!r}, as `args` is "
                    f"{options.args}. Say a role for each parameter in turn, for example `args={roles}`; several states "
                    "go into one tuple."
                )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, PyTree, PyTree, PyTree]:
        """Sorts the arguments of one call.

        Returns:
            `(call, state, batches, (replicated arguments, keyword arguments))`.

        Raises:
            StepError: a state or batch is missing, or a static argument cannot be hashed.
        """
        kwargs, static_names = dict(kwargs), self.options.static_argnames
        while len(args) < len(self.positional) and self.positional[len(args)] in kwargs:
            args = (*args, kwargs.pop(self.positional[len(args)]))
        declared = self.options.args
        if len(args) < sum(role in ("state", "batch", "per_replica") for role in declared):
            raise StepError(
                f"{self.name} was called with {len(args)} arguments by position; its roles are {declared}. Pass at least "
                "the state and the batch."
            )
        by_role: dict[str, list[Any]] = {"state": [], "batch": [], "replicated": [], "static": []}
        roles = []
        for i, arg in enumerate(args):
            role = declared[i] if i < len(declared) else "replicated"
            if i < len(self.positional) and self.positional[i] in static_names:
                role = "static"
            roles.append(role)
            by_role["batch" if role == "per_replica" else role].append(arg)
        static = tuple(by_role["static"])
        static_kwargs = tuple((k, kwargs.pop(k)) for k in static_names if k in kwargs)
        types = tuple(type(value) for value in (*static, *(value for _, value in static_kwargs)))
        call = Call(tuple(roles), static, static_kwargs, types)
        try:
            hash(call)
        except TypeError as exc:
            raise StepError(
                f"a static argument of {self.name} cannot be hashed: {exc}. Pass it as replicated."
            ) from exc
        state = by_role["state"][0] if by_role["state"] else ()
        return call, state, tuple(by_role["batch"]), (tuple(by_role["replicated"]), kwargs)

    def check_others(self, call: Call, others: tuple[tuple[PyTree, ...], dict[str, PyTree]]) -> None:
        """Refuses text and objects among the replicated arguments.

        Raises:
            StepError: names the argument, the leaf and its type.
        """
        places = [i for i, role in enumerate(call.roles) if role == "replicated"]
        named = [(self._name_of(i), value) for i, value in zip(places, others[0], strict=True)]
        for name, value in [*named, *((f"keyword argument `{key}`", value) for key, value in others[1].items())]:
            check_arrays(
                value,
                f'{name} of {self.name}, role "replicated",',
                'Give a constant the role "static", or name it in `static_argnames`.',
            )

    def taken_as(self, call: Call, state: PyTree, batches: PyTree) -> str:
        """Which argument of a call was taken for the state and which for a batch, with their first leaves."""
        values = {"state": iter((state,)), "batch": iter(batches)}
        lines = [
            f'  {self._name_of(i)}, role "{role}": {summary(next(values[role]))}'
            for i, role in enumerate("batch" if role == "per_replica" else role for role in call.roles)
            if role in values
        ]
        return "\n".join([f"{self.name} was called with:", *lines])

    def _name_of(self, place: int) -> str:
        return f"argument {place + 1}" + (f" `{self.positional[place]}`" if place < len(self.positional) else "")
