"""A state that lives on parameter servers, as the user's program holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdist.global_arrays import is_key
from jdist.remote import RemoteTree
from jdist.static_leaves import unpack

PyTree = Any


class Job(Protocol):
    """Who knows where the state is; see `running.PsJob`."""

    def fetch(self, state: RemoteState) -> list[np.ndarray]: ...


class RemoteState(RemoteTree):
    """A state that lives on parameter servers; `strategy.fetch(state)` brings it here.

    It goes there with the first step that is given it: only a step tells which of its leaves are updated together. The
    servers have one state at a time; while another is there, this one waits here.

    Attributes:
        job: who knows where it is.
        treedef: its tree.
        leaves: the arrays that no server keeps, None in the place of the others; PRNG keys as their data.
    """

    def __init__(self, job: Job, tree: PyTree):
        """Takes in a state.

        Args:
            job: who will know where it is.
            tree: the state, on this host.
        """
        leaves, self.treedef = jax.tree.flatten(tree)
        self.job = job
        self._impls = [jax.random.key_impl(x) if is_key(x) else None for x in leaves]
        self._shapes = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in map(_with_dtype, leaves)]
        self.leaves: list[np.ndarray | None] = [
            np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in map(_with_dtype, leaves)
        ]

    @property
    def shapes(self) -> PyTree:
        """See `RemoteTree`."""
        return jax.tree.unflatten(self.treedef, self._shapes)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for states of one tree, shapes and dtypes."""
        return self.treedef, tuple((x.shape, x.dtype) for x in self._shapes)

    def fetch(self) -> PyTree:
        """See `RemoteTree`; waits for every step that was scheduled."""
        return unpack(jax.tree.unflatten(self.treedef, self._typed(self.job.fetch(self))))

    def _typed(self, leaves: Sequence[np.ndarray]) -> list[Any]:
        return [
            x if impl is None else jax.random.wrap_key_data(jnp.asarray(x), impl=impl)
            for x, impl in zip(leaves, self._impls, strict=True)
        ]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"this state lives on parameter servers, so `.{name}` is not here. Take `strategy.fetch(state).{name}`."
        )

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(
            f"this state lives on parameter servers, so `[{key!r}]` is not here. Take `strategy.fetch(state)[{key!r}]`."
        )

    def __repr__(self) -> str:
        return f"RemoteState({self.treedef!s:.80})"


def _with_dtype(x: Any) -> Any:
    """A Python number as the array that JAX makes of it."""
    return x if isinstance(x, jax.Array | np.ndarray) else np.asarray(x, jnp.result_type(x))
