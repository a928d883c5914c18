"""The match of a checkpoint's leaves to a state's: all of them under their own paths, or some under others."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jdist.checkpoint.folder import Place
from jdist.checkpoint.leaves import CARRIED
from jdist.core.sharded_leaf import is_sharded_leaf
from jdist.errors import CheckpointError
from jdist.support import checks
from jdist.support.leaves import matches_path, nearest_path, parse_path

Only = str | Sequence[str] | Callable[[str], bool]
Rename = Mapping[str, str | None] | Callable[[str], str | None]
_MOST_LISTED, _MOST_NEAREST = 5, 3


@dataclass(frozen=True)
class Fit:
    """The mapping from saved leaves to the state's."""

    # of each leaf of the state, the number of its saved leaf; None: it keeps its value
    numbers: list[int | None]
    not_restored: tuple[str, ...] = ()  # the paths of leaves that keep their values
    unused: tuple[str, ...] = ()  # the paths of saved leaves that no leaf takes
    passed_over: tuple[str, ...] = ()  # descriptions of skipped leaves that do not fit


@dataclass(frozen=True)
class Selection:
    """A part of a checkpoint, and the names that it has in the state; see `Checkpointer.restore`."""

    only: Only | None = None
    rename: Rename | None = None
    skip_mismatch: bool = False

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise CheckpointError(f"`only`: {pattern!r} is not a regular expression: {error}") from error
        if not (self.rename is None or callable(self.rename) or isinstance(self.rename, Mapping)):
            raise CheckpointError(
                f"`rename` is {self.rename!r:.80}: it must be a mapping from old paths to new ones, or a function"
            )
        if isinstance(self.rename, Mapping):
            for old, new in self.rename.items():
                if not isinstance(old, str) or not isinstance(new, str | None):
                    raise CheckpointError(
                        f"`rename`: {old!r:.80}: {new!r:.80}: paths are texts, and a new one may be None"
                    )
        checks.flag("skip_mismatch", self.skip_mismatch, CheckpointError)

    @property
    def is_all(self) -> bool:
        """Returns whether everything has to fit, under its own path."""
        return self.only is None and self.rename is None and not self.skip_mismatch

    @property
    def patterns(self) -> tuple[str, ...]:
        """The regular expressions of `only`; empty where it is a function, or everything."""
        if self.only is None or callable(self.only):
            return ()
        patterns = (
            (self.only,) if isinstance(self.only, str) or not isinstance(self.only, Iterable) else tuple(self.only)
        )
        if not patterns or not all(isinstance(each, str) for each in patterns):
            raise CheckpointError(
                f"`only` is {self.only!r:.80}: it must be a regular expression, several, or a function of a path"
            )
        return patterns

    def takes(self, path: str) -> bool:
        """Returns whether to restore a leaf of the state at this path."""
        if callable(self.only):
            return bool(self.only(path))
        return self.only is None or any(matches_path(pattern, path) for pattern in self.patterns)

    def check_paths(self, paths: Sequence[str]) -> None:
        """Raises a `CheckpointError` where `only` matches none of a state's paths."""
        for pattern in self.patterns:
            if any(matches_path(pattern, path) for path in paths):
                continue
            within = next((path for path in paths if matches_path(rf"(?:{pattern})/.*", path)), None)
            remedy = f"The nearest path is {nearest_path(pattern, paths)!r}"
            if within is not None:
                remedy = f"For all below it say {pattern + '/.*'!r}, which matches {within!r}"
            raise CheckpointError(
                f"`only`: {pattern!r} matches no leaf of the state. {remedy}; a pattern is a regular expression for the end of "
                "a path, from the name of a node on."
            )
        if callable(self.only) and paths and not any(map(self.takes, paths)):
            raise CheckpointError(f"`only`: the function accepts no leaf of the state; the first path is {paths[0]!r}.")

    def renamed(self, paths: Sequence[str], wanted: Sequence[str]) -> list[str | None]:
        """Renames the paths of a checkpoint to those of a state; None: it is left out."""
        if self.rename is None:
            return list(paths)
        if callable(self.rename):
            renamed = {path: self.rename(path) for path in paths}
            for path, new in renamed.items():
                if not isinstance(new, str | None):
                    raise CheckpointError(f"`rename` returned {new!r:.80} for {path!r}: it must be a path or None")
            return list(renamed.values())
        old_names = sorted(self.rename, key=len, reverse=True)
        found: list[str | None] = []
        used = set[str]()
        for path in paths:
            old = next((old for old in old_names if path == old or path.startswith(f"{old}/")), None)
            new = path if old is None else self.rename[old]
            if old is not None:
                used.add(old)
                new = None if new is None else (new + path[len(old) :]).removeprefix("/")
            found.append(new)
        for old, new in self.rename.items():
            if old not in used:
                raise CheckpointError(
                    f"`rename`: {old!r} is neither a leaf nor a node of the checkpoint. The nearest of its "
                    f"{len(paths):,} leaves, or nodes: {_nearest_nodes(old, paths)}."
                )
            if new and not any(path == new or path.startswith(f"{new}/") for path in wanted):
                raise CheckpointError(
                    f"`rename`: {old!r}: {new!r}: the state has no such leaf or node. The nearest of its "
                    f"{len(wanted):,} leaves, or nodes: {_nearest_nodes(new, wanted)}. None as a new path leaves it out."
                )
        return found


