"""`strategy.run(fn, ...)`: any function, once on every replica, with each replica's own result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jdist.context import ReplicaTrace, tracing
from jdist.errors import GlobalViewError
from jdist.strategy import Strategy
from jdist.values import PerReplica, is_per_replica

PyTree = Any


def run(strategy: Strategy, fn: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    """`Strategy.run`; compiles at every call, so a loop belongs in a distributed step."""
    if strategy.transform == "jit":
        raise GlobalViewError('strategy.run has no meaning under transform="jit", where no replica computes by itself.')
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_per_replica)
    split = [isinstance(leaf, PerReplica) for leaf in leaves]
    rows = [
        isinstance(leaf, jax.Array) and strategy.mesh is not None and leaf.sharding == strategy.batch_sharding
        for leaf in leaves
    ]
    own = [leaf for leaf, s, r in zip(leaves, split, rows, strict=True) if s or r]
    whole = [leaf for leaf, s, r in zip(leaves, split, rows, strict=True) if not (s or r)]

    def body(own: list[Any], whole: list[Any]) -> PyTree:
        own_, whole_ = iter(own), iter(whole)
        parts = []
        for s, r in zip(split, rows, strict=True):
            if s:
                parts.append(jax.tree.map(lambda x: x[0], next(own_).value))
            else:
                parts.append(next(own_) if r else next(whole_))
        args, kwargs = jax.tree.unflatten(treedef, parts)
        with tracing(ReplicaTrace(strategy)):
            return jax.tree.map(lambda x: jax.numpy.asarray(x)[None], fn(*args, **kwargs))

    if strategy.mesh is None:
        return PerReplica(jax.jit(body)(own, whole))
    by_replica = PartitionSpec(strategy.axes)
    mapped = jax.shard_map(
        body,
        mesh=strategy.mesh,
        in_specs=(by_replica, PartitionSpec()),
        out_specs=by_replica,
        check_vma=False,
    )
    own, whole = (
        jax.device_put(own, strategy.batch_sharding),
        jax.device_put(whole, strategy.replicated_sharding),
    )
    return PerReplica(jax.jit(mapped)(own, whole))
