"""`--grid KEY=V1,V2,...`: the runs of a sweep, each with its overrides and a name that says what it tries."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jdist.errors import ConfigError
from jdist.experiment.load import parse
from jdist.experiment.render import flow

_MOST_RUNS = 10_000
_MOST_LETTERS = 24  # of a value in a name


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One key of a grid.

    Attributes:
        key: the key, with dots.
        label: what to call it, unlike all others of the grid.
        values: what to try, as they are written in YAML.
    """

    key: str
    label: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """One run of a grid.

    Attributes:
        name: of the run, unlike all others of the grid.
        values: the value of each axis, by its label.
        overrides: for `jdist run`.
    """

    name: str
    values: dict[str, str]
    overrides: tuple[str, ...]


def parse_grid(grid: Sequence[str]) -> list[Axis]:
    """Read what the command line says.

    Args:
        grid: `KEY=V1,V2,...` each.

    Returns:
        An axis for each, in order.

    Raises:
        ConfigError: one is not of that form, names a key or a value again, or there are none or too many.

    Example:
        >>> parse_grid(["train.seed=0,1"])[0].values
        ('0', '1')
    """
    if not grid:
        raise ConfigError("a sweep needs something to try: say --grid KEY=V1,V2,... , as --grid train.seed=0,1,2.")
    read = [(text, *_parse(text)) for text in grid]
    for text, key, _ in read:
        if [other for _, other, _ in read].count(key) > 1:
            raise ConfigError(f"--grid {text}: {key} is given twice. Write all of its values in one --grid.")
        if key in ("name", "log.folder"):
            raise ConfigError(f"--grid {text}: a sweep names its runs and their folder itself. Leave it out.")
    short = Counter(_short(key) for _, key, _ in read)
    axes = [
        Axis(key=key, label=_short(key) if short[_short(key)] == 1 else key, values=values) for _, key, values in read
    ]
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > _MOST_RUNS:
        raise ConfigError(f"the grid has {count:,} runs; a sweep takes at most {_MOST_RUNS:,}. Try fewer values.")
    return axes


def points(axes: Sequence[Axis]) -> list[Point]:
    """Every combination, the last axis fastest.

    Example:
        >>> [point.name for point in points(parse_grid(["train.seed=0,1", "strategy.name=mirrored"]))]
        ['seed-0_strategy-mirrored', 'seed-1_strategy-mirrored']
    """
    points = []
    for combination in itertools.product(*([(i, v) for i, v in enumerate(axis.values)] for axis in axes)):
        words = [_word(axis, *each) for axis, each in zip(axes, combination, strict=True)]
        points.append(
            Point(
                name="_".join(words)[:150],
                values={axis.label: value for axis, (_, value) in zip(axes, combination, strict=True)},
                overrides=tuple(f"{axis.key}={value}" for axis, (_, value) in zip(axes, combination, strict=True)),
            )
        )
    if len({point.name for point in points}) < len(points):  # cut short, or of values that differ in odd characters
        digits = len(str(len(points) - 1))
        points = [Point(name=f"{i:0{digits}}", values=p.values, overrides=p.overrides) for i, p in enumerate(points)]
    return points


def _parse(text: str) -> tuple[str, tuple[str, ...]]:
    """The key of one `--grid`, and its values; they are read as a list of YAML, so a mapping may hold commas."""
    key, equals, written = text.partition("=")
    if not equals or not written.strip() or not all(part and part == part.strip() for part in key.split(".")):
        raise ConfigError(f"--grid {text}: a grid is KEY=V1,V2,... with a dotted key, as in train.seed=0,1,2.")
    values, _, problems = parse(f"[{written}]", f"--grid {text}", line_numbers=False, within=tuple(key.split(".")))
    if problems:
        raise ConfigError(problems[0])
    found: list[Any] = [flow(value) for value in values]
    again = next((value for value, times in Counter(found).items() if times > 1), None)
    if not found or again is not None:
        what = f"the value {again} is there twice" if found else "there is no value"
        raise ConfigError(f"--grid {text}: {what}. Each value makes a run.")
    return key, tuple(found)


def _short(key: str) -> str:
    """The last part of a key; of `strategy.name` the part before."""
    *above, last = key.split(".")
    return above[-1] if above and last in ("name", "schedule") else last


def _word(axis: Axis, index: int, value: str) -> str:
    """A value as a part of a name: itself if it is short and plain, else its number on the axis."""
    plain = re.fullmatch(rf"[A-Za-z0-9._-]{{1,{_MOST_LETTERS}}}", value)
    return f"{axis.label}-{value if plain else index}"