ALL = Selection()


def name_of(path: str) -> str:
    """Converts a leaf's path in a checkpoint to its name: what patterns and users see."""
    prefix = next((prefix for prefix in CARRIED if path.startswith(prefix)), "")
    between = "/" if prefix and not prefix.endswith(" ") else ""
    return f"{prefix}{between}{parse_path(path[len(prefix) :])}"


def fit(
    checkpoint: Place, saved: list[dict[str, Any]], wanted: list[dict[str, Any]], selection: Selection = ALL
) -> Fit:
    """Finds the saved leaf of each wanted leaf; refuses a tree that is not the saved one."""
    # Some leaves start again, without a number: residuals that were not saved, or for another
    # number of replicas (a run may continue with another all-reduce or on other devices); a loss
    # scale after another precision; values kept with the state, if not saved; and leaves outside a
    # selection.
    if selection.is_all:
        keys = [leaf["path"] for leaf in wanted]
        numbers = {leaf["path"]: i for i, leaf in enumerate(saved)}
        is_taken = [True] * len(wanted)
        names: list[str | None] = [leaf["path"] for leaf in saved]
    else:
        keys = [name_of(leaf["path"]) for leaf in wanted]
        if double := next((key for key, count in Counter(keys).items() if count > 1), None):
            raise CheckpointError(f"two leaves of the state are called {double}; give its nodes other keys")
        selection.check_paths(keys)
        names = selection.renamed([name_of(leaf["path"]) for leaf in saved], keys)
        is_taken = [selection.takes(key) for key in keys]
        numbers = _numbers(saved, names, set(keys))
    found: list[int | None] = []
    missing, unlike = [], []
    for leaf, key, taken in zip(wanted, keys, is_taken, strict=True):
        number = numbers.get(key) if taken else None
        there = None if number is None else saved[number]
        is_carried = leaf["path"].startswith(CARRIED)
        if not taken:
            pass
        elif is_carried and (there is None or there["shape"] != leaf["shape"]):
            number = None
        elif there is None:
            missing.append(f"leaf {key}: not in the checkpoint{_nearest_leaf(key, names, len(missing))}")
        elif not _fits(there, leaf):
            number = None
            described = f"saved {there['dtype']}{there['shape']}, the state has {leaf['dtype']}{leaf['shape']}"
            unlike.append(f"leaf {key}: {described}")
        found.append(number)
    wanted_keys = set(keys)
    extra = [
        f"leaf {name}: in the checkpoint, not in the state"
        for leaf, name in zip(saved, names, strict=True)
        if name is not None
        and name not in wanted_keys
        and not leaf["path"].startswith(CARRIED)
        and selection.takes(name)
    ]
    problems = [*missing, *extra, *unlike]
    if problems and not selection.skip_mismatch:
        remedy = "Take a part that fits, under the state's names"
        if selection.is_all:
            remedy = "Build the state as it was saved, save to another directory, or restore a part"
        raise CheckpointError(
            f"{checkpoint}: does not fit the state, which is unchanged. {remedy} (`only`, `rename`, `skip_mismatch`):\n  "
            f"{first_few(problems)}\n  `jdist checkpoint {checkpoint}` lists its {len(saved):,} leaves"
        )
    if found and not any(number is not None for number in found):
        raise CheckpointError(
            f"{checkpoint}: no leaf of it fits one of the state's, so there is nothing to restore:\n  {first_few(problems)}"
            f"\n  `jdist checkpoint {checkpoint}` lists its {len(saved):,} leaves"
        )
    used = {number for number in found if number is not None}
    return Fit(
        found,
        not_restored=tuple(name_of(leaf["path"]) for leaf, i in zip(wanted, found, strict=True) if i is None),
        unused=tuple(name_of(leaf["path"]) for i, leaf in enumerate(saved) if i not in used),
        passed_over=tuple(problems),
    )


