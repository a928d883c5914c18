"""Leaves of a state that are no arrays, such as a model's activation function: constants of the step, kept in the tree.

Inside of jdist each of them is a `StaticLeaf`, a node without children: it belongs to the structure of the state, of which
a compiled program depends and which a step has to return as it was. States as users see them hold the values themselves.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from jdist.errors import StepError

PyTree = Any
# What an `equinox.Module` may hold as a constant, as under `equinox.filter_jit`; elsewhere a number is an array.
_CONSTANTS = (bool, int, float, complex, str, bytes, enum.Enum, np.dtype)


@jax.tree_util.register_static
@dataclass(frozen=True)
class StaticLeaf:
    """A leaf that is no array.

    Attributes:
        value: what the user's tree has in this place.
        type: its type, as 1, 1.0 and True are equal.
    """

    value: Hashable
    type: type

    def __repr__(self) -> str:
        return f"{self.type.__name__} {self.value!r:.60}"


def is_static(node: object) -> bool:
    """Whether `node` is a `StaticLeaf`, for use as `is_leaf`."""
    return isinstance(node, StaticLeaf)


def pack(tree: PyTree) -> PyTree:
    """Makes the leaves of a user's tree that are constants part of its structure.

    Constants are functions and classes anywhere, an optimiser as a whole, and in an `equinox.Module` also numbers and
    text. All other leaves, allowed or not, stay as they are.

    Args:
        tree: any pytree.

    Returns:
        The tree with a `StaticLeaf` in the place of each constant; `tree` itself if it has none.

    Raises:
        StepError: a constant cannot be hashed.
    """
    constants_found: list[Any] = []

    def static(path: Any, leaf: Any, constants: tuple[type, ...]) -> Any:
        if not (isinstance(leaf, (optax.GradientTransformation, *constants)) or _is_function(leaf)):
            return leaf
        try:
            hash(leaf)
        except TypeError as exc:
            raise StepError(
                f"state leaf {jax.tree_util.keystr(path) or 'itself'} is a {type(leaf).__name__} that cannot be hashed: {exc}. "
                "What is no array in a state is a constant of the step, by which programs are told apart; give its class "
                "a `__hash__`, or keep it out of the state."
            ) from exc
        constants_found.append(leaf)
        return StaticLeaf(leaf, type(leaf))

    def packed(path: Any, node: Any) -> Any:
        if not _is_module(node):
            return static(path, node, ())
        return jax.tree.map_with_path(
            lambda rest, leaf: static((*path, *rest), leaf, _CONSTANTS), node, is_leaf=_is_optimizer
        )

    result = jax.tree.map_with_path(packed, tree, is_leaf=lambda x: _is_module(x) or _is_optimizer(x))
    return result if constants_found else tree


def unpack(tree: PyTree) -> PyTree:
    """Undoes `pack`."""
    return jax.tree.map(lambda x: x.value if is_static(x) else x, tree, is_leaf=is_static) if has_static(tree) else tree


def has_static(tree: PyTree) -> bool:
    """Whether a tree has a `StaticLeaf`."""
    return any(map(is_static, jax.tree.leaves(tree, is_leaf=is_static)))


def with_static_leaves(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step as jdist calls it: takes and returns packed trees."""

    @functools.wraps(step)
    def packed(*args: Any, **kwargs: Any) -> Any:
        return pack(step(*map(unpack, args), **{name: unpack(x) for name, x in kwargs.items()}))

    return packed


def _is_function(leaf: Any) -> bool:
    return callable(leaf) and not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _is_optimizer(node: Any) -> bool:
    return isinstance(node, optax.GradientTransformation)


def _is_module(node: Any) -> bool:
    equinox = sys.modules.get("equinox")  # imported by whoever has such a state
    return equinox is not None and isinstance(node, equinox.Module)
