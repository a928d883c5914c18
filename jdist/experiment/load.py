"""A YAML file and dotted overrides -> plain values, each with the place it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jdist.errors import ConfigError
from jdist.experiment.names import closest, nearest
from jdist.experiment.parse import Key, dotted, parse


@dataclass(frozen=True, kw_only=True)
class Document:
    """The values of a config before they are checked.

    Attributes:
        file: the config file, as it was given.
        values: nested dicts, lists and scalars.
        origins: for each key that was given, where: `configs/digits.yaml:12` or `override train.steps=500`.
        problems: what is wrong already, one line each.
    """

    file: str
    values: dict[str, Any]
    origins: dict[Key, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def origin(self, key: Key) -> str:
        """Where `key` was given, or the nearest key above it that was; the file if none was."""
        return next((self.origins[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.origins), self.file)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Read a config file and apply overrides; the schema is not looked at yet.

    Args:
        path: the YAML file.
        overrides: `key.path=value` each, the value written as in YAML; a later one wins.

    Returns:
        The values and where each came from. Problems that leave the rest readable (a key given twice, an
        override that does not fit) are listed in it, so that all problems can be reported together.

    Raises:
        ConfigError: the file cannot be read, or is no YAML mapping.

    Example:
        >>> load("configs/digits.yaml", ["train.steps=500"]).origins["train", "steps"]
        'override train.steps=500'
    """
    file = str(path)
    values, origins, problems = parse(_read(Path(path)), file)
    if values is None or not isinstance(values, dict):
        said = "is empty" if values is None else f"holds {type(values).__name__} {values!r:.60}"
        raise ConfigError(f"{file} {said}; a config is a mapping of keys to values, such as `name: digits`.")
    for text in overrides:
        problem = _override(values, origins, text)
        problems += [problem] if problem else []
    return Document(file=file, values=values, origins=origins, problems=tuple(problems))


def leaves(values: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every key path that holds no further mapping, with its value; an empty mapping is a value."""
    for key, value in values.items():
        path = (*prefix, str(key))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        there = {p.stem: str(p) for pattern in ("*.yaml", "*.yml") for p in sorted(path.parent.glob(pattern))}
        close = closest(path.stem, there)  # the folder and the ending are alike in all of them
        near = f" Did you mean {there[close]}?" if close else nearest("", there.values(), label="Files there")
        raise ConfigError(f"{path}: no such config file.{near}") from None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not a text file in UTF-8, so no YAML: {exc.reason}.") from exc
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}.") from exc


def _override(values: dict[str, Any], origins: dict[Key, str], text: str) -> str | None:
    """Apply one override in place; the problem with it, if there is one."""
    where = f"override {text}"
    name, equals, written = text.partition("=")
    path = tuple(name.split("."))
    if not equals or not all(part and part == part.strip() for part in path):
        return f"{where}: an override is KEY=VALUE with a dotted key, as in train.steps=500."
    if not written.strip():
        return f"{where}: no value after `=`. For no value write {name}=null, for empty text {name}=''."
    try:
        value, inner, problems = parse(written, where, line_numbers=False, within=path)
    except ConfigError as exc:
        return str(exc)
    if problems:
        return problems[0]
    level: Any = values
    for depth, part in enumerate(path[:-1], start=1):
        if level.get(part) is None:
            level[part] = {}
        if not isinstance(level[part], dict):
            held = path[:depth]
            place = next(origins[held[:n]] for n in range(len(held), 0, -1) if held[:n] in origins)
            return (
                f"{name}: {dotted(held)} holds the value {level[part]!r} ({place}), which has no keys "
                f"({where}). Override the whole of it: {dotted(held)}=... ."
            )
        level = level[part]
    level[path[-1]] = value
    for old in [key for key in origins if key[: len(path)] == path]:
        del origins[old]
    origins[path] = where
    origins.update(inner)
    return None
