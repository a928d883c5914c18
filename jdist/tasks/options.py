"""Options of a task: the error that names one, and checks that say its value and what is allowed, or return the value."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jdist.errors import ConfigError
from jdist.support.checks import as_int, as_real


class OptionError(ConfigError):
    """An option of a task is not valid; raised in a task's `make`, it is reported with the place where the option was given.

    Attributes:
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
    """Turn a `ConfigError` that is raised in the block into an `OptionError` that names the option.

    Args:
        option: the option whose value names what does not serve, such as a file.
    """
    try:
        yield
    except OptionError:
        raise
    except ConfigError as error:
        raise OptionError(option, str(error)) from error


def near(path: Path, *, ending: str = "") -> str:
    """A sentence that names the file or folder whose name is nearest to that of one that is not there.

    Args:
        path: what is not there.
        ending: how the names of its kind end, such as ".npz"; nothing for a folder.

    Returns:
        ` Did you mean data.npz?`, with a leading space; nothing if no name is near.
    """
    there = {p.name.removesuffix(ending): p for p in path.parent.glob(f"*{ending}") if ending or p.is_dir()}
    names = difflib.get_close_matches(path.name.removesuffix(ending), sorted(there), n=1, cutoff=0.6)
    return f" Did you mean {there[names[0]]}?" if names else ""


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """A whole number of at least `least`.

    Args:
        name: the option, as the config writes it.
        value: what the config gave.
        least: the smallest value allowed.

    Returns:
        `value`.

    Raises:
        OptionError: `value` is not such a number.

    Example:
        >>> whole("layers", 3)
        3
    """
    number = as_int(value, least=least)
    if number is None:
        raise _refusal(name, value, f"a whole number, {least} or more")
    return number


def fraction(name: str, value: Any, *, open_below: bool = False) -> float:
    """A number of at least 0 and less than 1.

    Args:
        name: the option, as the config writes it.
        value: what the config gave.
        open_below: refuse 0 as well.

    Returns:
        `value`, as a float.

    Raises:
        OptionError: `value` is not such a number.

    Example:
        >>> fraction("dropout", 0.5)
        0.5
    """
    allowed = "a number above 0 and below 1" if open_below else "a number from 0 up to, but not including, 1"
    number = as_real(value)
    if number is None or not math.isfinite(number):
        raise _refusal(name, value, allowed)
    if not 0 <= value < 1 or (open_below and value == 0):
        raise _refusal(name, value, allowed)
    return float(value)


def switch(name: str, value: Any) -> bool:
    """True or false.

    Args:
        name: the option, as the config writes it.
        value: what the config gave.

    Returns:
        `value`.

    Raises:
        OptionError: `value` is not a bool.

    Example:
        >>> switch("standardise", True)
        True
    """
    if not isinstance(value, bool):
        raise _refusal(name, value, "true or false")
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
        OptionError: `value` is none of them.

    Example:
        >>> one_of("dtype", "float32", ("float32", "bfloat16"))
        'float32'
    """
    if not isinstance(value, str) or value not in choices:
        raise _refusal(name, value, f"one of {', '.join(choices)}")
    return value


def text(name: str, value: Any) -> str:
    """A piece of text that is not empty, such as a path.

    Args:
        name: the option, as the config writes it.
        value: what the config gave.

    Returns:
        `value`.

    Raises:
        OptionError: `value` is not text, or is empty.

    Example:
        >>> text("path", "data.npz")
        'data.npz'
    """
    if not isinstance(value, str) or not value.strip():
        raise _refusal(name, value, "text that is not empty")
    return value


def _refusal(name: str, value: Any, allowed: str) -> OptionError:
    return OptionError(name, f"{value!r} is not {allowed}")
