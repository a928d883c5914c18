"""A YAML file and dotted overrides -> plain values, each with the place it came from; and back to YAML, with these places.

What YAML has and a config does not (tags, dates, aliases without end, values that its versions read differently) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jdist.errors import ConfigError
from jdist.support.signature import Key, dotted, leaves
from jdist.support.words import closest, nearest

# YAML 1.1 reads `010` as 8 and `1:30` as 90, YAML 1.2 reads 10 and text: such values get a tag of their own.
_AMBIGUOUS = "jdist:ambiguous"
RESOLVERS = (
    (
        _AMBIGUOUS,
        re.compile(r"^[-+]?(0[0-9_]+|[1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)$"),
        "-+0123456789",
    ),
    (  # `1e-3` is a number to everybody but YAML 1.1
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
        "-+.0123456789",
    ),
)
_STANDARD = "tag:yaml.org,2002:"
_TAGS = {_STANDARD + name for name in ("null", "bool", "int", "float", "str", "seq", "map")}
# Values that aliases and merges may repeat in one text: far more than a config needs, far fewer than hurt.
_MOST_REPEATED = 10_000


class _Loader(yaml.SafeLoader):
    """YAML as people write configs: `1e-3` is a number, a date stays text, and `<<` does not grow without bound."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_REPEATED:
            problem = f"merging gives a mapping of more than {_MOST_REPEATED:,} keys"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_Loader.yaml_implicit_resolvers = {
    first: [
        *((tag, pattern) for tag, pattern, firsts in RESOLVERS if first in firsts),
        *((tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":value"))),
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse(
    text: str, where: str, *, line_numbers: bool = True, within: Key = ()
) -> tuple[Any, dict[Key, str], list[str]]:
    """Reads YAML; returns values, each key's place, and problems that leave the rest readable."""
    # `where` names the text in messages. Places have line numbers (`configs/digits.yaml:12`) unless
    # `line_numbers` is false. `within` is the key that the text is the value of; empty for a full
    # file.
    try:
        loader = _Loader(text)
    except yaml.YAMLError as exc:  # a character that YAML does not allow, seen at once
        raise ConfigError(f"{where}: not valid YAML: {str(exc).splitlines()[0]}.") from exc
    reader = _Reader(loader, where, line_numbers)
    try:
        node = loader.get_single_node()
        values = None if node is None else reader.read(node, within, ())
    except ConfigError:  # a ValueError, too, which is caught below
        raise
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = f"{where}:{mark.line + 1}" if mark and line_numbers else where
        raise ConfigError(f"{line}: not valid YAML: {exc.problem or exc.context}.") from exc
    except (yaml.YAMLError, ValueError, OverflowError) as exc:  # such as an escape for an invalid character
        raise ConfigError(f"{where}: not valid YAML: {str(exc).splitlines()[0]}.") from exc
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be a config.") from None
    finally:
        loader.dispose()
    return values, reader.origins, reader.problems


class _Reader:
    """Builds the values of one text from its nodes; `above` are the nodes that a node lies in."""

    def __init__(self, loader: _Loader, where: str, line_numbers: bool) -> None:
        self.origins: dict[Key, str] = {}
        self.problems: list[str] = []
        self._loader, self._where, self._line_numbers = loader, where, line_numbers
        self._seen: set[yaml.Node] = set()
        self._repeated = 0

    def read(self, node: yaml.Node, path: Key, above: tuple[yaml.Node, ...]) -> Any:
        if node in above:
            raise ConfigError(f"{self._place(node)}: an alias that contains itself.")
        self._repeated += node in self._seen
        self._seen.add(node)
        if self._repeated > _MOST_REPEATED:
            raise ConfigError(
                f"{self._place(node)}: the aliases in the value that begins here stand for more than "
                f"{_MOST_REPEATED:,} values. Write the values out."
            )
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._check_tag(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, above)
        return [self.read(item, (*path, str(i)), (*above, node)) for i, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: Key, above: tuple[yaml.Node, ...]) -> dict[Any, Any]:
        first: dict[Any, yaml.Node] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{self._place(key_node)}: a key must be a name or a number, not a list or mapping.")
            if key_node.value in first and key_node.tag != f"{_STANDARD}merge":
                self.problems.append(
                    f"{dotted((*path, key_node.value))}: given twice ({self._place(first[key_node.value])} and "
                    f"{self._place(key_node)}). Keep one."
                )
            first.setdefault(key_node.value, key_node)
        self._loader.flatten_mapping(node)  # `<<: *anchor` becomes ordinary keys, before the node's own
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self._scalar(key_node, (*path, key_node.value))
            self.origins[*path, str(key)] = self._place(key_node)
            result[key] = self.read(value_node, (*path, str(key)), (*above, node))
        return result

    def _scalar(self, node: yaml.ScalarNode, path: Key) -> Any:
        if node.tag == _AMBIGUOUS:
            raise ConfigError(
                f"{dotted(path)}: {node.value} can be read in two ways ({self._place(node)}): to YAML 1.1 a 0 in front "
                f"means base 8, a colon base 60. Write a number in base 10; for text use quotes: '{node.value}'."
            )
        self._check_tag(node)
        try:
            return self._loader.construct_object(node)
        except (ValueError, KeyError) as exc:  # such as `!!int many` and `!!bool many`
            raise ConfigError(f"{self._place(node)}: {node.value!r:.60} cannot be read as {_tag(node)}.") from exc

    def _check_tag(self, node: yaml.Node) -> None:
        if node.tag not in _TAGS:
            raise ConfigError(
                f"{self._place(node)}: unknown tag {_tag(node)}; a config holds plain numbers, texts, lists "
                "and mappings. Leave it out, or put text that begins with an exclamation mark in quotes."
            )

    def _place(self, node: yaml.Node) -> str:
        return f"{self._where}:{node.start_mark.line + 1}" if self._line_numbers else self._where


def _tag(node: yaml.Node) -> str:
    """Returns the tag of a node as written."""
    return node.tag.replace(_STANDARD, "!!")


@dataclass(frozen=True, kw_only=True)
class Document:
    """The values of a config before they are checked."""

    file: str  # the config file, as given
    values: dict[str, Any]  # nested dicts, lists and scalars
    origins: dict[Key, str] = field(default_factory=dict)  # `configs/digits.yaml:12` or `override train.steps=500`
    problems: tuple[str, ...] = ()  # what is wrong already, one line each

    def origin(self, key: Key) -> str:
        """Names the place of `key`, or of the nearest key below or above it that was given; the file if none was."""
        if key not in self.origins and (below := [k for k in self.origins if k[: len(key)] == key]):
            return self.origins[below[0]]  # an override has made this level
        return next((self.origins[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.origins), self.file)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Reads a config and applies overrides (`key.path=value`, later ones win), unchecked."""
    # Problems that leave the rest readable (a key given twice, an override that does not fit) go
    # into the document, so that all problems are reported together.
    file = str(path)
    values, origins, problems = parse(_read(Path(path)), file)
    if values is None or not isinstance(values, dict):
        content = "is empty" if values is None else f"holds {type(values).__name__} {values!r:.60}"
        raise ConfigError(f"{file} {content}; a config is a mapping of keys to values, such as `name: digits`.")
    for text in overrides:
        problem = _override(values, origins, text)
        problems += [problem] if problem else []
    return Document(file=file, values=values, origins=origins, problems=tuple(problems))


def differences(
    there: Mapping[str, Any], here: Mapping[str, Any], *, missing: Any = None
) -> dict[Key, tuple[Any, Any]]:
    """Finds the leaves in which two mappings differ, with both values; "not set" for one that is missing."""
    # A missing leaf counts as equal to one that holds `missing`.
    a, b = dict(leaves(there)), dict(leaves(here))
    different = [key for key in {**b, **a} if a.get(key, missing) != b.get(key, missing)]
    return {key: (a.get(key, "not set"), b.get(key, "not set")) for key in different}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        configs = {p.stem: str(p) for pattern in ("*.yaml", "*.yml") for p in sorted(path.parent.glob(pattern))}
        close = closest(path.stem, configs)  # the folder and the ending are alike in all of them
        remedy = f" Did you mean {configs[close]}?" if close else nearest("", configs.values(), label="Files there")
        raise ConfigError(f"{path}: no such config file.{remedy}") from None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not a text file in UTF-8, so not YAML: {exc.reason}.") from exc
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}.") from exc


def _override(values: dict[str, Any], origins: dict[Key, str], text: str) -> str | None:
    """Applies one override in place; returns the problem with it, if there is one."""
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


class _OneLine(yaml.SafeDumper):
    """A dumper that escapes line breaks, writes out what occurs twice, and quotes text that `load` would read otherwise."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _resolved, _pattern, _firsts in RESOLVERS:
    _OneLine.add_implicit_resolver(_resolved, _pattern, list(_firsts))

_OneLine.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


def describe(values: Mapping[str, Any], document: Document, *, derived: Mapping[Key, str] | None = None) -> str:
    """Writes a config as YAML, each line ending in a comment with the origin of its value."""
    # `derived` gives the origin of each value that follows from others.
    lines = list(_lines(values, (), document, derived or {}))
    width = min(60, max(len(text) for text, origin in lines if origin))
    return "".join(f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def _lines(
    values: Mapping[str, Any], above: Key, document: Document, derived: Mapping[Key, str]
) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        key = (*above, str(name))
        indent = "  " * len(above)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{flow(name)}:", ""
            yield from _lines(value, key, document, derived)
        else:
            yield f"{indent}{flow(name)}: {flow(value)}", derived.get(key) or _origin(key, document)


def _origin(key: Key, document: Document) -> str:
    """Finds a value's own origin; within a list or mapping given as a whole, that of the whole."""
    origin = next((key[:n] for n in range(len(key), 0, -1) if key[:n] in document.origins), None)
    if origin is None or (origin != key and isinstance(_at(document.values, origin), Mapping)):
        return "default"
    return document.origins[origin]


def _at(values: Any, key: Key) -> Any:
    for part in key:
        values = values[part] if part in values else values[int(part)]
    return values


def flow(value: Any) -> str:
    """Writes a value on one line of YAML."""
    text = str(yaml.dump(value, Dumper=_OneLine, default_flow_style=True, width=float("inf"), allow_unicode=True))
    return text.removesuffix("\n").removesuffix("\n...").strip()
