"""Rules that say which tensor of a file is which leaf of a tree, in both directions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jdist.errors import CheckpointError
from jdist.weights.axes import Axes, View, infer_sizes

_FIELD = re.compile(r"\{([^\W\d]\w*)\}")
_OPTION = re.compile(r"\[([^\[\]]*)\]")
_FORM = (
    "a rule is (tensor, path), (tensor, path, axes) or (tensor, path, axes, numbers), such as "
    '("h.{layer}.mlp.c_fc.weight", "h_{layer}/mlp/c_fc/kernel", "out in -> in out"); (tensor, None) is of a tensor to leave out'
)
# As users write them: plain tuples, or lists out of a config file.
Rules = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Source:
    """Tensors that hold the same part of a leaf, or all of it."""

    names: tuple[str, ...]  # of the tensors; a save writes the first
    axes: Axes  # of tensor and leaf
    sizes: Mapping[str, int]  # of factors, as far as rule and leaf determine them
    index: Mapping[str, int]  # of each axis that only one side has

    @property
    def part(self) -> frozenset[tuple[str, int]]:
        """Names the part of the leaf."""
        return frozenset((name, i) for name, i in self.index.items() if name in self.axes.of_leaf)

    def view(self, tensor_shape: Sequence[int]) -> View | None:
        """Makes the view of a tensor of this shape; None where it does not fit."""
        sizes = dict(self.sizes)
        fits = infer_sizes(self.axes.tensor, tensor_shape, sizes)
        fits = fits and all(i < sizes[name] for name, i in self.index.items())
        return View(self.axes, sizes, self.index) if fits else None


class Rule:
    """A rule, read."""

    def __init__(self, rule: Any):
        is_plain = isinstance(rule, Sequence) and not isinstance(rule, str) and 2 <= len(rule) <= 4
        values: list[Any] = [*rule, None, None][:4] if is_plain else [None] * 4
        tensor, path, axes, numbers = values
        is_right = isinstance(tensor, str) and isinstance(path, str | None) and isinstance(axes, str | None)
        is_right = is_right and (numbers is None or _are_numbers(numbers))
        if not is_right:
            raise CheckpointError(f"`rules`: {rule!r:.120}: {_FORM}")
        self.tensor: str = tensor
        self.path: str | None = path
        for template in (tensor, path or ""):
            if left := re.search(r"[\[\]{}]", _OPTION.sub(r"\1", _FIELD.sub("", template))):
                raise CheckpointError(
                    f"`rules`: {rule!r:.120}: {left[0]!r} in {template!r} belongs to no {{field}} and no [option]; {_FORM}"
                )
        self.axes = Axes.parse(axes) if axes else None
        self.numbers: Mapping[str, int] = numbers or {}
        known = () if self.axes is None else {*self.axes.of_tensor, *self.axes.of_leaf}
        if unknown := [name for name in self.numbers if name not in known]:
            raise CheckpointError(f"`rules`: {rule!r:.120}: {unknown[0]!r} has a number but is not an axis; {_FORM}")
        self._names = re.compile(_as_pattern(tensor))
        self._paths = None if path is None else re.compile(rf"(?:.*/)?{_as_pattern(path)}")

    def path_of(self, name: str) -> str | None:
        """Returns where a tensor of this name goes: "" for nowhere, None if the rule is not for it."""
        match = self._names.fullmatch(name)
        if match is None:
            return None
        return "" if self.path is None else _filled(self.path, match.groupdict())

    def fields(self, path: str) -> dict[str, str] | None:
        """Returns the fields of a leaf's path; None if the rule is not for it."""
        match = None if self._paths is None else self._paths.fullmatch(path)
        return None if match is None else match.groupdict()

    def index(self, axes: Axes, fields: Mapping[str, str]) -> dict[str, int]:
        """Returns the indices of the axes that one side alone has, as far as numbers or fields of the path say them."""
        named = {name: int(fields[name]) for name in axes.one_sided if fields.get(name, "").isdigit()}
        return named | {name: i for name, i in self.numbers.items() if name in axes.one_sided}

    def sources(
        self, path: str, shape: Sequence[int], fields: Mapping[str, str], lengths: Mapping[str, int]
    ) -> Iterator[Source]:
        """Lists a leaf's tensors; `lengths` are those of axes that several rules share."""
        axes = self.axes or Axes.same(len(shape))
        index = self.index(axes, fields)
        # A field of the tensor's name that is an axis of the leaf counts along it: a stack of layers.
        stacked = [name for name in dict.fromkeys(_FIELD.findall(self.tensor)) if name not in fields]
        unknown = sorted(axes.one_sided - index.keys() - {name for name in stacked if name in axes.of_leaf})
        if unknown or any(name not in axes.of_leaf for name in stacked):
            raise CheckpointError(
                f"`rules`: {self}: {', '.join(unknown or stacked)} is on one side only; give its index, as in "
                '("qkv.weight", "query/kernel", "in (qkv out) -> in out", {"qkv": 0}), or name a field so: "h.{layer}.weight"'
            )
        sizes = {name: size for name, size in self.numbers.items() if name not in axes.one_sided}
        sizes |= {name: size for name, size in lengths.items() if name in axes.of_leaf and name in axes.one_sided}
        if not infer_sizes(axes.leaf, shape, sizes):
            raise CheckpointError(f"leaf {path}: its shape {list(shape)} does not fit the axes of the rule {self}")
        for numbers in itertools.product(*(range(sizes[name]) for name in stacked)):
            counted = dict(zip(stacked, numbers, strict=True))
            filled = {**fields, **{name: str(i) for name, i in counted.items()}}
            names = tuple(_filled(name, filled) for name in _options(self.tensor))
            yield Source(names, axes, sizes, {**index, **counted})

    def __str__(self) -> str:
        axes = () if self.axes is None else (self.axes.text,)
        return repr((self.tensor, self.path, *axes, *([dict(self.numbers)] if self.numbers else [])))


