"""A step's state with what the step itself carries from call to call."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jdist.core.precision import LossScale

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepState:
    """A user's state, and what steps carry from call to call beside it.

    A step in `jdist.precision("fp16")` and one whose all-reduce compresses gradients return their state so; the step function
    itself sees only `user`. Pass it on whole, and save it whole. Fields and items of the user's state can be read as if they
    were its own. So can its methods: what they return of the state's own type, as `replace` and `apply_gradients` do, has the
    same beside it.

    Attributes:
        user: the state as the step function returned it.
        loss_scale: the scale for the next step, `state.loss_scale.scale`; None where the loss is not scaled.
        residuals: what compressed gradients left out, which is sent with the next ones: `{name of a step: one entry for each
            gradient that it takes}`, outside of a step arrays of shape [num_replicas, ...], of which each replica holds its
            own part; None where nothing is compressed.
        kept: trees by name that a checkpoint holds beside the state; None everywhere else.
    """

    user: PyTree
    loss_scale: LossScale | None = None
    residuals: PyTree = None
    kept: Mapping[str, PyTree] | None = None

    def with_user(self, user: PyTree) -> StepState:
        """Replaces the user's state and keeps what is beside it: for a change that no method of the state makes.

        Example:
            >>> import jdist
            >>> state = jdist.StepState({"w": 1.0, "n": 1}, residuals={})
            >>> state.with_user({**state.user, "w": 2.0}).user
            {'w': 2.0, 'n': 1}
        """
        return dataclasses.replace(self, user=user_state(user))

    def __getattr__(self, name: str) -> Any:
        if name in self.__dataclass_fields__ or name.startswith("__"):  # asked for while an object is being made
            raise AttributeError(name)
        value = getattr(self.user, name)
        is_method = (inspect.ismethod(value) or inspect.isbuiltin(value)) and value.__self__ is self.user
        return _rewrapping(self, value) if is_method else value

    def __getitem__(self, key: Any) -> Any:
        return self.user[key]


def _rewrapping(state: StepState, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the user's state, whose results of the state's own type become a `StepState` again."""
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
    """The user's own state, without what steps carry beside it."""
    return state.user if isinstance(state, StepState) else state


def user_states(tree: PyTree) -> PyTree:
    """A tree of states, each without what steps carry beside it."""
    return jax.tree.map(user_state, tree, is_leaf=lambda x: isinstance(x, StepState))


def with_user_state(around: PyTree, state: PyTree) -> PyTree:
    """A user's state with what steps carry beside `around`."""
    return dataclasses.replace(around, user=state) if isinstance(around, StepState) else state


def carrying(state: PyTree, **carried: Any) -> StepState:
    """The state with these of a `StepState`'s fields beside it, in place of those that it has."""
    return dataclasses.replace(state if isinstance(state, StepState) else StepState(state), **carried)


def loss_scale_of(state: PyTree) -> LossScale | None:
    """The loss scale that a state comes with, if any."""
    return state.loss_scale if isinstance(state, StepState) else None


def residuals_of(state: PyTree) -> PyTree:
    """The residuals that a state comes with, if any."""
    return state.residuals if isinstance(state, StepState) else None


def map_residuals(fn: Callable[[jax.Array], Any], state: PyTree) -> PyTree:
    """The state with `fn` applied to the residuals' leaves, if it has any."""
    if residuals_of(state) is None:
        return state
    return carrying(state, residuals=jax.tree.map(fn, state.residuals))


def carried_by(state: PyTree) -> set[str]:
    """Names what steps carry beside a state."""
    fields = {"loss scale": loss_scale_of(state), "residuals": residuals_of(state)}
    return {name for name, value in fields.items() if value is not None}
