"""The options of `jdist.distribute` and the roles of a step's arguments and results, checked at construction."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeVar, get_args

from jdist.core.precision import LossScaling, Precision
from jdist.core.precision import precision as make_precision
from jdist.data.batch_axis import BatchAxis, check_axes
from jdist.errors import StepError
from jdist.support import checks
from jdist.support.words import did_you_mean

ArgRole = Literal["state", "batch", "per_replica", "replicated", "static"]
ReturnRole = Literal["state", "metrics", "examples", "per_replica"]
NonFinite = Literal["raise", "skip", "apply"]
Verify = Literal["first", "strict", "off"]

# By the names that jit and pmap have for them.
MOST_STEPS = 2**31 - 1
_REMEDIES = {
    "donate_argnums": " The state is donated by default; `donate=False` keeps it.",
    "donate_argnames": " The state is donated by default; `donate=False` keeps it.",
    "static_argnums": ' Say it by role: `args=("state", "batch", "static")`.',
    "static_broadcasted_argnums": ' Say it by role: `args=("state", "batch", "static")`.',
    "axis_name": ' The strategy names the axis: `jdist.mirrored(axis="batch")`.',
    "in_axes": (
        ' Say it by role: `args=("state", "per_replica", "replicated")`; 0 is "per_replica", None is "replicated"; '
        "`batch_axis` is the axis of a batch's rows."
    ),
}


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of `jdist.distribute`, which describes them."""

    args: tuple[ArgRole, ...] = ("state", "batch")
    returns: tuple[ReturnRole, ...] | None = None
    static_argnames: tuple[str, ...] = ()
    donate: bool = True
    accumulate: int = 1
    steps_per_call: int = 1
    max_in_flight: int = 8
    check_replicas: int = 1000
    non_finite: NonFinite = "raise"
    precision: Precision | None = None
    batch_axis: BatchAxis = 0
    verify: Verify | None = None

    def __post_init__(self) -> None:
        _check_roles("args", self.args, get_args(ArgRole))
        if self.returns is not None:
            _check_roles("returns", self.returns, get_args(ReturnRole))
            if not self.returns:
                raise StepError(f"`returns` is {self.returns!r}; it needs one role or more.")
            if "state" in self.returns and "state" not in self.args:
                raise StepError(
                    f'`returns` is {self.returns!r}, but `args` is {self.args!r} without a "state" to update.'
                )
            if self.returns.count("state") not in (0, self.num_states):
                raise StepError(
                    f"`returns` is {self.returns!r} and `args` is {self.args!r}: a step returns as many states as it takes, "
                    'in their order. Give what it only reads the role "replicated".'
                )
        check_axes(self.batch_axis, StepError)
        checks.choice("non_finite", self.non_finite, get_args(NonFinite), StepError)
        if self.verify is not None:
            check_verify(self.verify)
        for name, least in (
            ("accumulate", 1),
            ("steps_per_call", 1),
            ("max_in_flight", 1),
            ("check_replicas", 0),
        ):
            number = checks.whole_number(name, getattr(self, name), StepError, least=least)
            if name == "steps_per_call" and number > MOST_STEPS:
                raise StepError(
                    f"`{name}` is {number:,}; it must be at most {MOST_STEPS:,}, as an axis of arrays has no more."
                )
            object.__setattr__(self, name, number)
        object.__setattr__(self, "donate", checks.flag("donate", self.donate, StepError))
        if self.precision is not None and not isinstance(self.precision, Precision):
            raise StepError(
                f'`precision` is {self.precision!r}; it must be "bf16", "fp16", or a value that `jdist.precision` makes: '
                '`precision=jdist.precision("bf16", keep=("target",))`.'
            )
        if self.loss_scaling is not None and self.non_finite == "apply":
            raise StepError(
                '`non_finite="apply"` cannot go with `jdist.precision("fp16")`: its loss scale backs off when a gradient is '
                'not finite. Choose "raise" or "skip": both leave an overflow out.'
            )
        if "per_replica" in self.args and self.accumulate > 1:
            raise StepError(
                '`args` has "per_replica", and `accumulate` is more than 1: an argument of one entry a replica cannot be cut '
                'into microbatches. Pass whole batches, "batch", or leave `accumulate` at 1.'
            )
        if self.steps_per_call > 1 and ("state" not in self.args or {"batch", "per_replica"}.isdisjoint(self.args)):
            raise StepError('`steps_per_call` needs a "state" among `args` that the steps hand on, and a "batch" each.')
        if self.steps_per_call > 1 and self.returns is not None and "examples" in self.returns:
            raise StepError('`returns` with "examples" needs `steps_per_call=1`: rows come back batch by batch.')

    @property
    def loss_scaling(self) -> LossScaling | None:
        """The loss scaling of the precision, if it has one."""
        return None if self.precision is None else self.precision.loss_scaling

    @property
    def num_states(self) -> int:
        """The number of states that the step takes."""
        return self.args.count("state")

    @property
    def num_step_axes(self) -> int:
        """The number of axes before the rows of a batch: 1 where a call makes several steps, else 0."""
        return int(self.steps_per_call > 1)

    @property
    def may_update_state(self) -> bool:
        """Returns whether the step may return a state; known for certain only once it was traced."""
        return "state" in self.args and (self.returns is None or "state" in self.returns)

    @property
    def donates_state(self) -> bool:
        """Returns whether the old state's buffers may be reused for the new state."""
        return self.donate and self.may_update_state


