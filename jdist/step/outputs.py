"""The results of a step by role, and how each comes together from the replicas."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.collective_marks import Gather
from jdist.core.per_replica import PerReplica, is_per_replica
from jdist.data.batching import real_rows
from jdist.errors import StepError
from jdist.step.options import StepOptions
from jdist.step.signature import join_states, put_parts, split_states, take_parts
from jdist.step.tree_checks import check_arrays, check_same_state, kind_of
from jdist.support.arrays import is_key, take_rows
from jdist.typing import PyTree


class OutputKind(enum.Enum):
    """The way in which a leaf of the results comes together from the replicas."""

    METRIC = "averaged where it differs"
    LOCAL = "kept apart"
    ROWS = "rows joined"


METRIC, LOCAL, ROWS = OutputKind


@dataclass
class Traced:
    """The results of a step by role, filled in when it is traced."""

    returns: tuple[str, ...] = ()  # the role of each result
    bare: bool = False  # the step returned its one result itself rather than a tuple
    changes_state: bool = False  # any leaf of the returned state differs from the received one
    parts: tuple[int, ...] | None = None  # see `signature.Call`
    gathers: list[Gather] = field(default_factory=list)  # of leaves in parts, in the newest tracing

    @property
    def output_roles(self) -> tuple[str, ...]:
        """The roles without the state's."""
        return tuple(role for role in self.returns if role != "state")

    def in_places(self, states: Iterable[PyTree], outputs: Iterable[PyTree]) -> tuple[PyTree, ...]:
        """States and outputs in the order in which the step returned them."""
        states, outputs = iter(states), iter(outputs)
        return tuple(next(states) if role == "state" else next(outputs) for role in self.returns)


def sort_results(result: Any, state: PyTree, options: StepOptions, traced: Traced) -> tuple[PyTree, tuple[PyTree, ...]]:
    """Sorts a step's results by role; returns `(state, one output for each other role)`."""
    # Without a returned state, it is the incoming one.
    own = take_parts(state, traced.parts)
    returns = options.returns or _guess_roles(result, own, options)
    if returns == ("state", "metrics"):
        _check_pair(result, own)
    one = isinstance(result, tuple) and len(result) == 1
    traced.returns, traced.bare = returns, len(returns) == 1 and not one
    if traced.bare:
        result = (result,)
    if not isinstance(result, tuple) or len(result) != len(returns):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise StepError(f"the step returned {got}, but `returns` is {returns!r}: write `return {', '.join(returns)}`.")
    if "state" in returns:
        new = join_states([tree for role, tree in zip(returns, result, strict=True) if role == "state"])
        state = put_parts(state, traced.parts, new)
        result = tuple(tree for role, tree in zip(returns, result, strict=True) if role != "state")
    return state, tuple(_numbers(role, tree) for role, tree in zip(traced.output_roles, result, strict=True))


def differs(before: list[Any], after: list[Any]) -> bool:
    """Returns whether any leaf of a new state is another object than before."""
    return list(map(id, before)) != list(map(id, after))


def _check_pair(result: Any, state: PyTree) -> None:
    """Refuses a state without its metrics, and both in the other order: their trees tell."""
    tree = jax.tree.structure(state)
    if jax.tree.structure(result) == tree:
        raise StepError('the step returned the state alone. Return its metrics too: `return state, {"loss": loss}`.')
    if isinstance(result, tuple) and len(result) == 2:
        first, second = map(jax.tree.structure, result)
        if first != tree and second == tree:
            raise StepError("the step returned the state second. It comes first: `return state, metrics`.")


def _numbers(role: str, tree: PyTree) -> PyTree:
    check_arrays(tree, f'the result with role "{role}"', "Return numbers; text and objects belong outside of the step.")
    if role != "metrics":
        return tree
    if any(map(is_key, jax.tree.leaves(tree))):
        raise StepError(
            "the step returns a PRNG key among its metrics, which cannot be averaged. Put it into the state."
        )
    return jax.tree.map(jnp.asarray, tree)


def _guess_roles(result: Any, state: PyTree, options: StepOptions) -> tuple[str, ...]:
    if "state" not in options.args:
        return ("metrics",)
    if options.num_states > 1:
        return _guess_roles_of_several(result, state)
    if jax.tree.structure(result) == jax.tree.structure(state):
        return ("state",)
    if isinstance(result, tuple) and len(result) == 2:
        return ("state", "metrics")
    if isinstance(result, tuple) and len(result) > 2:
        raise StepError(
            f"the step returned {len(result)} values; say what they are, for example "
            '`returns=("state", "metrics", "metrics")`. Roles: "state", "metrics", "examples", "per_replica".'
        )
    # Neither the state's tree nor a pair: most likely a state of another form; this says where they differ.
    check_same_state(state, result)
    raise AssertionError("unreachable: trees that differ are refused above")


