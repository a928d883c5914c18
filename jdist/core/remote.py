"""Interfaces to other processes: trees with arrays that they hold, and a coordinator that schedules functions on them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax

from jdist.typing import PyTree

if TYPE_CHECKING:
    from jdist.core.state_report import StateReport


class RemoteTree(abc.ABC):
    """A tree of arrays that other processes keep; what saves or reads trees asks for them by this."""

    @property
    @abc.abstractmethod
    def shapes(self) -> PyTree:
        """The tree, with a `jax.ShapeDtypeStruct` in place of each array."""

    @abc.abstractmethod
    def fetch(self) -> PyTree:
        """Fetches the tree, with arrays on this process's host."""

    @abc.abstractmethod
    def show(self) -> StateReport:
        """Shows which process holds which part of it: `jdist.show`."""


class Coordinator(Protocol):
    """An interface to the workers of a parameter server, which `jdist.ps.ClusterCoordinator` implements and describes."""

    def schedule(
        self, fn: Callable[..., PyTree], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> PyTree: ...
    def create_per_worker_dataset(
        self,
        fn: Callable[..., Any] | str,
        *,
        partial: Literal["pad", "drop", "error"] = "pad",
        with_mask: bool = False,
        prefetch: int = 2,
    ) -> Iterable[Any]: ...
    def join(self, timeout_s: float | None = None) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def local_workers(self) -> tuple[int, ...]: ...
    def fetch(self, tree: PyTree) -> PyTree: ...
    def close(self) -> None: ...


def fetched(tree: PyTree) -> PyTree:
    """Fetches each `RemoteTree` in a tree."""
    return jax.tree.map(lambda x: x.fetch() if isinstance(x, RemoteTree) else x, tree)


def shapes_of(tree: PyTree) -> PyTree:
    """Replaces each `RemoteTree` in a tree by its shapes."""
    return jax.tree.map(lambda x: x.shapes if isinstance(x, RemoteTree) else x, tree)
