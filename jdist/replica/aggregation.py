"""One version made of the replicas' for state other than parameters: batch statistics, counters, metrics.

The meaning is that of `tf.VariableAggregation`, as a function: 5, to which replica i of 2 adds 1 + i, is 6.5 by "mean",
8 by "sum" and 6 by "first".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jdist.core import context
from jdist.core.collective_marks import Collective
from jdist.core.per_replica import as_arrays, named
from jdist.errors import StepError
from jdist.replica import collectives
from jdist.support import checks
from jdist.typing import PyTree

Aggregation = Literal["mean", "sum", "first", "per_replica"]
_NOT_GIVEN: Any = object()


def aggregate(new: PyTree, how: Aggregation, *, old: PyTree = _NOT_GIVEN) -> PyTree:
    """Brings together the replicas' versions of state other than parameters.

    A counter of what every replica does alike (`step + 1`) needs none of this: it is the same everywhere already.

    Under `transform="jit"` the step sees the whole batch and there is one version only, as outside a mesh: "mean",
    "sum" and "first" are then `new` itself. With `accumulate` each microbatch has a version of its own, as a replica
    has.

    Args:
        new: this replica's new version; pytree of arrays.
        how: "mean" of the versions; "sum", `old` and all that was added to it on any replica; "first", the version of
            replica 0; "per_replica", all versions: each leaf gains a leading axis of replicas, and a step reads
            its own by `leaf[jdist.replica_id()]`. Every replica then holds all of them: for counters, not for large
            arrays.
        old: with "sum", the state that came in; a tree like `new`.

    Returns:
        A tree like `new`, the same on every replica, and exact where the strategy's `all_reduce` is not.

    Raises:
        StepError: `how` is not one of these, `old` is missing or not asked for, a leaf is not an array, or cannot be
            aggregated so: a mean of integers, a sum of bools or keys, `new` and `old` that are unlike.

    Example:
        >>> import jdist
        >>> jdist.one_device().run(lambda: jdist.aggregate(5 + 1, "sum", old=5)).value.tolist()
        [6]
    """
    checks.choice("how", how, get_args(Aggregation), StepError, call="jdist.aggregate")
    if (old is not _NOT_GIVEN) != (how == "sum"):
        raise StepError(
            'jdist.aggregate(new, "sum") needs `old=`, the state that came in: what each replica added to it is summed.'
            if how == "sum"
            else f"jdist.aggregate(new, {how!r}) takes no `old`; only a sum counts what was added."
        )
    as_arrays("jdist.aggregate", new)
    if how == "mean":
        _check_has_mean(new)
    if how == "sum":
        as_arrays("jdist.aggregate(..., old=...)", old)
        _check_can_be_added(new, old)
    if how == "per_replica":
        return collectives.on_arrays(lambda xs: [collectives.all_gather(x[None]) for x in xs], new)
    # Not by the strategy's own all-reduce, which may be one that compresses gradients.
    if how == "mean":
        return collectives.on_arrays(lambda xs: collectives.combine(Collective("value", "mean"), xs), new)
    if how == "sum":
        added = jax.tree.map(lambda x, before: x - before, new, old)
        total = collectives.on_arrays(lambda xs: collectives.combine(Collective("value", "sum"), xs), added)
        return jax.tree.map(lambda before, x: before + x, old, total)
    return collectives.broadcast(new)


def _check_has_mean(new: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(new):
        dtype = jax.typeof(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise StepError(
                f'jdist.aggregate(..., "mean"): {jax.tree_util.keystr(path) or "the value"} is {dtype}, and its mean would not '
                'be of that type. Use "sum" for a counter, "first" for what is the same on all replicas.'
            )


def _check_can_be_added(new: PyTree, old: PyTree) -> None:
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise StepError(
            f'jdist.aggregate(new, "sum", old=old): `new` has the tree {jax.tree.structure(new)!s:.200}, `old` has '
            f"{jax.tree.structure(old)!s:.200}; they must be alike. Pass as `old` the same part of the incoming state."
        )
    for (path, leaf), before in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
        kinds = [f"{jax.typeof(x).dtype}{list(jnp.shape(x))}" for x in (leaf, before)]
        if jnp.shape(leaf) != jnp.shape(before):
            raise StepError(
                f'jdist.aggregate(..., "sum"): {named(path)} is {kinds[0]}, and {kinds[1]} in `old`; the shapes must be the '
                "same, as that of a state is before and after."
            )
        if not all(jnp.issubdtype(jax.typeof(x).dtype, jnp.number) for x in (leaf, before)):
            raise StepError(
                f'jdist.aggregate(..., "sum"): {named(path)} is {kinds[0]}, and {kinds[1]} in `old`; only numbers can be added '
                'up. Count in an integer, or take "first" or "per_replica".'
            )


def first_replica_only(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls `fn` for its effect on the first replica of each process only: a print, a callback.

    Where there is one replica, in the global view and outside a strategy, it is called once.

    Args:
        fn: a function that JAX can trace and that calls no collective, which would wait for the other replicas.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Example:
        >>> import jax, jdist
        >>> step = lambda: jdist.first_replica_only(jax.debug.callback, lambda x: print(f"x is {x}"), 3)
        >>> _ = jdist.mirrored().run(step), jax.effects_barrier()
        x is 3
    """
    axes, trace = collectives.replica_axes(), context.current_trace()
    if axes is None or trace is None or trace.strategy.num_replicas == 1:
        fn(*args, **kwargs)
        return
    processes = [device.process_index for device in trace.strategy.first_devices]
    firsts = jnp.array([processes.index(process) for process in sorted(set(processes))], jnp.int32)

    def call() -> None:
        fn(*args, **kwargs)

    jax.lax.cond(jnp.isin(collectives.replica_id(), firsts), call, lambda: None)