class RunKeywords(TypedDict, total=False):
    """The options of `jdist.distribute` but for the roles, as an editor and a type checker see them."""

    static_argnames: Sequence[str] | str
    donate: bool
    accumulate: int
    steps_per_call: int
    max_in_flight: int
    check_replicas: int
    non_finite: NonFinite
    precision: Precision | Literal["bf16", "fp16"] | None
    batch_axis: BatchAxis
    verify: Verify | Literal[False] | None


class StepKeywords(RunKeywords, total=False):
    """The options of `jdist.distribute`: the fields of `StepOptions`, as a user writes them."""

    args: Sequence[ArgRole] | ArgRole
    returns: Sequence[ReturnRole] | ReturnRole | None


F = TypeVar("F", bound=Callable[..., Any])


def spelling_keywords(function: F) -> F:
    """Gives a function that takes the options as `**options` a signature that names each, for notebooks and `help`."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(x.name, inspect.Parameter.KEYWORD_ONLY, default=x.default, annotation=x.type)
        for x in fields(StepOptions)
        if x.name not in signature.parameters
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # `inspect` reads it
    return function


def make_options(**options: Any) -> StepOptions:
    """Makes `StepOptions` of keyword arguments; lists become tuples, a lone string a tuple of one."""
    known = StepOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            hint = _REMEDIES.get(name) or did_you_mean(name, known)
            raise StepError(f"jdist.distribute has no option `{name}`.{hint} It has: {', '.join(known)}.")
    if options.get("verify") is False:
        options["verify"] = "off"
    if isinstance(name := options.get("precision"), str):
        options["precision"] = make_precision(name)
    for name in ("args", "returns", "static_argnames"):
        value = options.get(name)
        if isinstance(value, str):
            options[name] = (value,)
        elif isinstance(value, list):
            options[name] = tuple(value)
    return StepOptions(**options)


def check_verify(value: Any) -> None:
    """Raises StepError for an unknown way to verify a step."""
    checks.choice("verify", value, get_args(Verify), StepError)


def _check_roles(name: str, roles: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(roles, tuple):
        raise StepError(f"`{name}` is {roles!r}; it must be a tuple of roles out of {allowed}.")
    for i, role in enumerate(roles):
        checks.choice(f"{name}[{i}]", role, allowed, StepError)
