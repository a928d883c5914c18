"""Checks of the trees that go in and out of a step; every error names the leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jdist.core.sharded_leaf import ShardedLeaf
from jdist.core.step_state import StaticLeaf, is_static
from jdist.core.strategy import Strategy
from jdist.data.leaves import ROWS_REMEDY, check_static_parts, is_numeric, numbers_of
from jdist.errors import BatchError, StepError
from jdist.typing import PyTree


def check_same_state(before: PyTree, after: PyTree) -> PyTree:
    """Refuses a returned state with a different tree, shape or dtype; returns it strongly typed."""
    check_state(after, "the state that the step returned")
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise StepError(
            "the step returned a state of another tree than it received:\n" + _tree_difference(before, after)
        )

    problems: list[str] = []

    def check(path: Any, old: Any, new: Any) -> Any:
        old_shape, new_shape = jnp.shape(old), jnp.shape(new)
        old_dtype, new_dtype = jax.typeof(old).dtype, jax.typeof(new).dtype
        # A weakly typed value, made of Python numbers, takes the old dtype where that loses nothing.
        is_key = jnp.issubdtype(old_dtype, jax.dtypes.prng_key)
        adapts = not is_key and jax.typeof(new).weak_type and jnp.result_type(old, new) == old_dtype
        if old_shape != new_shape or (old_dtype != new_dtype and not adapts):
            problems.append(
                f"  {jax.tree_util.keystr(path) or 'the state'}: "
                f"{old_dtype}{list(old_shape)} before, {new_dtype}{list(new_shape)} after"
            )
            return new
        return new if is_key else jax.lax.convert_element_type(new, old_dtype)

    result = jax.tree_util.tree_map_with_path(check, before, after)
    if problems:
        raise StepError(
            "the step returned a state with leaves of another shape or dtype than it received:\n"
            + "\n".join(problems[:10] + ([f"  and {len(problems) - 10} more"] if len(problems) > 10 else []))
            + "\nA step must keep both; cast the leaf back, or create the state with the later dtype."
        )
    return result


def _tree_difference(before: PyTree, after: PyTree) -> str:
    def leaves(tree: PyTree) -> dict[str, Any]:
        paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_static)
        return {jax.tree_util.keystr(path): leaf for path, leaf in paths}

    def described(leaf: Any) -> str:
        return f"the constant {leaf}" if is_static(leaf) else f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"

    old, new = leaves(before), leaves(after)
    lines = [f"  {path}: gone" for path in old if path not in new]
    lines += [f"  {path}: new, {described(leaf)}" for path, leaf in new.items() if path not in old]
    for path, leaf in new.items():
        if path in old and (is_static(leaf) or is_static(old[path])) and leaf != old[path]:
            # Two functions may print alike.
            again = ", another object" if is_static(leaf) and described(leaf) == described(old[path]) else ""
            lines.append(f"  {path}: {described(old[path])} before, {described(leaf)} after{again}")
    if any(map(is_static, [*old.values(), *new.values()])):
        lines.append("  (A step cannot change a constant: make what changes an array, `jnp.asarray(...)`.)")
    if not lines:
        lines = [f"  before: {jax.tree.structure(before)}", f"  after:  {jax.tree.structure(after)}"]
    more = [f"  and {len(lines) - 10} more"] if len(lines) > 10 else []
    if isinstance(after, dict) and new and not old.keys() & new.keys():
        more.append('If it returns its metrics alone, pass `returns=("metrics",)`.')
    return "\n".join(lines[:10] + more)


def check_not_traced(arguments: PyTree) -> None:
    """Raises StepError for tracers: the call is made inside a JAX transformation."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
        raise StepError(
            "a distributed step was called while JAX traces (inside `jax.jit`, `lax.scan`, ...); it is compiled "
            "already and must be called from plain Python. For several steps in one call there is `steps_per_call`."
        )


