"""Operations of a strategy with states in parts: init, fetch, run, distribute."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist.core.division import forms, is_in_place
from jdist.core.layout import Form, Layout, axes_of
from jdist.core.operations import Operations
from jdist.core.sharded_leaf import ShardedLeaf, is_sharded_leaf, map_leaves, whole_on_host
from jdist.core.step_state import pack, unpack, user_states
from jdist.core.strategy import Strategy
from jdist.sharded_state.step import make_program
from jdist.step import in_flight, placement
from jdist.step import run_on_replicas as on_replicas
from jdist.step.divergence import compare, hash_leaf
from jdist.step.mesh_program import Backend
from jdist.step.mesh_step import DistributedStep
from jdist.step.options import StepOptions
from jdist.step.signature import Step
from jdist.step.tree_checks import check_state, check_whole
from jdist.support.arrays import check_arguments_not_donated, check_not_donated, put, to_host
from jdist.typing import PyTree


def init(strategy: Strategy, fn: Callable[..., PyTree], args: tuple[PyTree, ...]) -> PyTree:
    """Computes each part of every leaf where it stays: `Strategy.init`."""
    layout = Layout.of(strategy)
    created = placement.create(strategy, fn, args)
    chosen = forms(strategy, jax.tree.unflatten(created.treedef, created.shapes), is_all=False)
    of_computed = [chosen[i] for i in created.computed]

    def in_parts(inputs: list[jax.Array]) -> list[jax.Array]:
        return [
            form.store(x) if form.is_cut else x for x, form in zip(created.compute(inputs), of_computed, strict=True)
        ]

    stored = jax.jit(in_parts, out_shardings=list(map(layout.kept, of_computed)))(created.inputs)
    leaves = [ShardedLeaf(x, form.of) if form.is_cut else x for x, form in zip(stored, of_computed, strict=True)]
    existing = {i: _laid_out(layout, x, chosen[i]) for i, x in created.existing.items()}
    return created.state(existing, leaves)


def _laid_out(layout: Layout, x: Any, form: Form) -> Any:
    """Copies an array into its place by the host, so that no device has to hold it whole."""
    if not form.is_cut and not any(form.model):
        return placement.copied(x, layout.kept(form))
    stored = put(form.store(_on_host(x)), layout.kept(form))
    return ShardedLeaf(stored, form.of) if form.is_cut else stored


def adopt_state(strategy: Strategy, state: PyTree) -> PyTree:
    """Lays out a state for a step: large leaves in parts, the rest in full, no buffer twice."""
    check_not_donated(state)
    layout = Layout.of(strategy)
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_sharded_leaf)
    check_state(jax.tree.unflatten(treedef, [None if is_sharded_leaf(x) else x for x in leaves]))
    chosen = forms(strategy, state)
    is_copied = [not form.is_cut and not any(form.model) for form in chosen]
    copies = [
        (whole_on_host(x) if is_sharded_leaf(x) else x) if copied else None
        for x, copied in zip(leaves, is_copied, strict=True)
    ]
    whole = iter(jax.tree.leaves(placement.adopt_state(strategy, jax.tree.unflatten(treedef, copies))))
    check_whole(
        jax.tree.unflatten(treedef, [None if is_sharded_leaf(x) or _is_divided(strategy, x) else x for x in leaves])
    )
    seen: set[int] = set()

    def place(x: Any, form: Form) -> Any:
        if is_in_place(layout, x, form):
            stored = x.stored if form.is_cut else x
            stored = jnp.copy(stored) if id(stored) in seen else stored  # one in two places could not be donated twice
        else:
            # By the host, one at a time: no device has to hold it whole.
            stored = put(form.store(_on_host(x)), layout.kept(form))
        seen.add(id(stored))
        return ShardedLeaf(stored, form.of) if form.is_cut else stored

    # A structure with None in place of a leaf has fewer leaves, so the state itself says where each is.
    placed = zip(leaves, chosen, is_copied, strict=True)
    return jax.tree.unflatten(treedef, [next(whole) if copied else place(x, form) for x, form, copied in placed])


def _is_divided(strategy: Strategy, x: Any) -> bool:
    """Returns whether an array is on a mesh with axes inside a replica, as its strategy or flax laid it out."""
    sharding = getattr(x, "sharding", None)
    return bool(strategy.model_axes) and isinstance(sharding, NamedSharding) and sharding.mesh == strategy.mesh


def _on_host(x: Any) -> np.ndarray:
    """Copies an array to the host in the dtype that JAX has for it."""
    whole = whole_on_host(x)
    return whole.astype(jax.dtypes.canonicalize_dtype(whole.dtype), copy=False)


def fetch(strategy: Strategy, state: PyTree) -> PyTree:
    """Waits for the steps in flight, compares what replicas hold in common, joins the parts: `Strategy.fetch`."""
    check(strategy, state)
    return unpack(map_leaves(whole_on_host, user_states(pack(state))))


def check(strategy: Strategy, state: PyTree) -> None:
    """Waits for the steps in flight and compares what replicas hold in common: `Strategy.check`."""
    check_not_donated(state)
    in_flight.wait_for(strategy, state)
    compare_copies(strategy, state)


def compare_copies(strategy: Strategy, state: PyTree) -> None:
    """Refuses copies of an array, or of the same part of one, that differ between devices."""
    mesh = strategy.mesh
    assert mesh is not None
    by_axes: dict[tuple[str, ...], dict[str, tuple[jax.Array, PartitionSpec]]] = {}
    for path, x in jax.tree.leaves_with_path(state, is_leaf=is_sharded_leaf):
        stored = x.stored if is_sharded_leaf(x) else x
        sharding = stored.sharding if isinstance(stored, jax.Array) else None
        if isinstance(sharding, NamedSharding) and sharding.mesh == mesh and stored.size:
            cut = axes_of(sharding.spec)
            if math.prod(size for name, size in mesh.shape.items() if name not in cut) > 1:
                by_axes.setdefault(cut, {})[jax.tree_util.keystr(path) or "the state"] = stored, sharding.spec
    for cut, arrays in by_axes.items():
        specs = tuple(spec for _, spec in arrays.values())
        hashes = to_host(_hash_devices(mesh, specs)([x for x, _ in arrays.values()]))  # [devices of the mesh, arrays]
        # Of each part a column, to be the same in all copies.
        names, sizes = mesh.axis_names, mesh.devices.shape
        copies = [i for i, name in enumerate(names) if name not in cut]
        order = [*copies, *(i for i in range(len(names)) if i not in copies)]
        num_copies = math.prod(sizes[i] for i in copies)
        by_copy = hashes.reshape(*sizes, -1).transpose(*order, len(names)).reshape(num_copies, -1)
        num_parts = by_copy.shape[1] // len(arrays)
        replicas = np.arange(strategy.num_replicas).reshape([mesh.shape[x] if x in strategy.axes else 1 for x in names])
        holders = np.broadcast_to(replicas, sizes).transpose(order).reshape(num_copies, -1).repeat(len(arrays), axis=1)
        of_part = [f", part {i}" if cut else "" for i in range(num_parts)]
        compare(by_copy, [path + part for part in of_part for path in arrays], holders)


@functools.lru_cache(maxsize=64)
def _hash_devices(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[[list[jax.Array]], jax.Array]:
    """Makes the function that hashes what each device holds of arrays: uint32 [devices, arrays]."""
    return jax.jit(
        jax.shard_map(
            lambda parts: jnp.stack([hash_leaf(x) for x in parts])[None],
            mesh=mesh,
            in_specs=(list(specs),),
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,
        )
    )


def run(strategy: Strategy, fn: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    """Runs a function on the replicas, with states among its arguments whole: `Strategy.run`."""
    check_arguments_not_donated("strategy.run", args, kwargs)
    args, kwargs = map_leaves(lambda x: whole_on_host(x) if is_sharded_leaf(x) else x, (args, kwargs))
    return on_replicas.run(strategy, fn, args, kwargs)


def distribute(strategy: Strategy, step: Step, options: StepOptions) -> DistributedStep:
    """Makes a step of gradients on the devices and an update of parts where they are: `Strategy.distribute`."""
    return DistributedStep(strategy, step, options, BACKEND)


def _compare(strategy: Strategy, state: PyTree, results: Any) -> None:
    """Compares what replicas hold whole, and by its hashes what each replica wrote without a reduction."""
    compare_copies(strategy, state)
    _, _, _, hashes = results
    if hashes:
        compare(np.stack([np.asarray(x) for x in hashes.values()], axis=1), list(hashes))


BACKEND = Backend(adopt_state, make_program, _compare)


def with_parts(operations: Operations) -> Operations:
    """Makes the operations of a strategy that keeps states in parts of those of one that keeps copies."""
    return dataclasses.replace(operations, init=init, fetch=fetch, check=check, run=run, distribute=distribute)
