"""Schedules of optax, and a warm-up before any of them, described in a config as `{schedule: NAME, ...}`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Set
from typing import Any, TypeGuard

import optax

from jdist.scaling import gradual_warmup
from jdist.support.signature import Key, Problem, check_options, dotted, show
from jdist.support.tracebacks import callers_level
from jdist.support.words import closest, nearest

# What optax raises for arguments that it cannot use.
REFUSALS = (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError)
_LENGTHS = ("decay_steps", "transition_steps")
_LONGEST = 2**40  # steps; no run is as long

Wrong = Callable[[Any, inspect.Parameter, Key], Problem | None]


def is_schedule(value: Any) -> TypeGuard[dict[str, Any]]:
    """Returns whether a value of a config describes a schedule."""
    return isinstance(value, dict) and "schedule" in value


def fill_length(value: Any, *, steps: int) -> Any:
    """Gives schedules in a config's value the length of the run, `steps`, where they need one."""
    # Nested schedules get it as well. Schedules in a list do not: each covers a part of the run,
    # and only the config can say which.
    name = value["schedule"] if is_schedule(value) else None
    function = _schedules().get(name) if isinstance(name, str) else None
    if function is None:
        return value
    needed = {n for n, p in inspect.signature(function).parameters.items() if p.default is p.empty}
    inner = {name: fill_length(part, steps=steps) for name, part in value.items()}
    return inner | {name: steps for name in _LENGTHS if name in needed and name not in value}


def build_value(value: Any) -> Any:
    """Makes the schedule that a value describes, or each of a list of them; returns any other value unchanged."""
    if isinstance(value, list):
        return [build_value(item) for item in value]
    if not is_schedule(value):
        return value
    return _schedules()[value["schedule"]](**{k: build_value(v) for k, v in value.items() if k != "schedule"})


def check_schedules(value: Any, key: Key, *, wrong: Wrong, filled: Set[Key], length: Key) -> Iterator[Problem]:
    """Yields the problems with the schedules that a config's value describes or holds."""
    # `wrong` describes the problem of a value for a parameter, or returns None. `filled` has the
    # keys of lengths that are the run's, `length` the key of the run's length.
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from check_schedules(item, (*key, str(index)), wrong=wrong, filled=filled, length=length)
    if not is_schedule(value):
        return
    name, options = value["schedule"], {k: v for k, v in value.items() if k != "schedule"}
    function = _schedules().get(name) if isinstance(name, str) else None
    if function is None:
        known = _schedules()
        longer = [each for each in known if name and isinstance(name, str) and name.lower() in each]
        if longer and closest(str(name), known) is None:  # as "cosine", a part of several names and close to none
            remedy = f" Did you mean {min(longer, key=len)}?"
        else:
            remedy = nearest(str(name), known, label="Schedules", limit=20)
        yield Problem(key=(*key, "schedule"), text=f"unknown schedule {show(name)}", remedy=remedy)
        return
    called = f"{'jdist.scaling' if function is gradual_warmup else 'optax'}.{name}"
    problems = list(check_options(function, options, called=called, key=key, wrong=wrong))
    for option, inner in options.items():
        problems += check_schedules(inner, (*key, option), wrong=wrong, filled=filled, length=length)
    refusal = None if problems else _refusal(value)
    if refusal is not None:
        short = _too_short(value, key, filled=filled, length=length)
        problems = [short or Problem(key=key, text=f"{called} refuses these arguments: {refusal}")]
    yield from problems


def warn_beyond(value: Any, key: Key, *, steps: int) -> None:
    """Warns of a schedule with a given length that is more than the run has; in a list each has a part of the run."""
    if not is_schedule(value):
        return
    for option, inner in value.items():
        if option in _LENGTHS and isinstance(inner, int) and inner > steps:
            warnings.warn(
                f"{dotted((*key, option))} is {inner:,}, and the run has {steps:,} steps: the schedule does not reach its end. "
                "Leave it out to take the run's length, or lower it.",
                UserWarning,
                stacklevel=callers_level(),
            )
        warn_beyond(inner, (*key, option), steps=steps)


def reason(error: Exception) -> str:
    """Returns the first line of an error; its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _refusal(value: Any) -> str | None:
    """Says why optax does not make what a value describes; None if it does."""
    try:
        build_value(value)
    except REFUSALS as exc:
        return reason(exc)
    return None


def _too_short(value: dict[str, Any], key: Key, *, filled: Set[Key], length: Key) -> Problem | None:
    """Makes the problem of a schedule that only a greater length would mend, with the least that does; else None."""
    name = next((name for name in _LENGTHS if name in value), None)
    least = None if name is None else _least_length(value, name)
    if name is None or least is None:
        return None
    is_of_run = (*key, name) in filled
    stages = [option for option in value if option.endswith("_steps") and option != name]
    what = f"a run of {value[name]:,} steps" if is_of_run else f"a length of {value[name]:,}"
    details = f", where {' and '.join(f'{stage} is {value[stage]:,}' for stage in stages)}" if stages else ""
    lower = [f"lower {dotted((*key, stage))}" for stage in stages]
    return Problem(
        key=length if is_of_run else (*key, name),
        text=f"{what} is too short for the schedule {value['schedule']} of {dotted(key)}{details}: it needs {least:,} or more",
        remedy=f" {' or '.join(['Train for longer' if is_of_run else 'Raise it', *lower])}.",
        others=tuple((*key, stage) for stage in stages),
    )


def _least_length(value: dict[str, Any], name: str) -> int | None:
    """Finds the least number of steps above `value[name]` with which optax makes a schedule; None if none will do."""
    too_few, enough = value[name], max(1, value[name])
    while _refusal(value | {name: enough}) is not None:
        too_few, enough = enough, 2 * enough
        if enough > _LONGEST:
            return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _refusal(value | {name: middle}) is None:
            enough = middle
        else:
            too_few = middle
    return enough


def _schedules() -> dict[str, Callable[..., Any]]:
    """Lists all schedules by name: optax's, and the warm-up."""
    of_optax = {
        name: member
        for name, member in vars(optax.schedules).items()
        if inspect.isfunction(member) and not name.startswith(("_", "inject"))
    }
    return {**of_optax, "gradual_warmup": gradual_warmup}