def _nearest_leaf(name: str, there: Sequence[str | None], number: int) -> str:
    """Names the path nearest to one that is not there; nothing of those that `first_few` leaves out, as it takes its time."""
    near = None if number >= _MOST_LISTED else nearest_path(name, (path for path in there if path is not None))
    return "" if near is None else f"; nearest there is {near}"


def _nearest_nodes(name: str, paths: Iterable[str]) -> str:
    """Names the leaves, or nodes above them, that are nearest to one that is not there."""
    nodes = {"/".join(path.split("/")[: name.count("/") + 1]) for path in paths}
    return ", ".join(map(repr, difflib.get_close_matches(name, sorted(nodes), n=_MOST_NEAREST, cutoff=0)))


def first_few(problems: Sequence[str]) -> str:
    """Lists the first few of many problems, a line each."""
    left = len(problems) - _MOST_LISTED
    return "\n  ".join([*problems[:_MOST_LISTED], *([f"and {left} more"] if left > 0 else [])])


def _numbers(saved: list[dict[str, Any]], names: Sequence[str | None], wanted: set[str]) -> dict[str, int]:
    """Numbers the saved leaves by their new names; refuses two for one leaf of the state."""
    numbers: dict[str, int] = {}
    for i, name in enumerate(names):
        if name is not None and name in wanted and name in numbers:
            first, second = (name_of(saved[each]["path"]) for each in (numbers[name], i))
            raise CheckpointError(
                f"two leaves of the checkpoint are for {name}: {first} and {second}. Rename one, or map one to None."
            )
        if name is not None:
            numbers[name] = i
    return numbers


def check_has_values(where: object, like: Mapping[str, Any], filled: Container[str]) -> None:
    """Refuses a state with an empty leaf at a path that is not in `filled`."""
    for path, leaf in like.items():
        stored = leaf.stored if is_sharded_leaf(leaf) else leaf
        if path not in filled and isinstance(stored, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{where}: leaf {name_of(path)} is not restored, and `like` has only its shape, no value to keep. Give an "
                "array there, as `strategy.init` makes it, or leave it out of `like`."
            )


def _fits(saved: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Returns whether shapes and dtypes agree, or one side is Python's number, which `place` converts."""
    # A counter that starts as Python's 0 is an array after the first step.
    dtypes = (saved["dtype"], wanted["dtype"])
    is_number = saved["shape"] == [] and any(d.startswith("python ") for d in dtypes) and "key<" not in "".join(dtypes)
    return saved["shape"] == wanted["shape"] and (dtypes[0] == dtypes[1] or is_number)
