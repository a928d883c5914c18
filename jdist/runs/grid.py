"""`--grid KEY=V1,V2,...`: the runs of a sweep, each with its overrides and a name that says what it tries."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jdist.errors import ConfigError
from jdist.experiment.load import parse
from jdist.experiment.render import flow

_MOST_RUNS = 10_000
_MOST_LETTERS = 24  # of a value in a name


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One key of a grid."""

    key: str  # with dots
    label: str  # what to call it, unlike all others of the grid
    values: tuple[str, ...]  # what to try, as it is written in YAML


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """One run of a grid."""

    name: str  # of the run, unlike all others of the grid
    values: dict[str, str]  # the value of each axis, by its label
    overrides: tuple[str, ...]  # for `jdist run`


def parse_grid(grid: Sequence[str]) -> list[Axis]:
    """Reads the arguments of `--grid`, `KEY=V1,V2,...` each: an axis for each, in order."""
    if not grid:
        raise ConfigError("a sweep needs something to try: say --grid KEY=V1,V2,... , as --grid train.seed=0,1,2.")
    pairs = [_parse(text) for text in grid]
    times = Counter(key for key, _ in pairs)
    for text, (key, _) in zip(grid, pairs, strict=True):
        if times[key] > 1:
            raise ConfigError(f"--grid {text}: {key} is given twice. Write all of its values in one --grid.")
        if key in ("name", "log.folder"):
            raise ConfigError(f"--grid {text}: a sweep names its runs and their folder itself. Leave it out.")
    count = math.prod(len(values) for _, values in pairs)
    if count > _MOST_RUNS:
        raise ConfigError(f"the grid has {count:,} runs; a sweep takes at most {_MOST_RUNS:,}. Try fewer values.")
    times = Counter(_short(key) for key, _ in pairs)
    return [Axis(key=k, label=_short(k) if times[_short(k)] == 1 else k, values=values) for k, values in pairs]


def points(axes: Sequence[Axis]) -> list[Point]:
    """Makes a run of every combination, the last axis fastest."""
    points = [
        Point(
            name="_".join(map(_word, axes, values))[:150],
            values={axis.label: value for axis, value in zip(axes, values, strict=True)},
            overrides=tuple(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True)),
        )
        for values in itertools.product(*(axis.values for axis in axes))
    ]
    if len({point.name for point in points}) < len(points):  # cut short, or of values that differ in odd characters
        digits = len(str(len(points) - 1))
        points = [dataclasses.replace(point, name=f"{i:0{digits}}") for i, point in enumerate(points)]
    return points


def _parse(text: str) -> tuple[str, tuple[str, ...]]:
    """Reads the key of one `--grid`, and its values: a list of YAML, so a mapping may hold commas."""
    key, equals, written = text.partition("=")
    if not equals or not written.strip() or not all(part and part == part.strip() for part in key.split(".")):
        raise ConfigError(f"--grid {text}: a grid is KEY=V1,V2,... with a dotted key, as in train.seed=0,1,2.")
    parsed, _, problems = parse(f"[{written}]", f"--grid {text}", line_numbers=False, within=tuple(key.split(".")))
    if problems:
        raise ConfigError(problems[0])
    values = tuple(flow(value) for value in parsed)
    again = next((value for value, times in Counter(values).items() if times > 1), None)
    if not values or again is not None:
        what = f"the value {again} is there twice" if values else "there is no value"
        raise ConfigError(f"--grid {text}: {what}. Each value makes a run.")
    return key, values


def _short(key: str) -> str:
    """Returns the last part of a key; of `strategy.name` the part before."""
    *above, last = key.split(".")
    return above[-1] if above and last in ("name", "schedule") else last


def _word(axis: Axis, value: str) -> str:
    """Writes a value as a part of a name: itself if it is short and plain, else its number on the axis."""
    is_plain = re.fullmatch(rf"[A-Za-z0-9._-]{{1,{_MOST_LETTERS}}}", value)
    return f"{axis.label}-{value if is_plain else axis.values.index(value)}"
