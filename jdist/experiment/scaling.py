"""`train.optimizer.scaling` of a config: hyperparameters that were tuned at another global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jdist import scaling
from jdist.errors import ScalingError
from jdist.experiment.parse import Key
from jdist.experiment.validate import Problem, show

_OF_RATE: dict[str, Callable[..., Any]] = {"linear": scaling.linear, "square_root": scaling.square_root}
# Optimisers that the rule `adam` was derived for, as optax calls them.
_ADAMS = ("adam", "adamw")
_OF_ADAM = ("learning_rate", "b1", "b2", "eps")


def scaled(section: Mapping[str, Any] | None, options: Mapping[str, Any], *, global_batch: int) -> dict[str, Any]:
    """An optimizer's options for the global batch of the run.

    Args:
        section: `train.optimizer.scaling` as plain values; None for options that are meant as they are.
        options: what the optimizer is to be called with, schedules made.
        global_batch: rows of one step, over all replicas.

    Returns:
        The options, those that the rule is about converted.

    Raises:
        ScalingError: the rule does not reach as far as that batch.

    Example:
        >>> scaled({"rule": "linear", "base_batch": 32}, {"learning_rate": 0.1, "momentum": 0.9}, global_batch=64)
        {'learning_rate': 0.2, 'momentum': 0.9}
    """
    if section is None:
        return dict(options)
    batches = {"base_batch": section["base_batch"], "global_batch": global_batch}
    if section["rule"] in _OF_RATE:
        return {**options, "learning_rate": _OF_RATE[section["rule"]](options["learning_rate"], **batches)}
    given = {name: options[name] for name in _OF_ADAM if name in options}
    return {**options, **scaling.adam(**given, **batches)}


def check_scaling(
    section: Mapping[str, Any] | None, name: str, options: Mapping[str, Any], *, global_batch: int, key: Key
) -> Iterator[Problem]:
    """Everything wrong with `train.optimizer.scaling`, for options that are right by themselves.

    Args:
        section: `train.optimizer.scaling` as plain values, or None.
        name: the optimizer's name.
        options: its options, schedules made.
        global_batch: rows of one step, over all replicas.
        key: the key of the section.

    Yields:
        A problem where there is nothing to scale, the rule is not for this optimizer, or does not reach as far.
    """
    if section is None:
        return
    if options.get("learning_rate") is None:
        yield Problem(key=key, text="there is no learning_rate to scale", remedy=" Give one, or leave the scaling out.")
    elif section["rule"] == "adam" and name not in _ADAMS:
        yield Problem(
            key=(*key, "rule"),
            text=f"the rule adam is for {' and '.join(_ADAMS)}, not for {name}",
            remedy=" Take linear or square_root, which scale the learning rate alone.",
        )
    else:
        try:
            scaled(section, options, global_batch=global_batch)
        except ScalingError as exc:
            yield Problem(key=(*key, "base_batch"), text=f"{show(section['base_batch'])}: {exc}")


def explain(optimizer: Mapping[str, Any], *, global_batch: int) -> str:
    """What the scaling of `train.optimizer`, plain values, comes to.

    Example:
        >>> scaling = {"rule": "linear", "base_batch": 256}
        >>> explain({"name": "sgd", "learning_rate": 0.1, "scaling": scaling}, global_batch=1024)
        'learning rate x 4 by the linear rule: a global batch of 1,024 in place of 256'
    """
    section = optimizer["scaling"]
    of_one = scaled(section, {**optimizer, "learning_rate": 1.0}, global_batch=global_batch)
    averages = [f"{name} {of_one[name]:g}" for name in _OF_ADAM[1:] if section["rule"] == "adam"]
    changes = ", ".join([f"learning rate x {of_one['learning_rate']:g}", *averages])
    return (
        f"{changes} by the {section['rule']} rule: a global batch of {global_batch:,} in place of "
        f"{section['base_batch']:,}"
    )
