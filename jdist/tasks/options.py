"""Options of a task: annotations that say what is allowed, and the error that names one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, StringConstraints

from jdist.errors import ConfigError
from jdist.support import checks
from jdist.support.signature import check_options
from jdist.support.words import closest

Count = Annotated[int, Field(ge=1)]  # a whole number, 1 or more
Natural = Annotated[int, Field(ge=0)]  # a whole number, 0 or more
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]  # text that is not blank, such as a path
T = TypeVar("T")


class OptionError(ConfigError):
    """An option of a task is not valid; raised in a task's `make`, it is reported with the place where the option was given."""

    # `option`: as the config writes it below `task.options`: `width`, or `hidden.0` for an item of a list.
    # `text`: what is wrong, with the value. `remedy`: how to mend it; opens with a space, or is empty.
    # `others`: further options that have to do with it.
    def __init__(self, option: str, text: str, *, remedy: str = "", others: Sequence[str] = ()) -> None:
        super().__init__(f"task.options.{option}: {text.rstrip('.')}.{remedy}")
        self.option = option
        self.text = text
        self.remedy = remedy
        self.others = tuple(others)


def checked(make: Callable[..., T]) -> Callable[..., T]:
    """Checks the options against the annotations also where a program calls `make`, as configs always do."""

    @functools.wraps(make)
    def call(**options: Any) -> T:
        plain = {name: _plain(value) for name, value in options.items()}
        for problem in check_options(make, plain, called=make.__module__):
            raise OptionError(".".join(problem.key), problem.text, remedy=problem.remedy)
        return make(**plain)

    return call


def _plain(value: Any) -> Any:
    """Converts tuples to lists, and NumPy's numbers to Python's, also within lists and mappings."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    converted = (convert(value) for convert in (checks.as_bool, checks.as_int, checks.as_real))
    return next((each for each in converted if each is not None), value)


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
