"""The axes of a state's leaves that are divided over the devices of a replica: by rules over paths, or by flax's metadata."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.layout import axes_of, names_in
from jdist.core.sharded_leaf import is_sharded_leaf
from jdist.errors import StepError
from jdist.support.leaves import join_path, matches_path, nearest_path
from jdist.typing import PyTree

Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file
_SHARDINGS = ("out_sharding", "sharding_names", "sharding")  # of a variable of nnx, in flax's versions


@dataclass(frozen=True)
class Rule:
    """Divides the leaves at paths that it matches over mesh axes inside a replica."""

    # a regular expression for the end of a path, from a node's name on; None: flax's metadata
    pattern: str | None
    # for each axis of the leaf a mesh axis, several, or None; it may end early
    axes: tuple[Any, ...]

    def matches(self, path: str) -> bool:
        """Returns whether a leaf at this path is divided so."""
        return self.pattern is not None and matches_path(self.pattern, path)

    def says_as(self, other: Rule) -> bool:
        """Returns whether another rule divides the same axes: what it ends with, None, does not count."""
        pairs = itertools.zip_longest(self.axes, other.axes)
        return all(names_in(a) == names_in(b) for a, b in pairs)

    def __str__(self) -> str:
        axes = f"({', '.join(map(repr, self.axes))}{',' * (len(self.axes) == 1)})"
        return f"flax's metadata {axes}" if self.pattern is None else f"({self.pattern!r}, {axes})"


def rules_of(
    strategy: Strategy, state: PyTree, is_of_optimizer: Sequence[bool], *, is_all: bool = True
) -> list[Rule | None]:
    """Finds the rule of each leaf of a state, if it has one; refuses rules that do not fit."""
    # In an optimiser's state a rule applies to leaves with the shape of a parameter that it
    # divides, and not to sums over rows or columns. Unless the state `is_all` that a step has, a
    # rule may match nothing.
    if not strategy.model_axes:
        return [None] * len(is_of_optimizer)
    leaves = list(_leaves(strategy, state))
    found: list[Rule | None] = []
    used = set[Rule]()
    for path, _, noted in leaves:
        matching = [rule for rule in strategy.parts.rules if rule.matches(path)]
        used.update(matching)
        matching += [noted] if noted is not None and all(not noted.says_as(rule) for rule in matching) else []
        if len(matching) > 1:
            raise StepError(
                f"two rules divide the leaf {path}: {matching[0]} and {matching[1]}. Change the patterns so that only "
                "one matches it, or leave one out."
            )
        found.append(matching[0] if matching else None)
    own = [path for (path, _, _), of_optimizer in zip(leaves, is_of_optimizer, strict=True) if not of_optimizer]
    paths = own or [path for path, _, _ in leaves]
    unused = [rule for rule in strategy.parts.rules if rule not in used]
    if unused and is_all:
        rule = unused[0]
        raise StepError(
            f"the rule {rule} matches no leaf of the state. The nearest path is {_nearest(rule, paths)!r}; a pattern is "
            'a regular expression for the end of a path, from the name of a node on, such as "mlp/up/kernel".'
        )
    if is_all and not any(found) and _num_devices(strategy, strategy.model_axes) > 1:
        raise StepError(
            f"the mesh has {_described(strategy)} inside a replica, and no leaf of the state is divided over it: give `rules`, "
            f"or flax's metadata (`nn.with_partitioning`). The first path is {paths[0] if paths else '-'!r}."
        )
    shapes: dict[Rule, set[tuple[int, ...]]] = {}
    for (path, shape, _), rule, of_optimizer in zip(leaves, found, is_of_optimizer, strict=True):
        if rule is not None and not of_optimizer:
            _check_divides(strategy, path, shape, rule)
            shapes.setdefault(rule, set()).add(shape)
    return [
        None if of_optimizer and rule is not None and not _fits(strategy, shape, rule, shapes.get(rule)) else rule
        for (_, shape, _), rule, of_optimizer in zip(leaves, found, is_of_optimizer, strict=True)
    ]


def _nearest(rule: Rule, paths: Sequence[str]) -> str | None:
    """Finds the path with the end nearest to a rule's pattern."""
    assert rule.pattern is not None
    return nearest_path(rule.pattern, paths)


