"""Checks for the options of a task, and the error that names one.

Each check takes the option's name, as the config writes it below `task.options`, and the value that the config gives. It
returns the value, or raises an `OptionError` that says what is allowed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jdist.errors import ConfigError
from jdist.support.checks import as_int, as_real
from jdist.support.suggest import closest


class OptionError(ConfigError):
    """An option of a task is not valid; raised in a task's `make`, it is reported with the place where the option was given.

    Args:
        option: the option, as the config writes it below `task.options`: `width`, or `hidden.0` for an item of a list.
        text: what is wrong, with the value.
        remedy: how to mend it; opens with a space, or is empty.
        others: further options that have to do with it.

    Example:
        >>> raise OptionError("rows", "3 is not an even number")
        Traceback (most recent call last):
        jdist.tasks.options.OptionError: task.options.rows: 3 is not an even number.
    """

    def __init__(self, option: str, text: str, *, remedy: str = "", others: Sequence[str] = ()) -> None:
        super().__init__(f"task.options.{option}: {text.rstrip('.')}.{remedy}")
        self.option = option
        self.text = text
        self.remedy = remedy
        self.others = tuple(others)


@contextlib.contextmanager
def blaming(option: str) -> Iterator[None]:
    """Turns a `ConfigError` that is raised in the block into an `OptionError` that names the option, such as that of a file."""
    try:
        yield
    except OptionError:
        raise
    except ConfigError as error:
        raise OptionError(option, str(error)) from error


def near(path: Path, *, ending: str = "") -> str:
    """Suggests ` Did you mean data.npz?`, the nearest name to a missing path's; else nothing."""
    # `ending` is that of its kind's names, such as ".npz"; nothing for a folder.
    there = {p.name.removesuffix(ending): p for p in path.parent.glob(f"*{ending}") if ending or p.is_dir()}
    name = closest(path.name.removesuffix(ending), there)
    return f" Did you mean {there[name]}?" if name else ""


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """Checks for a whole number of at least `least`.

    Example:
        >>> whole("layers", 3)
        3
    """
    number = as_int(value, least=least)
    if number is None:
        raise _refusal(name, value, f"a whole number, {least} or more")
    return number


def fraction(name: str, value: Any, *, open_below: bool = False) -> float:
    """Checks for a number of at least 0, or with `open_below` above it, and less than 1; returns it as a float.

    Example:
        >>> fraction("dropout", 0.5)
        0.5
    """
    number = as_real(value)
    if number is None or not 0 <= number < 1 or (open_below and number == 0):
        allowed = "a number above 0 and below 1" if open_below else "a number from 0 up to, but not including, 1"
        raise _refusal(name, value, allowed)
    return float(number)


def switch(name: str, value: Any) -> bool:
    """Checks for true or false.

    Example:
        >>> switch("standardise", True)
        True
    """
    if not isinstance(value, bool):
        raise _refusal(name, value, "true or false")
    return value


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """Checks for one of a few words.

    Example:
        >>> one_of("dtype", "float32", ("float32", "bfloat16"))
        'float32'
    """
    if not isinstance(value, str) or value not in choices:
        raise _refusal(name, value, f"one of {', '.join(choices)}")
    return value


def text(name: str, value: Any) -> str:
    """Checks for a piece of text that is not empty, such as a path.

    Example:
        >>> text("path", "data.npz")
        'data.npz'
    """
    if not isinstance(value, str) or not value.strip():
        raise _refusal(name, value, "text that is not empty")
    return value


def _refusal(name: str, value: Any, allowed: str) -> OptionError:
    return OptionError(name, f"{value!r} is not {allowed}")
