"""A tree whose arrays are not in this process."""

from __future__ import annotations

import abc
from typing import Any

import jax

PyTree = Any


class RemoteTree(abc.ABC):
    """Stands for a tree of arrays that other processes keep; what saves or reads trees asks for them by this."""

    @property
    @abc.abstractmethod
    def shapes(self) -> PyTree:
        """The tree, with a `jax.ShapeDtypeStruct` in the place of each array."""

    @abc.abstractmethod
    def fetch(self) -> PyTree:
        """The tree, with arrays on this process's host."""


def fetched(tree: PyTree) -> PyTree:
    """The tree, with each `RemoteTree` in it brought here."""
    return jax.tree.map(lambda x: x.fetch() if isinstance(x, RemoteTree) else x, tree)


def shapes_of(tree: PyTree) -> PyTree:
    """The tree, with its shapes in the place of each `RemoteTree` in it."""
    return jax.tree.map(lambda x: x.shapes if isinstance(x, RemoteTree) else x, tree)