def _fits(strategy: Strategy, shape: tuple[int, ...], rule: Rule, shapes: set[tuple[int, ...]] | None) -> bool:
    """Returns whether a leaf of an optimiser's state is divided by a rule: as a parameter of that shape, if there are any."""
    return shape in shapes if shapes else _undivided(strategy, shape, rule) is None


def _check_divides(strategy: Strategy, path: str, shape: tuple[int, ...], rule: Rule) -> None:
    if len(rule.axes) > len(shape):
        raise StepError(
            f"the rule {rule} has {len(rule.axes)} entries, and the leaf {path} has {len(shape)} axes: its shape is "
            f"{list(shape)}. Give at most one entry for each axis."
        )
    axis = _undivided(strategy, shape, rule)
    if axis is not None:
        raise StepError(
            f"the rule {rule} divides axis {axis} of the leaf {path} among {_num_devices(strategy, rule.axes[axis])} devices, "
            f"and that axis has {shape[axis]} elements: the shape is {list(shape)}, the mesh axes are {_described(strategy)}. "
            "Divide another axis, or change one of the sizes."
        )


def _undivided(strategy: Strategy, shape: tuple[int, ...], rule: Rule) -> int | None:
    """Finds the first axis of an array that a rule does not divide; None where it divides them all."""
    if len(rule.axes) > len(shape):
        return len(shape)
    sizes = [1 if entry is None else _num_devices(strategy, entry) for entry in rule.axes]
    return next((i for i, (length, n) in enumerate(zip(shape, sizes, strict=False)) if length % n), None)


def _num_devices(strategy: Strategy, entry: Any) -> int:
    return math.prod(strategy.mesh.shape[name] for name in names_in(entry))


def _described(strategy: Strategy) -> str:
    return " x ".join(f"{axis}={strategy.mesh.shape[axis]}" for axis in strategy.model_axes)


def _leaves(strategy: Strategy, state: PyTree) -> Iterator[tuple[str, tuple[int, ...], Rule | None]]:
    """Lists the leaves of a state: path, shape, and the rule that flax's metadata is."""
    for prefix, node in jax.tree.leaves_with_path(state, is_leaf=lambda x: is_sharded_leaf(x) or _is_noted(x)):
        noted = _noted_axes(node) if _is_noted(node) else None
        inner = jax.tree.leaves_with_path(node, is_leaf=is_sharded_leaf)
        for path, x in inner:
            shape = tuple(x.shape if hasattr(x, "shape") else jnp.shape(x))
            # The value in a box of flax's, or of a variable of nnx, is called as that.
            keys = prefix if len(inner) == 1 and _is_noted(node) else (*prefix, *path)
            rule = None if noted is None else _as_rule(strategy, join_path(keys), noted)
            yield join_path(keys), shape, rule


def _is_noted(node: Any) -> bool:
    """Returns whether a node is a box of flax's linen, or a variable of nnx."""
    return (hasattr(node, "unbox") and hasattr(node, "names")) or hasattr(node, "get_metadata")


def _noted_axes(node: Any) -> tuple[Any, ...] | None:
    """Reads the axes that flax's metadata name; logical names are translated where the node or the context has rules."""
    if hasattr(node, "unbox"):
        names, rules = node.names, getattr(node, "rules", None)
    else:
        metadata = node.get_metadata()
        names = next((metadata[key] for key in _SHARDINGS if metadata.get(key) is not None), None)
        rules = metadata.get("sharding_rules")
    if names is None:
        return None
    if hasattr(node, "rules") or rules:
        from flax.linen.spmd import logical_to_mesh_axes

        translated = logical_to_mesh_axes(tuple(names), rules)
        names = names if translated is None else tuple(translated)
    return tuple(names)


def _as_rule(strategy: Strategy, path: str, axes: tuple[Any, ...]) -> Rule | None:
    """Makes a rule of flax's metadata; what they say of the replicas' axes is jdist's own matter."""
    for name in axes_of(axes):
        if name not in strategy.mesh.shape:
            raise StepError(
                f"flax's metadata of the leaf {path} name the axis {name!r}, which the mesh does not have: it has "
                f"{', '.join(strategy.mesh.shape)}. Name one of these; logical names need rules that translate them "
                "(`nn.with_logical_partitioning(..., rules=...)`)."
            )
    model = [tuple(name for name in names_in(entry) if name in strategy.model_axes) for entry in axes]
    entries = [names[0] if len(names) == 1 else names or None for names in model]
    return Rule(None, tuple(entries)) if any(entries) else None