def check_whole(state: PyTree) -> None:
    """Raises StepError for leaves with another part on each device: a state replicated for `pmap`, or sharded."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and not leaf.sharding.is_fully_replicated:
            raise StepError(
                f"state leaf {jax.tree_util.keystr(path) or 'itself'}, {leaf.dtype}{list(leaf.shape)}, is spread over "
                f"{len(leaf.sharding.device_set)} devices in parts. Pass what `strategy.init`, or `fetch` of the strategy that "
                "made it, returns. In a pmap program delete the line with `jax_utils.replicate`, and write "
                "`strategy.fetch(state)` for `jax_utils.unreplicate(state)`."
            )


def check_no_parts(strategy: Strategy, tree: PyTree) -> None:
    """Raises StepError for arrays in parts in host memory, which only the strategy that made them can put together."""
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, ShardedLeaf)):
        if isinstance(leaf, ShardedLeaf):
            raise StepError(
                f"{jax.tree_util.keystr(path) or 'the state'} is {leaf.dtype}{list(leaf.shape)}, kept {leaf.kept}; "
                f"{strategy.name} takes whole arrays. Pass on what `fetch(state)` of the strategy that made it returns."
            )


_KEEP_OUT = "Keep text and settings out of the tree, or in static fields of a dataclass."


def check_arrays(tree: PyTree, what: str, remedy: str = _KEEP_OUT, *, constants: bool = False) -> None:
    """Raises StepError for leaves that are not arrays or numbers; for constants of a packed tree too, unless allowed."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=None if constants else is_static):
        of_numpy = isinstance(leaf, np.ndarray | np.generic)
        if not (of_numpy and is_numeric(leaf.dtype)) and not isinstance(leaf, jax.Array | int | float | complex):
            raise StepError(
                f"{what} has a leaf that is not an array of numbers: {jax.tree_util.keystr(path) or 'itself'} is a "
                f"{kind_of(leaf)}. {remedy}"
            )


def check_state(state: PyTree, what: str = "the state") -> None:
    """Raises StepError for leaves of a state that are neither arrays or numbers nor constants."""
    check_arrays(state, what, constants=True)


def kind_of(leaf: Any) -> str:
    """Describes a leaf in a few words: `float32[8, 3]`, `ndarray of <U3`, `str`."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return f"{leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf, np.ndarray | np.generic):
        return f"{leaf.dtype}{list(leaf.shape)}" if is_numeric(leaf.dtype) else f"{type(leaf).__name__} of {leaf.dtype}"
    return leaf.type.__name__ if isinstance(leaf, StaticLeaf) else type(leaf).__name__


def summary(tree: PyTree) -> str:
    """Lists the first leaves of a tree, each with its kind."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        return f"no leaves ({type(tree).__name__})"
    first = ", ".join(f"{jax.tree_util.keystr(path)} {kind_of(leaf)}".strip() for path, leaf in leaves[:4])
    return first + (f" and {len(leaves) - 4} more leaves" if len(leaves) > 4 else "")


def check_batch(batches: PyTree, *, parts: int, explanation: str, accumulate: int = 1, lead: int = 0) -> None:
    """Refuses a batch if its leaves disagree on rows, or if they do not divide into `parts`."""
    rows: int | None = None
    first = ""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batches):
        name = jax.tree_util.keystr(path) or "the batch"
        shape = leaf.shape if isinstance(leaf, jax.Array) else numbers_of(name, leaf).shape
        if len(shape) <= lead:
            in_list = " If it is part of a list, make the list an array with `numpy.asarray`."
            raise BatchError(
                f"batch leaf {name} has shape {shape}; it needs a leading axis of rows"
                f"{' after the axis of steps' if lead else ''}. Pass what has no rows as a replicated argument."
                f"{'' if shape else in_list}"
            )
        if rows is None:
            rows, first = shape[lead], name
        elif shape[lead] != rows:
            raise BatchError(
                f"batch leaves disagree on the number of rows: {first} has {rows}, {name} has {shape[lead]}. "
                f"{ROWS_REMEDY}."
            )
    if rows is not None:
        check_static_parts(batches, rows)
    parts *= accumulate
    if rows is not None and rows % parts:
        below, above = rows - rows % parts, rows - rows % parts + parts
        sizes = f"{below} or {above}" if below else f"{above}"
        remedy = '`strategy.distribute_dataset(..., partial="pad")` fills a batch up to a multiple of the replicas.'
        if accumulate > 1:
            explanation += f" x accumulate={accumulate}"
            remedy = "Each microbatch has an equal part of each replica's rows; or take another `accumulate`."
        raise BatchError(
            f"a batch of {rows} rows does not divide by {parts} ({explanation}). Use {sizes} rows. {remedy}"
        )
