"""`train.optimizer` of a config -> an optax optimizer, its options converted to the run's global batch."""

from __future__ import annotations

import collections.abc
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import scaling
from jdist.errors import ConfigError, ScalingError
from jdist.experiment.load import Key
from jdist.experiment.schedule import REFUSALS, build_value, check_schedules, fill_length, is_schedule, reason
from jdist.support.checks import as_real
from jdist.support.signature import Problem, alternatives, check_options, misfit, show
from jdist.support.words import nearest

_OF_RATE: dict[str, Callable[..., Any]] = {"linear": scaling.linear, "square_root": scaling.square_root}
# The optimizers of optax that the rule `adam` was derived for.
_ADAMS = ("adam", "adamw")
_OF_ADAM = ("learning_rate", "b1", "b2", "eps")
KEY: Key = ("train", "optimizer")


def fill_lengths(section: Mapping[str, Any], *, steps: int) -> dict[str, Any]:
    """Gives each schedule of `train.optimizer` without a required length the length of the run."""
    return {name: fill_length(value, steps=steps) for name, value in section.items()}


def check_optimizer(
    section: Mapping[str, Any],
    *,
    global_batch: int,
    filled: Set[Key] = frozenset(),
    length: Key = ("train", "steps"),
) -> Iterator[Problem]:
    """Yields a problem for each unknown name or bad option of `train.optimizer`."""
    # `filled` are the keys of filled-in lengths; `length` is the key of the run's length.
    name, options = section["name"], _options(section)
    function = _optimizers().get(name)
    if function is None:
        remedy = nearest(name, _optimizers(), label="Among others")
        yield Problem(key=(*KEY, "name"), text=f"optax has no optimizer {show(name)}", remedy=remedy)
        return
    problems = list(check_options(function, options, called=f"optax.{name}", key=KEY, wrong=_wrong))
    for option, value in options.items():
        problems += check_schedules(value, (*KEY, option), wrong=_wrong, filled=filled, length=length)
    problems = problems or list(_try_out(name, options))
    yield from problems or _check_scaling(section.get("scaling"), name, _built(options), global_batch=global_batch)


def build_optimizer(
    section: Mapping[str, Any], *, global_batch: int, clip_norm: float | None = None
) -> optax.GradientTransformation:
    """Makes the optax optimizer that a checked section, with lengths filled in, describes."""
    # `global_batch` are the rows of one step, the target of `scaling`. Gradients are first scaled
    # down to the global norm `clip_norm`.
    function = _optimizers().get(section["name"])
    if function is None:
        raise ConfigError(f"optax has no optimizer {section['name']!r}.{nearest(section['name'], _optimizers())}")
    tx = function(**_arguments(section, global_batch=global_batch))
    return tx if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), tx)


def learning_rate(section: Mapping[str, Any], *, global_batch: int) -> Any:
    """Returns the learning rate of `build_optimizer`'s optimizer: a number or a schedule; None if it has none."""
    default = inspect.signature(_optimizers()[section["name"]]).parameters["learning_rate"].default
    rate = _arguments(section, global_batch=global_batch).get("learning_rate", default)
    return None if rate is inspect.Parameter.empty else rate


def _arguments(section: Mapping[str, Any], *, global_batch: int) -> dict[str, Any]:
    return scale_options(section.get("scaling"), _built(_options(section)), global_batch=global_batch)


def _options(section: Mapping[str, Any]) -> dict[str, Any]:
    """Picks the options of `train.optimizer` that are optax's."""
    return {name: value for name, value in section.items() if name not in ("name", "scaling")}


