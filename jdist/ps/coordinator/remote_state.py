"""Handles of states that live on parameter servers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdist.core.remote import RemoteTree
from jdist.core.state_report import StateReport
from jdist.core.step_state import unpack
from jdist.support.arrays import is_key
from jdist.support.leaves import leaves_of, table_of
from jdist.typing import PyTree


class Job(Protocol):
    """The keeper of a state's whereabouts: `session.Session`."""

    def fetch(self, state: RemoteState) -> list[np.ndarray]: ...

    def show(self, state: RemoteState | None) -> StateReport: ...


class OnServers(RemoteTree):
    """A tree that lives on parameter servers; `strategy.fetch` brings it here."""

    def _repr_html_(self) -> str:
        leaves = [dataclasses.replace(leaf, kept="on the parameter servers") for leaf in leaves_of(self.shapes)]
        return table_of(leaves, type(self).__name__)._repr_html_()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"this state lives on parameter servers, so `.{name}` is not here. Take `strategy.fetch(state).{name}` to "
            'read it; to change a value in it, such as a learning rate, pass the new one to a step as a "replicated" argument.'
        )

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(
            f"this state lives on parameter servers, so `[{key!r}]` is not here. Take `strategy.fetch(state)[{key!r}]`."
        )


class RemoteState(OnServers):
    """A state that lives on parameter servers; `strategy.fetch(state)` brings it here.

    It goes there with the first step that is given it: only a step tells which of its leaves are updated together. The
    servers have one state at a time; while another is there, this one waits here. One that is a tuple can be taken apart,
    `params, opt_state = state`, for a step of several states.
    """

    def __init__(self, job: Job, tree: PyTree):
        """Takes in a state that is on this host; `job` will know where it is."""
        # The part of another state that it has become, when a step was given it together with others.
        self.joined: RemotePart | None = None
        leaves, self.treedef = jax.tree.flatten(tree)
        self.job = job
        self._impls = [jax.random.key_impl(x) if is_key(x) else None for x in leaves]
        self._shapes = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in map(_with_dtype, leaves)]
        # The arrays that no server keeps, None in place of the others; PRNG keys as their data.
        self.leaves: list[np.ndarray | None] = [
            np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in map(_with_dtype, leaves)
        ]

    @property
    def shapes(self) -> PyTree:
        return jax.tree.unflatten(self.treedef, self._shapes)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for states of one tree, shapes and dtypes."""
        return self.treedef, tuple((x.shape, x.dtype) for x in self._shapes)

    def fetch(self) -> PyTree:
        """See `RemoteTree`; waits for every step that was scheduled."""
        if self.joined is not None:
            return self.joined.fetch()
        return unpack(jax.tree.unflatten(self.treedef, self._typed(self.job.fetch(self))))

    def show(self) -> StateReport:
        return self.joined.show() if self.joined is not None else self.job.show(self)

    def _typed(self, leaves: Sequence[np.ndarray]) -> list[Any]:
        return [
            x if impl is None else jax.random.wrap_key_data(jnp.asarray(x), impl=impl)
            for x, impl in zip(leaves, self._impls, strict=True)
        ]

    def __iter__(self) -> Iterator[RemotePart]:
        return iter(self.parts)

    @functools.cached_property
    def parts(self) -> tuple[RemotePart, ...]:
        """Handles of the states that a tuple is made of; raises TypeError for any other state."""
        if type(self.shapes) is not tuple:
            raise TypeError(
                f"this state lives on parameter servers and is a {type(self.shapes).__name__}, not a tuple of states. "
                "Make it by `strategy.init(lambda: (params, opt_state))`; to read it, `strategy.fetch(state)`."
            )
        return tuple(RemotePart(self, i) for i in range(len(self.shapes)))

    def __repr__(self) -> str:
        return f"RemoteState({self.treedef!s:.80})"


class RemotePart(OnServers):
    """One of several states that live on parameter servers together."""

    def __init__(self, whole: RemoteState, index: int):
        self.whole, self.index = whole, index

    @property
    def shapes(self) -> PyTree:
        return self.whole.shapes[self.index]

    def fetch(self) -> PyTree:
        """See `RemoteTree`; waits for every step that was scheduled."""
        return self.whole.fetch()[self.index]

    def show(self) -> StateReport:
        """See `RemoteTree`: the states that are on servers together."""
        return self.whole.show()

    def __repr__(self) -> str:
        return f"RemotePart({self.index} of {self.whole!r})"


def _with_dtype(x: Any) -> Any:
    """Makes of a Python number the array that JAX would make of it."""
    return x if isinstance(x, jax.Array | np.ndarray) else np.asarray(x, jnp.result_type(x))
