"""Functions run once on every replica: `strategy.run(fn, ...)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist.core.context import ReplicaTrace, check_not_mixed, current_trace, tracing
from jdist.core.layout import over_replicas
from jdist.core.per_replica import PerReplica, Uneven, is_per_replica, is_rows_of_replicas
from jdist.core.strategy import Strategy
from jdist.errors import GlobalViewError, StepError
from jdist.jaxpr import graph, variation
from jdist.step.notices import notice
from jdist.step.tree_checks import check_arrays, check_no_parts
from jdist.support.arrays import check_arguments_not_donated, put
from jdist.typing import PyTree


def run(strategy: Strategy, fn: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    """Runs a function on every replica: `Strategy.run`. Compiles at every call; without a mesh it calls the function."""
    check_not_mixed(strategy)
    if not callable(fn):
        raise StepError(f"strategy.run needs a function to call on every replica, it got a {type(fn).__name__}.")
    args, kwargs = _as_tensorflow_does(fn, args, kwargs)
    if current_trace() is not None:
        raise StepError(
            "strategy.run was called on a replica, inside a step or another run. Call the function itself there."
        )
    if strategy.is_global_view:
        raise GlobalViewError('strategy.run has no meaning under transform="jit", where no replica computes by itself.')
    check_arguments_not_donated("strategy.run", args, kwargs)
    check_no_parts(strategy, (args, kwargs))
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_per_replica)
    for leaf in filter(is_per_replica, leaves):
        _check_one_each(leaf, strategy.num_replicas)
    if strategy.mesh is None:
        parts = [jax.tree.map(lambda x: x[0], x.value) if isinstance(x, PerReplica) else x for x in leaves]
        args, kwargs = jax.tree.unflatten(treedef, parts)
        with strategy.scope():
            return fn(*args, **kwargs)
    own: dict[int, Any] = {}  # each replica's own part, by place among the arguments
    whole: dict[int, Any] = {}
    for i, leaf in enumerate(leaves):
        if is_per_replica(leaf) or is_rows_of_replicas(leaf, strategy.batch_sharding, "strategy.run"):
            own[i] = leaf
        elif isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex) and not isinstance(
            leaf, bool
        ):
            whole[i] = leaf

    def on_replica(own: dict[int, Any], whole: dict[int, Any], by_rows: frozenset[Any]) -> PyTree:
        parts = list(leaves)  # other leaves stay, and so do flags such as `training=True`
        for i, part in {**own, **whole}.items():
            parts[i] = jax.tree.map(lambda x: x[0], part.value) if isinstance(part, PerReplica) else part
        args, kwargs = jax.tree.unflatten(treedef, parts)
        with tracing(ReplicaTrace(strategy, by_rows=by_rows)):
            result = fn(*args, **kwargs)
        check_arrays(result, "the result of strategy.run", "Return numbers; text and objects belong outside.")
        return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

    def body(own: dict[int, Any], whole: dict[int, Any]) -> PyTree:
        is_rows = [not is_per_replica(x) for x in own.values() for _ in jax.tree.leaves(x)]
        closed, _, _, shapes = variation.traced(
            lambda by_rows: jax.make_jaxpr(partial(on_replica, by_rows=by_rows), return_shape=True)(own, whole),
            lambda closed: graph.body_of(closed).invars[: len(is_rows)],
        )
        varying = graph.body_of(closed).invars[: len(is_rows)]
        rows, others = ([v for v, x in zip(varying, is_rows, strict=True) if x is wanted] for wanted in (True, False))
        notice(getattr(fn, "__name__", "the function"), closed, rows, strategy.num_replicas, others)
        return jax.tree.unflatten(jax.tree.structure(shapes), graph.run(closed, jax.tree.leaves((own, whole))))

    by_replica = PartitionSpec(strategy.axes)
    mapped = over_replicas(strategy, body, in_specs=(by_replica, PartitionSpec()), out_specs=by_replica)
    own, whole = (
        jax.tree.map(lambda x: put(x, strategy.batch_sharding), own),
        jax.tree.map(lambda x: put(x, strategy.replicated_sharding), whole),
    )
    return PerReplica(jax.jit(mapped)(own, whole))


def _as_tensorflow_does(
    fn: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Unpacks `run(fn, args=(...), kwargs={...})`, TensorFlow's form, unless `fn` has parameters of these names."""
    if args or not kwargs or not kwargs.keys() <= {"args", "kwargs"} or kwargs.keys() & _named_parameters(fn):
        return args, kwargs
    positional, by_name = kwargs.get("args", ()), kwargs.get("kwargs") or {}
    if not isinstance(positional, tuple | list) or not isinstance(by_name, dict):
        raise StepError(
            f"strategy.run: `args` is {positional!r:.60} and `kwargs` is {by_name!r:.60}; as in TensorFlow they must be a "
            "tuple and a dict. Or write `strategy.run(fn, x, flag=True)`."
        )
    return tuple(positional), by_name


def _named_parameters(fn: Callable[..., PyTree]) -> set[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # a builtin: Python does not know its signature
        return set()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _check_one_each(value: PerReplica, num_replicas: int) -> None:
    if isinstance(value.value, Uneven):
        shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(part)] for part in value.value.parts]
        raise StepError(
            f"strategy.run: a PerReplica argument differs in size between replicas: {', '.join(map(str, shapes))}. One "
            "program runs on all of them; fill up to one size and pass a mask."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(value.value):
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != num_replicas:
            raise StepError(
                f"strategy.run: a PerReplica argument has shape {jnp.shape(leaf)} at "
                f"{jax.tree_util.keystr(path) or 'its value'}; its leading axis must be the number of replicas, {num_replicas}."
            )
