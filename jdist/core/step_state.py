"""A step's state: what steps add to the user's from call to call, and leaves of the user's that are not arrays.

Such a leaf, a model's activation function for example, is a constant of the step. Inside of jdist it is a `StaticLeaf`, a
node without children: it belongs to the structure of the state, by which programs are told apart and which a step has to
return as it was. States as users see them hold the values themselves.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from jdist.errors import StepError
from jdist.typing import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The loss scale that is carried from step to step; the same on every replica."""

    scale: Any  # factor of the loss before it is differentiated; float32 scalar, a power of two
    good_steps: Any  # steps in a row with finite gradients since the last change; int32 scalar
    num_skipped: Any  # steps left out since the scale began; int32 scalar


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepState:
    """A user's state, and what steps carry with it from call to call.

    A step in `jdist.precision("fp16")` and one with a compressed all-reduce return their state so; the step function
    itself sees only `user`. Pass it on whole, and save it whole. Fields and items of the user's state can be read as if they
    were its own. So can its methods: what they return of the state's own type, as `replace` and `apply_gradients` do, has the
    same added.

    Attributes:
        user: the state as the step function returned it.
        loss_scale: the scale for the next step, `state.loss_scale.scale`; None where the loss is not scaled.
        residuals: what compressed gradients left out, which is sent with the next ones: `{name of a step: one entry for each
            gradient that it takes}`, outside of a step arrays of shape [num_replicas, ...], and each replica holds its
            own part; None where nothing is compressed.
        kept: trees by name that a checkpoint holds with the state; None everywhere else.
    """

    user: PyTree
    loss_scale: LossScale | None = None
    residuals: PyTree = None
    kept: Mapping[str, PyTree] | None = None

    def with_user(self, user: PyTree) -> StepState:
        """Replaces the user's state by `user` and keeps the rest: for a change that no method of the state makes.

        Example:
            >>> import jdist
            >>> state = jdist.StepState({"w": 1.0, "n": 1}, residuals={})
            >>> state.with_user({**state.user, "w": 2.0}).user
            {'w': 2.0, 'n': 1}
        """
        return dataclasses.replace(self, user=user_state(user))

    def __getattr__(self, name: str) -> Any:
        if name in self.__dataclass_fields__ or name.startswith("__"):  # asked for while the object is being made
            raise AttributeError(name)
        value = getattr(self.user, name)
        return _rewrapping(self, value) if _is_method_of(self.user, value) else value

    def __getitem__(self, key: Any) -> Any:
        return self.user[key]

    def __iter__(self) -> Iterator[Any]:  # else Python asks for items 0, 1, ..., of a dict as well
        return iter(self.user)

    def __contains__(self, key: Any) -> bool:
        return key in self.user


def _is_method_of(user: PyTree, value: Any) -> bool:
    """Returns whether what an attribute gives is a method of the state: Python's own, Equinox's, or a partial one."""
    if isinstance(value, functools.partial):  # of `functools.partialmethod`
        value = value.func
    return callable(value) and getattr(value, "__self__", None) is user


def _rewrapping(state: StepState, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of the user's state: its results of the state's own type become a `StepState` again."""
    user = state.user
    structure = jax.tree.structure(user)

    def is_state(x: Any) -> bool:
        if type(x) is not type(user):
            return False
        is_container = isinstance(user, dict | list) or type(user) is tuple
        return jax.tree.structure(x) == structure if is_container else not jax.tree_util.all_leaves([user])

    @functools.wraps(method)
    def rewrapped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if is_state(result):
            return state.with_user(result)
        if type(result) is tuple:  # a state and more
            return tuple(state.with_user(x) if is_state(x) else x for x in result)
        return result

    return rewrapped


def user_state(state: PyTree) -> PyTree:
    """Returns the user's own state, without what steps add to it."""
    return state.user if isinstance(state, StepState) else state


def user_states(tree: PyTree) -> PyTree:
    """Strips each state of a tree of what steps add to it."""
    return jax.tree.map(user_state, tree, is_leaf=lambda x: isinstance(x, StepState))


def with_user_state(around: PyTree, state: PyTree) -> PyTree:
    """Returns a user's state with what steps have added to `around`."""
    return dataclasses.replace(around, user=state) if isinstance(around, StepState) else state


def carrying(state: PyTree, **carried: Any) -> StepState:
    """Adds these of a `StepState`'s fields to a state, in place of those that it has."""
    return dataclasses.replace(state if isinstance(state, StepState) else StepState(state), **carried)


def loss_scale_of(state: PyTree) -> LossScale | None:
    """Returns a state's loss scale, if any."""
    return state.loss_scale if isinstance(state, StepState) else None


def residuals_of(state: PyTree) -> PyTree:
    """Returns a state's residuals, if any."""
    return state.residuals if isinstance(state, StepState) else None


def map_residuals(fn: Callable[[jax.Array], Any], state: PyTree) -> PyTree:
    """Applies `fn` to the leaves of a state's residuals, if it has any."""
    if residuals_of(state) is None:
        return state
    return carrying(state, residuals=jax.tree.map(fn, state.residuals))


def carried_by(state: PyTree) -> set[str]:
    """Names what steps have added to a state."""
    fields = {"loss scale": loss_scale_of(state), "residuals": residuals_of(state)}
    return {name for name, value in fields.items() if value is not None}


# What an `equinox.Module` may hold as a constant, as under `equinox.filter_jit`; elsewhere a number is an array.
_CONSTANTS = (bool, int, float, complex, str, bytes, enum.Enum, np.dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLeaf:
    """A leaf that is not an array."""

    value: Hashable  # from the user's tree
    type: type  # its type: 1, 1.0 and True are equal

    def __repr__(self) -> str:
        return f"{self.type.__name__} {self.value!r:.60}"


def is_static(node: object) -> bool:
    """Returns whether `node` is a `StaticLeaf`, for use as `is_leaf`."""
    return isinstance(node, StaticLeaf)


def pack(tree: PyTree) -> PyTree:
    """Makes constant leaves of a user's tree, as `StaticLeaf`s, part of its structure."""
    # Constants are functions and classes anywhere, an optimiser as a whole, and in an
    # `equinox.Module` also numbers and text. All other leaves, allowed or not, stay unchanged. A
    # tree without constants is returned itself.
    constants_found: list[Any] = []

    def static(path: Any, leaf: Any, constants: tuple[type, ...]) -> Any:
        if not (isinstance(leaf, (optax.GradientTransformation, *constants)) or _is_function(leaf)):
            return leaf
        try:
            hash(leaf)
        except TypeError as exc:
            raise StepError(
                f"state leaf {jax.tree_util.keystr(path) or 'itself'} is a {type(leaf).__name__} that cannot be hashed: {exc}. "
                "A constant of the step needs a `__hash__`; else keep it out of the state."
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
    """Returns whether a tree has a `StaticLeaf`."""
    return any(map(is_static, jax.tree.leaves(tree, is_leaf=is_static)))


def with_static_leaves(step: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a step take and return packed trees."""

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
