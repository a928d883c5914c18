"""`train.optimizer` of a config -> an optax optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist.errors import ConfigError
from jdist.experiment.load import Key
from jdist.experiment.names import nearest
from jdist.experiment.options import check_options
from jdist.experiment.validate import Problem, show

KEY: Key = ("train", "optimizer")
_LENGTHS = ("decay_steps", "transition_steps")


def fill_lengths(section: Mapping[str, Any], *, steps: int) -> dict[str, Any]:
    """Give each schedule that needs a length and has none the length of the run.

    Args:
        section: `train.optimizer` as plain values.
        steps: optimizer updates of the run.

    Returns:
        The section, with `decay_steps` or `transition_steps` filled in.

    Example:
        >>> fill_lengths({"name": "sgd", "learning_rate": {"schedule": "cosine_decay_schedule"}}, steps=9)
        {'name': 'sgd', 'learning_rate': {'schedule': 'cosine_decay_schedule', 'decay_steps': 9}}
    """

    def filled(value: Any) -> Any:
        function = _schedules().get(value["schedule"]) if _is_schedule(value) else None
        if function is None:
            return value
        needed = {n for n, p in inspect.signature(function).parameters.items() if p.default is p.empty}
        return value | {name: steps for name in _LENGTHS if name in needed and name not in value}

    return {name: filled(value) for name, value in section.items()}


def check_optimizer(section: Mapping[str, Any]) -> Iterator[Problem]:
    """Everything wrong with `train.optimizer`.

    Args:
        section: `train.optimizer` as plain values, with lengths filled in.

    Yields:
        A problem for each unknown name or option, and each value that cannot be meant.
    """
    name, options = section["name"], {k: v for k, v in section.items() if k != "name"}
    function = _optimizers().get(name)
    if function is None:
        remedy = nearest(name, _optimizers(), label="Among others")
        yield Problem(key=(*KEY, "name"), text=f"optax has no optimizer {show(name)}", remedy=remedy)
        return
    found = list(check_options(function, options, called=f"optax.{name}", key=KEY))
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    for option, value in options.items():
        if value is not None or defaults.get(option) is not None:
            found += _check_value(value, (*KEY, option))
    yield from found
    if not found:
        yield from _try_out(section)


def build_optimizer(section: Mapping[str, Any], *, clip_norm: float | None = None) -> optax.GradientTransformation:
    """The optimizer that a checked section describes.

    Args:
        section: `train.optimizer` as plain values, with lengths filled in.
        clip_norm: gradients are first scaled down to at most this global norm; None for no clipping.

    Returns:
        The optax transformation.

    Raises:
        ConfigError: the section was not checked, and is wrong.

    Example:
        >>> tx = build_optimizer({"name": "adamw", "learning_rate": 1e-3})
    """
    function = _optimizers().get(section["name"])
    if function is None:
        raise ConfigError(f"optax has no optimizer {section['name']!r}.{nearest(section['name'], _optimizers())}")
    tx = function(**{name: _value(value) for name, value in section.items() if name != "name"})
    return tx if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), tx)


def _value(value: Any) -> Any:
    """An option's value: a schedule where one is described, else as it is written."""
    if isinstance(value, list):
        return [_value(item) for item in value]
    if not _is_schedule(value):
        return value
    return _schedules()[value["schedule"]](**{k: _value(v) for k, v in value.items() if k != "schedule"})


def _check_value(value: Any, key: Key) -> Iterator[Problem]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _check_value(item, (*key, str(index)))
    elif _is_schedule(value):
        name, options = value["schedule"], {k: v for k, v in value.items() if k != "schedule"}
        function = _schedules().get(name) if isinstance(name, str) else None
        if function is None:
            remedy = nearest(str(name), _schedules(), label="Schedules", limit=20)
            yield Problem(key=(*key, "schedule"), text=f"optax has no schedule {show(name)}", remedy=remedy)
            return
        yield from check_options(function, options, called=f"optax.{name}", key=key)
        for option, inner in options.items():
            yield from _check_value(inner, (*key, option))
    elif key[-1] == "learning_rate":
        if not isinstance(value, int | float) or isinstance(value, bool):
            yield Problem(
                key=key,
                text=f"{show(value)} is neither a number nor a schedule",
                remedy=" A schedule is written {schedule: cosine_decay_schedule, init_value: 1e-3}.",
            )
        elif not value >= 0:
            yield Problem(key=key, text=f"{show(value)} is not >= 0")


def _try_out(section: Mapping[str, Any]) -> Iterator[Problem]:
    """Build it and trace one update, so that values which optax cannot use come to light now."""
    tree = {"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    try:
        tx = build_optimizer(section)
        jax.eval_shape(lambda grads, params: tx.update(grads, tx.init(params), params), tree, tree)
    except (TypeError, ValueError, AttributeError, KeyError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        yield Problem(key=KEY, text=f"optax.{section['name']} cannot be used with these options: {reason}")


def _is_schedule(value: Any) -> bool:
    return isinstance(value, Mapping) and "schedule" in value


def _optimizers() -> dict[str, Callable[..., Any]]:
    """optax's optimizers by name: its public functions that take a learning rate."""
    return {
        name: member
        for name, member in vars(optax).items()
        if inspect.isfunction(member)
        and not name.startswith(("_", "scale_by"))
        and "learning_rate" in inspect.signature(member).parameters
    }


def _schedules() -> dict[str, Callable[..., Any]]:
    """optax's schedules by name."""
    return {
        name: member
        for name, member in vars(optax.schedules).items()
        if inspect.isfunction(member) and not name.startswith(("_", "inject"))
    }