def _guess_roles_of_several(result: Any, states: tuple[PyTree, ...]) -> tuple[str, ...]:
    """Guesses the roles of results that begin with as many states as the step takes: their trees tell."""
    n, trees = len(states), [jax.tree.structure(state) for state in states]
    returned = [jax.tree.structure(tree) for tree in result] if isinstance(result, tuple) else []
    if returned[:n] == trees and n <= len(returned) <= n + 1:
        return ("state",) * n + ("metrics",) * (len(returned) - n)
    roles = ("state",) * n + ("metrics",)
    if returned[:n] == trees:
        raise StepError(
            f"the step returned {len(returned)} values; say what they are, for example `returns={(*roles, 'metrics')}`. "
            'Roles: "state", "metrics", "examples", "per_replica".'
        )
    if n <= len(returned) <= n + 1 and sorted(map(str, returned[:n])) != sorted(map(str, trees)):
        check_same_state(states, result[:n])  # says where the trees differ
    got = f"a tuple of {len(returned)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
    raise StepError(
        f"the step takes {n} states and returned {got} that does not begin with their trees, in their order. Write "
        f'`return {", ".join(f"state{i + 1}" for i in range(n))}, metrics`; for a step without states, `returns=("metrics",)`.'
    )


def kinds_of(outputs: tuple[PyTree, ...], traced: Traced, rows: int | None = None) -> tuple[PyTree, ...]:
    """Replaces each leaf of the outputs by its kind; refuses results unfit for their role."""
    # For example "examples" without as many rows as the batch (`rows`, None: unknown).

    def of(role: str, tree: PyTree) -> PyTree:
        for leaf in jax.tree.leaves(tree) if role == "examples" else ():
            shape = jnp.shape(leaf)
            if not shape or rows not in (None, shape[0]):
                raise StepError(
                    f'a result with role "examples" has shape {shape}; it needs one row for each of the {rows} rows of '
                    "its part of the batch."
                )
        if role != "metrics":
            return jax.tree.map(lambda _: ROWS if role == "examples" else LOCAL, tree)
        return jax.tree.map(
            lambda node: jax.tree.map(lambda _: LOCAL, node) if isinstance(node, PerReplica) else METRIC,
            tree,
            is_leaf=is_per_replica,
        )

    return tuple(of(role, tree) for role, tree in zip(traced.output_roles, outputs, strict=True))


def rows_of(batches: PyTree) -> int | None:
    """Counts the rows of a batch; None for one without arrays."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(batches)), None)


def check_means(outputs: tuple[PyTree, ...], averaged: Sequence[bool], rows: int | None) -> None:
    """Refuses integer metrics that are averaged; warns of metrics with a value an example."""
    # The mean of a count is of no use. Averaging would mix values of examples, but this is not an
    # error: another vector (one entry a class, a layer, an expert) may happen to be as long as the
    # replica's rows.
    for (path, leaf), is_mean in zip(jax.tree_util.tree_leaves_with_path(outputs), averaged, strict=True):
        if not is_mean:
            continue
        name = jax.tree_util.keystr(path[1:]) or "itself"
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise StepError(
                f"metric {name}, {kind_of(leaf)}, is computed from this replica's rows, and a count cannot be averaged over "
                'replicas. Use `jdist.all_reduce(x, "sum")`, `jdist.mean(is_right, mask)` or `jdist.PerReplica(x)`.'
            )
        if rows not in (None, 1) and leaf.shape[:1] == (rows,):
            warnings.warn(
                f"metric {name}, {kind_of(leaf)}, has one entry for each of the {rows} rows "
                "of its part of the batch. Metrics are averaged over the replicas entry by entry, which mixes examples "
                'that have nothing in common. Return one value an example with the role "examples"; for any '
                'other vector, say `jdist.all_reduce(x, "mean")`.',
                stacklevel=2,
            )


def returned(
    state: PyTree,
    outputs: tuple[PyTree, ...],
    traced: Traced,
    batches: PyTree,
    turn: Callable[[PyTree], PyTree],
) -> Any:
    """Puts state and outputs in the places where the step itself returns them, and drops the rows of padding."""
    returns = traced.returns
    if "examples" in returns:
        outputs = _without_padding(outputs, traced, batches, turn)
    if returns == ("state", "metrics"):
        return state, outputs[0]
    outputs = traced.in_places(split_states(state, returns.count("state")), outputs)
    return outputs[0] if traced.bare else outputs


def _without_padding(
    outputs: tuple[PyTree, ...], traced: Traced, batches: PyTree, turn: Callable[[PyTree], PyTree]
) -> tuple[PyTree, ...]:
    """Drops the rows of "examples" results for rows of the batch that were padding."""
    of_each = (real_rows(batch, lambda _, i=i: turn(batches)[i]) for i, batch in enumerate(batches))
    real = next((rows for rows in of_each if rows is not None), None)
    return tuple(
        jax.tree.map(lambda x: take_rows(x, real), tree) if role == "examples" else tree
        for role, tree in zip(traced.output_roles, outputs, strict=True)
    )
