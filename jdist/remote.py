"""A tree whose arrays are not in this process."""

from __future__ import annotations

import abc
from typing import Any

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
    """The tree itself, brought here if it is a `RemoteTree`."""
    return tree.fetch() if isinstance(tree, RemoteTree) else tree


def shapes_of(tree: PyTree) -> PyTree:
    """The tree itself, or the shapes of a `RemoteTree`."""
    return tree.shapes if isinstance(tree, RemoteTree) else tree
