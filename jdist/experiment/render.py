"""A checked config as text: valid YAML, each line with the origin of its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from jdist.experiment.load import RESOLVERS, Document, Key


class _OneLine(yaml.SafeDumper):
    """A dumper that escapes line breaks, writes out what occurs twice, and quotes text that `load` would read otherwise."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _firsts in RESOLVERS:
    _OneLine.add_implicit_resolver(_tag, _pattern, list(_firsts))

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
