"""A YAML file and dotted overrides -> plain values, each with the place it came from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jdist.errors import ConfigError
from jdist.experiment.names import nearest

Key = tuple[str, ...]


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


class _Loader(yaml.SafeLoader):
    """YAML as people write configs: `1e-3` is a number (YAML 1.1 reads text), a date stays text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


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
    values, origins, problems = _parse(_read(Path(path)), file)
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
        folder = path.parent
        there = [str(p) for pattern in ("*.yaml", "*.yml") for p in sorted(folder.glob(pattern))]
        raise ConfigError(f"{path}: no such config file.{nearest(str(path), there, label='Files there')}") from None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not a text file in UTF-8, so no YAML: {exc.reason}.") from exc
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}.") from exc


def _parse(text: str, where: str, line_numbers: bool = True) -> tuple[Any, dict[Key, str], list[str]]:
    """Values, origins and problems of one YAML text; `where` names it."""
    origins: dict[Key, str] = {}
    problems: list[str] = []
    try:
        loader = _Loader(text)
    except yaml.YAMLError as exc:  # a character that YAML does not allow, seen at once
        raise ConfigError(f"{where}: no valid YAML: {str(exc).splitlines()[0]}.") from exc

    def place(node: yaml.Node) -> str:
        return f"{where}:{node.start_mark.line + 1}" if line_numbers else where

    def value_of(node: yaml.Node, path: Key, above: tuple[yaml.Node, ...]) -> Any:
        if node in above:
            raise ConfigError(f"{place(node)}: an alias that contains itself.")
        if isinstance(node, yaml.SequenceNode):
            return [value_of(item, (*path, str(i)), (*above, node)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return mapping_of(node, path, above)
        return loader.construct_object(node, deep=True)

    def mapping_of(node: yaml.MappingNode, path: Key, above: tuple[yaml.Node, ...]) -> dict[Any, Any]:
        first: dict[Any, yaml.Node] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{place(key_node)}: a key must be a name or a number, not a list or mapping.")
            if key_node.value in first and key_node.tag != "tag:yaml.org,2002:merge":
                problems.append(
                    f"{dotted((*path, key_node.value))}: given twice ({place(first[key_node.value])} and "
                    f"{place(key_node)}). Keep one."
                )
            first.setdefault(key_node.value, key_node)
        loader.flatten_mapping(node)  # `<<: *anchor` becomes ordinary keys, before the node's own
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node)
            origins[*path, str(key)] = place(key_node)
            result[key] = value_of(value_node, (*path, str(key)), (*above, node))
        return result

    try:
        node = loader.get_single_node()
        return (None if node is None else value_of(node, (), ())), origins, problems
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = f"{where}:{mark.line + 1}" if mark and line_numbers else where
        raise ConfigError(f"{line}: no valid YAML: {exc.problem or exc.context}.") from exc
    except (yaml.YAMLError, ValueError) as exc:
        raise ConfigError(f"{where}: no valid YAML: {str(exc).splitlines()[0]}.") from exc
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be a config.") from None
    finally:
        loader.dispose()


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
        value, inner, problems = _parse(written, where, line_numbers=False)
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
    origins.update({(*path, *key): where for key in inner})
    return None


def dotted(key: Key) -> str:
    """`("train", "steps")` as it is written in an override: `train.steps`."""
    return ".".join(key)
