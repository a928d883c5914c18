"""Checks of a task's options: each names the option, its value, what is allowed, and returns the value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jdist.errors import ConfigError


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """A whole number of at least `least`.

    Args:
        name: the option, as the config writes it.
        value: what the config gave.
        least: the smallest value allowed.

    Returns:
        `value`.

    Raises:
        ConfigError: `value` is not such a number.

    Example:
        >>> whole("layers", 3)
        3
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(_message(name, value, f"a whole number, {least} or more"))
    return value


def fraction(name: str, value: Any, *, open_below: bool = False) -> float:
    """A number of at least 0 and less than 1.

    Args:
        name: the option, as the config writes it.
        value: what the config gave.
        open_below: refuse 0 as well.

    Returns:
        `value`, as a float.

    Raises:
        ConfigError: `value` is not such a number.

    Example:
        >>> fraction("dropout", 0.5)
        0.5
    """
    allowed = "a number above 0 and below 1" if open_below else "a number from 0 up to, but not including, 1"
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(_message(name, value, allowed))
    if not 0 <= value < 1 or (open_below and value == 0):
        raise ConfigError(_message(name, value, allowed))
    return float(value)


def switch(name: str, value: Any) -> bool:
    """True or false.

    Args:
        name: the option, as the config writes it.
        value: what the config gave.

    Returns:
        `value`.

    Raises:
        ConfigError: `value` is not a bool.

    Example:
        >>> switch("standardise", True)
        True
    """
    if not isinstance(value, bool):
        raise ConfigError(_message(name, value, "true or false"))
    return value


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of a few words.

    Args:
        name: the option, as the config writes it.
        value: what the config gave.
        choices: the words allowed.

    Returns:
        `value`.

    Raises:
        ConfigError: `value` is none of them.

    Example:
        >>> one_of("dtype", "float32", ("float32", "bfloat16"))
        'float32'
    """
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(_message(name, value, f"one of {', '.join(choices)}"))
    return value


def text(name: str, value: Any) -> str:
    """A piece of text that is not empty, such as a path.

    Args:
        name: the option, as the config writes it.
        value: what the config gave.

    Returns:
        `value`.

    Raises:
        ConfigError: `value` is not text, or is empty.

    Example:
        >>> text("path", "data.npz")
        'data.npz'
    """
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(_message(name, value, "a text that is not empty"))
    return value


def _message(name: str, value: Any, allowed: str) -> str:
    return f"`task.options.{name}` is {value!r}, but it must be {allowed}."