def parse_rules(rules: Rules) -> list[Rule]:
    """Reads rules; raises a `CheckpointError` for invalid ones."""
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise CheckpointError(f"`rules` is {rules!r:.80}: it must be a list of rules; {_FORM}")
    return [Rule(rule) for rule in rules]


def sources_of(rules: Sequence[Rule] | None, path: str, shape: Sequence[int]) -> list[list[Source]]:
    """Lists a leaf's tensors by its parts; those of one part are alternatives."""
    # Without rules, a tensor has the name of its leaf, with "." between the names.
    if rules is None:
        return [[Source((path.replace("/", "."),), Axes.same(len(shape)), _sizes(shape), {})]]
    matching = [(rule, fields) for rule in rules if (fields := rule.fields(path)) is not None]
    indices: dict[str, set[int]] = {}
    for rule, fields in matching:
        for name, i in (rule.index(rule.axes, fields) if rule.axes else {}).items():
            indices.setdefault(name, set()).add(i)
    lengths = {name: len(each) for name, each in indices.items()}
    parts: dict[frozenset[tuple[str, int]], list[Source]] = {}
    for rule, fields in matching:
        for source in rule.sources(path, shape, fields, lengths):
            parts.setdefault(source.part, []).append(source)
    return list(parts.values())


def _sizes(shape: Sequence[int]) -> dict[str, int]:
    return {f"axis{i}": size for i, size in enumerate(shape)}


def _are_numbers(numbers: Any) -> bool:
    return isinstance(numbers, Mapping) and all(type(number) is int and number >= 0 for number in numbers.values())


def _as_pattern(template: str) -> str:
    """Makes a regular expression of a name with `{fields}` and `[options]`."""
    seen = set[str]()

    def field(match: re.Match[str]) -> str:
        name = match[1]
        again = name in seen
        seen.add(name)
        return f"(?P={name})" if again else f"(?P<{name}>[^./]+)"

    pattern = re.sub(r"\\\{([^\W\d]\w*)\\\}", field, re.escape(template))
    return re.sub(r"\\\[(.*?)\\\]", r"(?:\1)?", pattern)


def _options(template: str) -> list[str]:
    """Writes out what is optional in a name: with it, and without."""
    names = [template]
    while any(_OPTION.search(name) for name in names):
        names = [_OPTION.sub(to, name, count=1) for to in (r"\1", "") for name in names]
    return names


def _filled(template: str, fields: Mapping[str, str | None]) -> str:
    return _FIELD.sub(lambda match: fields.get(match[1]) or match[0], template)