def _built(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces each description of a schedule by the schedule."""
    return {name: build_value(value) for name, value in options.items()}


def _wrong(value: Any, parameter: inspect.Parameter, key: Key) -> Problem | None:
    """Finds a value's fault for a parameter of optax, by annotation and name; else None."""
    # optax annotates numbers as arrays too, and takes functions of the step (schedules) and of the
    # parameters (masks); a config can describe only the first kind of function.
    types = alternatives(parameter.annotation)
    if value is None and (parameter.default is None or type(None) in types):
        return None
    by_function = any(typing.get_origin(each) is collections.abc.Callable for each in types)
    number = as_real(value)
    fault = None
    if float in types:
        if by_function and number is None and not is_schedule(value):
            fault = "is neither a number nor a schedule, {schedule: NAME, ...}"
        elif not by_function and number is None:
            fault = "is not a number"
        elif parameter.name == "learning_rate" and number is not None and not number >= 0:
            fault = "is not >= 0"
    elif by_function:
        fault = None if isinstance(value, bool) else "is not true or false: a config takes no other mask"
    elif "dtype" in parameter.name:
        fault = None if _is_dtype(value) else "is not a dtype, such as float32 or bfloat16"
    else:
        return misfit(value, parameter, key)
    return None if fault is None else Problem(key=key, text=f"{show(value)} {fault}")


def _is_dtype(value: Any) -> bool:
    try:
        return isinstance(value, str) and jnp.dtype(value) is not None
    except TypeError:
        return False


def _try_out(name: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields problems of values that optax cannot use: builds it and traces one update."""
    # If that fails, each option is tried alone, with the defaults for the others.
    whole = _failure(name, options)
    if whole is None:
        return
    defaults = {option: p.default for option, p in inspect.signature(_optimizers()[name]).parameters.items()}
    needed = {option: value for option, value in options.items() if defaults[option] is inspect.Parameter.empty}
    plain = needed | ({"learning_rate": 1e-3} if "learning_rate" in needed else {})
    alone = {option: _failure(name, plain | {option: value}) for option, value in options.items()}
    if _failure(name, plain) is not None or not any(alone.values()):
        yield Problem(key=KEY, text=f"optax.{name} cannot be used with these options: {whole}")
        return
    for option, failure in alone.items():
        if failure is not None:
            remedy = "" if option in needed else f" Its default is {show(defaults[option])}."
            text = f"optax.{name} cannot use {show(options[option])}: {failure}"
            yield Problem(key=(*KEY, option), text=text, remedy=remedy)


def _failure(name: str, options: Mapping[str, Any]) -> str | None:
    """Says why an optimizer cannot be built or updated with these options; None if it can."""
    tree = {"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    try:
        tx = _optimizers()[name](**_built(options))
        jax.eval_shape(lambda grads, params: tx.update(grads, tx.init(params), params), tree, tree)
    except REFUSALS as exc:
        return reason(exc)
    return None


def _optimizers() -> dict[str, Callable[..., Any]]:
    """Lists optax's optimizers by name: its public functions that take a learning rate."""
    return {
        name: member
        for name, member in vars(optax).items()
        if inspect.isfunction(member)
        and not name.startswith(("_", "scale_by"))
        and "learning_rate" in inspect.signature(member).parameters
    }


def scale_options(
    section: Mapping[str, Any] | None, options: Mapping[str, Any], *, global_batch: int
) -> dict[str, Any]:
    """Converts an optimizer's options, with schedules made, to the run's global batch."""
    if section is None:
        return dict(options)
    batches = {"base_batch": section["base_batch"], "global_batch": global_batch}
    if section["rule"] in _OF_RATE:
        return {**options, "learning_rate": _OF_RATE[section["rule"]](options["learning_rate"], **batches)}
    of_adam = {name: options[name] for name in _OF_ADAM if name in options}
    return {**options, **scaling.adam(**of_adam, **batches)}


def _check_scaling(
    section: Mapping[str, Any] | None, name: str, options: Mapping[str, Any], *, global_batch: int
) -> Iterator[Problem]:
    """Yields a problem if nothing can be scaled, or the rule misfits optimizer or batch."""
    # The options are right by themselves; their schedules are made.
    if section is None:
        return
    key: Key = (*KEY, "scaling")
    if options.get("learning_rate") is None:
        yield Problem(key=key, text="needs a learning_rate to scale", remedy=" Give one, or leave the scaling out.")
    elif section["rule"] == "adam" and name not in _ADAMS:
        yield Problem(
            key=(*key, "rule"),
            text=f"the rule adam is for {' and '.join(_ADAMS)}, not for {name}",
            remedy=" Take linear or square_root, which scale the learning rate alone.",
        )
    else:
        try:
            scale_options(section, options, global_batch=global_batch)
        except ScalingError as exc:
            yield Problem(key=(*key, "base_batch"), text=f"{show(section['base_batch'])}: {exc}")


def explain(optimizer: Mapping[str, Any], *, global_batch: int) -> str:
    """Describes the effect of the scaling of `train.optimizer`, given as plain values."""
    section = optimizer["scaling"]
    of_one = scale_options(section, {**optimizer, "learning_rate": 1.0}, global_batch=global_batch)
    averages = [f"{name} {of_one[name]:g}" for name in _OF_ADAM[1:] if section["rule"] == "adam"]
    changes = ", ".join([f"learning rate x {of_one['learning_rate']:g}", *averages])
    return (
        f"{changes} by the {section['rule']} rule: a global batch of {global_batch:,} in place of "
        f"{section['base_batch']:,}"
    )
