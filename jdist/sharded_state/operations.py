"""Operations of a strategy whose states are in parts: init, fetch, run, distribute."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist.core.division import divided, is_in_place, shapes
from jdist.core.operations import Operations
from jdist.core.sharded_leaf import Layout, ShardedLeaf, is_spread, map_leaves, whole_on_host
from jdist.core.step_state import pack, unpack, user_states
from jdist.core.strategy import Strategy
from jdist.sharded_state.step import make_program
from jdist.step import placement
from jdist.step import run_on_replicas as on_replicas
from jdist.step.divergence import compare, hash_leaf
from jdist.step.mesh_program import Backend
from jdist.step.mesh_step import DistributedStep
from jdist.step.options import StepOptions
from jdist.step.signature import Step
from jdist.support.arrays import check_arguments_not_donated, check_not_donated, to_host

PyTree = Any


def init(strategy: Strategy, fn: Callable[..., PyTree], args: tuple[PyTree, ...]) -> PyTree:
    """Computes each part of every leaf where it stays: `Strategy.init`."""
    layout = Layout.of(strategy)

    def compute(create: Callable[[list[Any]], list[jax.Array]], arrays: list[Any], state: PyTree) -> list[Any]:
        spread, shapes = divided(strategy, state), jax.tree.leaves(state)

        def in_parts(arrays: list[Any]) -> list[jax.Array]:
            leaves = zip(create(arrays), spread, strict=True)
            return [layout.store(x) if in_parts else x for x, in_parts in leaves]

        shardings = [layout.kept(s.shape) if part else layout.whole for s, part in zip(shapes, spread, strict=True)]
        leaves = jax.jit(in_parts, out_shardings=shardings)(arrays)
        return [ShardedLeaf(x, s.shape) if part else x for x, s, part in zip(leaves, shapes, spread, strict=True)]

    return placement.init(strategy, fn, args, compute)


def adopt_state(strategy: Strategy, state: PyTree) -> PyTree:
    """Lays out a state for a step: large leaves in parts, the rest whole, no buffer twice.

    Raises:
        DonatedStateError: a leaf was consumed by an earlier call.
        StepError: a leaf is no array.
    """
    check_not_donated(state)
    layout = Layout.of(strategy)
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_spread)
    kept = [is_in_place(layout, x) for x in leaves]
    # Other leaves, a `ShardedLeaf` of another strategy too, go through the layout with a copy on every device.
    others = jax.tree.unflatten(
        treedef,
        [None if keep else whole_on_host(x) if is_spread(x) else x for x, keep in zip(leaves, kept, strict=True)],
    )
    whole = iter(jax.tree.leaves(placement.adopt_state(strategy, others)))
    seen: set[int] = set()

    def place(x: Any, keep: bool, in_parts: bool) -> Any:
        if keep and id(x.stored) not in seen:
            seen.add(id(x.stored))
            return x
        if keep:
            return ShardedLeaf(jnp.copy(x.stored), x.shape)
        x = next(whole)
        return ShardedLeaf(_store(layout, x.shape)(x), x.shape) if in_parts else x

    # A structure with None in the place of a leaf has fewer leaves, so the state itself says which are in parts.
    placed = zip(leaves, kept, divided(strategy, state), strict=True)
    return jax.tree.unflatten(treedef, [place(x, keep, in_parts) for x, keep, in_parts in placed])


@functools.lru_cache(maxsize=1024)
def _store(layout: Layout, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    """Makes the function that cuts a whole array of this shape."""
    return jax.jit(layout.store, out_shardings=layout.kept(shape))


def fetch(strategy: Strategy, state: PyTree) -> PyTree:
    """Waits for the steps in flight, compares what replicas hold in common, joins the parts: `Strategy.fetch`."""
    check(strategy, state)
    return unpack(map_leaves(whole_on_host, user_states(pack(state))))


def check(strategy: Strategy, state: PyTree) -> None:
    """Waits for the steps in flight and compares what replicas hold in common: `Strategy.check`."""
    placement.check_in_parts(strategy, state)
    compare_copies(strategy, state)


def compare_copies(strategy: Strategy, state: PyTree) -> None:
    """Raises ReplicaDivergenceError if groups of replicas, each of which holds all parts, hold different ones."""
    layout = Layout.of(strategy)
    groups = strategy.num_replicas // layout.num_parts
    if groups == 1 or layout.on_host:
        return
    leaves = [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(state, is_leaf=is_spread)]
    parted = {path: x for path, x in leaves if is_in_place(layout, x)}
    if not parted:
        return
    hashes = to_host(
        _hash_parts(strategy, tuple(x.shape for x in parted.values()))([x.stored for x in parted.values()])
    )
    # Of each part a column, to be the same in all groups.
    by_group = hashes.reshape(groups, -1)
    columns = [f"{path}, part {i}" for i in range(layout.num_parts) for path in parted]
    compare(by_group, columns)


@functools.lru_cache(maxsize=64)
def _hash_parts(strategy: Strategy, shapes: tuple[tuple[int, ...], ...]) -> Callable[[list[jax.Array]], jax.Array]:
    """Makes the function that hashes each replica's parts: uint32 [replicas, arrays]."""
    layout = Layout.of(strategy)
    return jax.jit(
        jax.shard_map(
            lambda parts: jnp.stack([hash_leaf(x) for x in parts])[None],
            mesh=strategy.mesh,
            in_specs=([layout.spec(shape) for shape in shapes],),
            out_specs=PartitionSpec(strategy.axes),
            check_vma=False,
        )
    )


def run(strategy: Strategy, fn: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    """Runs a function on the replicas, with states among its arguments whole: `Strategy.run`."""
    check_arguments_not_donated("strategy.run", args, kwargs)
    args, kwargs = map_leaves(lambda x: whole_on_host(x) if is_spread(x) else x, (args, kwargs))
    return on_replicas.run(strategy, fn, args, kwargs)


def distribute(strategy: Strategy, step: Step, options: StepOptions) -> DistributedStep:
    """Makes a step of gradients on the devices and an update of parts where they are: `Strategy.distribute`."""
    return DistributedStep(strategy, step, options, BACKEND)


def _compare(strategy: Strategy, state: PyTree, results: Any) -> None:
    """Compares what replicas hold whole, and by its hashes what each replica wrote without a reduction."""
    placement.compare_replicas(strategy, state)
    compare_copies(strategy, state)
    _, _, _, hashes = results
    if hashes:
        compare(np.stack([np.asarray(x) for x in hashes.values()], axis=1), list(hashes))


BACKEND = Backend(adopt_state, shapes, make_program, _compare)


def with_parts(operations: Operations) -> Operations:
    """Makes the operations of a strategy that keeps states in parts of those of one that keeps copies."""
    return dataclasses.replace(operations, init=init, fetch=fetch, check=check, run=run, distribute=distribute)
