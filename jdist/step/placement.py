"""The places of state and batches on a strategy's devices, and the way back to the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jdist.core.context import scope
from jdist.core.sharded_leaf import ShardedLeaf, is_sharded_leaf, map_leaves, whole_on_host
from jdist.core.step_state import carrying, pack, residuals_of, unpack, user_states
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import rows_first
from jdist.data.leaves import check_fits
from jdist.data.position import WHOLE, ProcessShard
from jdist.errors import BatchError, StepError
from jdist.jaxpr import graph
from jdist.step import in_flight
from jdist.step.divergence import compare, is_of_this_host, make_check, number_copies
from jdist.step.error_feedback import check_residuals
from jdist.step.options import StepOptions
from jdist.step.tree_checks import check_batch, check_no_parts, check_state, check_whole
from jdist.support.arrays import check_arguments_not_donated, check_not_donated, is_key, put, to_host
from jdist.typing import PyTree


class CreatedState(NamedTuple):
    """A traced state: `existing` leaves by their places, and the program that computes the others from `inputs`."""

    treedef: Any
    shapes: list[jax.ShapeDtypeStruct]
    existing: dict[int, Any]
    inputs: list[jax.Array]
    compute: Callable[[list[jax.Array]], list[jax.Array]]

    @property
    def computed(self) -> list[int]:
        """The places of the leaves that `compute` returns."""
        return [i for i in range(len(self.shapes)) if i not in self.existing]

    def state(self, existing: dict[int, Any], computed: Sequence[Any]) -> PyTree:
        """Assembles the state from its leaves in their places."""
        leaves = existing | dict(zip(self.computed, computed, strict=True))
        return unpack(jax.tree.unflatten(self.treedef, [leaves[i] for i in range(len(leaves))]))


def init(strategy: Strategy, fn: Callable[..., PyTree], args: tuple[PyTree, ...]) -> PyTree:
    """Makes a state, a copy of every leaf on each device: `Strategy.init`."""
    created = create(strategy, fn, args)
    sharding = strategy.replicated_sharding
    existing = {i: copied(x, sharding) for i, x in created.existing.items()}
    if not created.computed:
        return created.state(existing, [])
    shardings = None if sharding is None else [sharding] * len(created.computed)
    return created.state(existing, jax.jit(created.compute, out_shardings=shardings)(created.inputs))


def renew(strategy: Strategy, other: Strategy) -> None:
    """Gives a strategy the devices of another, in a world of other processes; steps and datasets under it follow."""
    cluster = strategy.cluster
    vars(strategy).clear()
    vars(strategy).update(vars(other) | {"cluster": cluster})
    _checks.pop(strategy, None)


def create(strategy: Strategy, fn: Callable[..., PyTree], args: tuple[PyTree, ...]) -> CreatedState:
    """Traces a function that makes a state."""
    if not callable(fn):
        raise StepError(
            f"strategy.init needs a function that makes the state, it got a {type(fn).__name__}. Write "
            "`strategy.init(create_state, key)`; for a tree that is there already, `strategy.init(lambda: params)`."
        )
    check_arguments_not_donated("strategy.init", args, {})
    leaves, treedef = jax.tree.flatten(args)
    dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray | np.generic)]
    treedefs: list[Any] = []
    existing: dict[int, Any] = {}

    def computed(arrays: list[Any]) -> list[jax.Array]:
        filled = list(leaves)
        for i, array in zip(dynamic, arrays, strict=True):
            filled[i] = array
        with scope(strategy):
            state = fn(*jax.tree.unflatten(treedef, filled))
        state = pack(state)
        check_state(state)
        treedefs.append(jax.tree.structure(state))
        made = jax.tree.leaves(state)
        existing.update((i, leaf) for i, leaf in enumerate(made) if not isinstance(leaf, jax.core.Tracer))
        # Arrays that the function only returns stay out of the program, and the arrays that it
        # reads are inputs: XLA folds constants, which took 45 s for 500 MB.
        return [_strong(leaf) for i, leaf in enumerate(made) if i not in existing]

    sharding = strategy.replicated_sharding
    arrays = [leaves[i] for i in dynamic]
    # By shapes, as an array made under another mesh has that mesh in its type.
    closed = jax.make_jaxpr(computed)(arrays if sharding is None else [_unplaced(x) for x in arrays])
    body = graph.body_of(closed)
    # The program returns no buffer of an array that it only reads, so such an array needs no copy.
    read = [isinstance(x, jax.Array) and v not in body.outvars for x, v in zip(arrays, body.invars, strict=True)]
    arrays = [put(x, sharding) if only else onto(x, sharding) for x, only in zip(arrays, read, strict=True)]
    check_not_donated(existing)
    avals = iter(closed.out_avals)
    places = range(treedefs[0].num_leaves)
    typed: list[Any] = [jax.eval_shape(_strong, existing[i]) if i in existing else next(avals) for i in places]
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in typed]
    constants = [onto(x, sharding) for x in closed.consts]
    compute = graph.subfunction(closed, [*body.constvars, *body.invars], body.outvars)
    return CreatedState(treedefs[0], shapes, existing, [*constants, *arrays], compute)


def _unplaced(x: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _strong(x: Any) -> jax.Array:
    """Makes a strongly typed array; a weakly typed leaf would compile a step twice."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.lax.convert_element_type(x, x.dtype)


def onto(x: Any, sharding: Sharding | None) -> jax.Array:
    """Copies an array to a sharding; returns one that is there already."""
    if sharding is None or (isinstance(x, jax.Array) and x.sharding == sharding):
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return put(x, sharding)
    # A copy first: the shard on the array's own device would share its buffer (also with may_alias=False), and donating
    # it would take the array from the caller, or fail where one array stands in two places of the state.
    return put(jnp.copy(x) if isinstance(x, jax.Array) else np.array(x), sharding)


def copied(x: Any, sharding: Sharding | None) -> jax.Array:
    """Copies a leaf that exists to a sharding, strongly typed; a step will donate the copy, and the caller keeps its own."""
    if sharding is None:
        return _strong(jnp.array(x))
    placed = onto(x if isinstance(x, np.ndarray) else _strong(x), sharding)
    return jnp.copy(placed) if placed is x else placed


def adopt_state(strategy: Strategy, state: PyTree) -> PyTree:
    """Lays out a state for a step: strongly typed arrays, no buffer shared, residuals by replica."""
    strategy.need_devices("a step")
    check_not_donated(state)
    check_no_parts(strategy, state)
    residuals = residuals_of(state)
    if residuals is not None:
        check_residuals(strategy, residuals)
        residuals = jax.tree.map(lambda x: onto(x, strategy.batch_sharding), residuals)
        return carrying(adopt_state(strategy, carrying(state, residuals=None)), residuals=residuals)
    check_state(state)
    check_whole(state)
    sharding = strategy.replicated_sharding
    seen: set[int] = set()

    def place(x: Any) -> jax.Array:
        if not isinstance(x, jax.Array) and sharding is not None:
            x = np.asarray(x, jax.dtypes.canonicalize_dtype(np.result_type(x)))  # JAX would compile a cast and a copy
        elif not isinstance(x, jax.Array) or jax.typeof(x).weak_type:
            x = _strong(x)
        x = onto(x, sharding)
        if first_buffer(x) in seen:  # one array in two places of the state could not be donated twice
            x = jnp.copy(x)
        seen.add(first_buffer(x))
        return x

    return jax.tree.map(place, state)


def shapes_in(tree: PyTree, sharding: Sharding | None) -> PyTree:
    """Describes a tree's leaves by shape and dtype, all in one sharding."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        aval = x if isinstance(x, jax.ShapeDtypeStruct | ShardedLeaf) else jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

    return map_leaves(shape, tree)


def batch_shapes(strategy: Strategy, options: StepOptions, batches: PyTree, axes: tuple[int, ...]) -> PyTree:
    """Describes a call's batches, each in the sharding in which a program takes it."""
    if strategy.mesh is None:
        return shapes_in(batches, None)
    if not axes:
        return shapes_in(batches, rows_sharding(strategy, lead=options.num_step_axes))
    return jax.tree.map(shapes_in, batches, rows_shardings(strategy, options, batches, axes))


def replicate(strategy: Strategy, tree: PyTree) -> PyTree:
    """Puts arrays whole on every device of a strategy."""
    whole = strategy.replicated_sharding

    def put_whole(x: Any) -> Any:
        if is_sharded_leaf(x):  # parameters in parts, passed to an evaluation
            return put(whole_on_host(x), whole)
        if isinstance(x, jax.Array) and x.sharding != whole:
            return put(x, whole)
        return x

    return tree if whole is None else map_leaves(put_whole, tree)


def fetch(strategy: Strategy, state: PyTree) -> PyTree:
    """Waits for the steps in flight, compares the replicas, copies to the host: `Strategy.fetch`."""
    check(strategy, state)
    return unpack(jax.tree.map(to_host, user_states(pack(state))))


_checks: weakref.WeakKeyDictionary[Strategy, Any] = weakref.WeakKeyDictionary()


def check(strategy: Strategy, state: PyTree) -> None:
    """Waits for the steps in flight, then compares the replicas: `Strategy.check`."""
    check_no_parts(strategy, state)
    check_not_donated(state)
    in_flight.wait_for(strategy, state)
    compare_replicas(strategy, state)


def compare_replicas(strategy: Strategy, state: PyTree) -> None:
    """Raises ReplicaDivergenceError if the replicas' copies of a leaf differ; names leaves and replicas."""
    if (hashed := hash_replicas(strategy, state)) is not None:
        hashes, paths, _ = hashed
        compare(hashes, paths)


def hash_replicas(strategy: Strategy, state: PyTree) -> tuple[np.ndarray, list[str], list[jax.Array]] | None:
    """Hashes the replicated leaves: `([replicas, leaves], paths, leaves)`; None: nothing to compare."""
    sharding = strategy.replicated_sharding
    if strategy.num_replicas == 1 or sharding is None:
        return None
    replicated = [
        (jax.tree_util.keystr(path) or "the state", leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        # JAX gives arrays of keys another spec of the same layout.
        if isinstance(leaf, jax.Array) and leaf.size and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    ]
    if not replicated:
        return None
    paths, leaves = [path for path, _ in replicated], [leaf for _, leaf in replicated]
    if strategy.num_replicas == len(strategy.devices) and all(map(is_of_this_host, leaves)):
        return number_copies(strategy.devices, leaves), paths, leaves
    if strategy not in _checks:
        _checks[strategy] = make_check(strategy)
    return _checks[strategy](leaves), paths, leaves


def check_rows(batches: PyTree, strategy: Strategy, options: StepOptions, axes: tuple[int, ...] = ()) -> None:
    """Raises BatchError if the rows of batches, each leaf's on its axis, do not divide among replicas and microbatches."""
    n, lead = strategy.num_replicas, options.num_step_axes
    if axes:
        batches = rows_first(batches, axes, lead=lead, shapes_only=True)
    # Of a single batch, the usual case, leaves are named without its place among several.
    batches = batches[0] if isinstance(batches, tuple) and len(batches) == 1 else batches
    check_batch(batches, parts=n, explanation=f"{n} replicas", accumulate=options.accumulate, lead=lead)


def rows_sharding(strategy: Strategy, *, lead: int) -> NamedSharding:
    """Makes the sharding of batches with rows spread over the replicas, with `lead` axes before the rows."""
    assert strategy.mesh is not None
    return NamedSharding(strategy.mesh, PartitionSpec(*(None,) * lead, strategy.axes))


def rows_shardings(strategy: Strategy, options: StepOptions, batches: PyTree, axes: tuple[int, ...]) -> PyTree:
    """Makes the sharding of each leaf of a call's batches, with rows on these axes; empty: the first."""
    lead, treedef = options.num_step_axes, jax.tree.structure(batches)
    axes = axes or (0,) * treedef.num_leaves
    return jax.tree.unflatten(treedef, [rows_sharding(strategy, lead=lead + axis) for axis in axes])


def check_stacking(batches: PyTree, strategy: Strategy, options: StepOptions, axes: tuple[int, ...] = ()) -> None:
    """Raises BatchError if a dataset stacks steps where the step makes one a call, or vice versa; takes shapes too."""
    if strategy.mesh is None:
        return
    lead, leaves = options.num_step_axes, jax.tree.leaves(batches)
    axes = axes or (0,) * len(leaves)
    with_sharding = jax.Array | jax.ShapeDtypeStruct
    for leaf, axis in zip(leaves, axes, strict=True):
        if not isinstance(leaf, with_sharding) or leaf.sharding == rows_sharding(strategy, lead=lead + axis):
            continue
        there = next((i for i in range(len(leaf.shape)) if leaf.sharding == rows_sharding(strategy, lead=i)), None)
        if there is not None and there != lead + axis and (axis or there != int(options.steps_per_call == 1)):
            raise BatchError(
                f"a batch of shape {leaf.shape} has its rows on axis {there} of it, where the step has them on axis "
                f"{lead + axis}. Pass the same `batch_axis` to `jdist.distribute` and to `strategy.distribute_dataset`."
            )
        if there is None or there == lead + axis:
            continue
        raise BatchError(
            f"the step was made with steps_per_call={options.steps_per_call}, the dataset with another value. Pass the "
            "same `steps_per_call` to `jdist.distribute` and to `strategy.distribute_dataset`; and the same `batch_axis`."
        )


def place_batches(strategy: Strategy, options: StepOptions, batches: PyTree, axes: tuple[int, ...]) -> PyTree:
    """Puts the batches of a call on the devices, rows spread over the replicas; raises BatchError if they do not fit."""
    check_stacking(batches, strategy, options, axes)
    check_rows(batches, strategy, options, axes)
    check_fits(batches)
    # A copy: on CPU device_put may show the step the caller's own buffer, which may change while the step runs.
    copies = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.array(x), batches)
    return jax.tree.map(put, copies, rows_shardings(strategy, options, batches, axes))


def share_of(strategy: Strategy) -> ProcessShard:
    """Finds the share of a batch that this process feeds: the rows of its devices, which lie together in the mesh."""
    if strategy.batch_sharding is None or strategy.batch_sharding.is_fully_addressable:
        return WHOLE
    processes = list(dict.fromkeys(device.process_index for device in strategy.devices))
    return ProcessShard(index=processes.index(jax.process_index()), count=len(processes))


class DonationGuard:
    """A guard that copies arguments which share a buffer with the state that their call donates."""

    def __init__(self) -> None:
        # JAX refuses such a call on one device, and ends the process on several. An array that
        # shares no buffer with a state shares none with later states, so one check is enough
        # while it is passed in.
        self._known: dict[int, weakref.ref[jax.Array]] = {}

    def forget(self) -> None:
        """Forgets which arrays were found to share nothing: the next state does not come from the one before."""
        self._known.clear()

    def of(self, tree: PyTree, state: PyTree) -> PyTree:
        """Copies each array of a call's arguments that shares a buffer with the state of the call."""
        arrays = [x for x in jax.tree.leaves(tree, is_leaf=is_sharded_leaf) if isinstance(x, jax.Array)]
        new = [x for x in arrays if (known := self._known.get(id(x))) is None or known() is not x]
        if not new:
            return tree
        own = [x for x in jax.tree.leaves(state, is_leaf=is_sharded_leaf) if isinstance(x, jax.Array)]
        shared = {id(x) for x in new if any(_share(x, leaf) for leaf in own)}
        self._known = {id(x): weakref.ref(x) for x in arrays if id(x) not in shared}
        return map_leaves(lambda x: jnp.copy(x) if id(x) in shared else x, tree) if shared else tree


def _share(a: jax.Array, b: jax.Array) -> bool:
    """Returns whether two arrays have a buffer in common: they are one, or one was made of the other by `jax.device_put`."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        if is_key(a) == is_key(b):
            return False
        a, b = (jax.random.key_data(x) if is_key(x) else x for x in (a, b))  # one may be the key data of the other
        return _share(a, b)
    if is_key(a):
        return _share(jax.random.key_data(a), jax.random.key_data(b))
    if not a.size:
        return False
    (device,) = a.addressable_data(0).devices()
    there = [shard.data for shard in b.addressable_shards if shard.device == device]
    return first_buffer(a) in map(first_buffer, there)


def first_buffer(x: jax.Array) -> int:
    """Finds the address of an array's buffer on the first of its devices; of an array without elements its id."""
    data = jax.random.key_data(x) if is_key(x) else x
    return data.addressable_data(0).unsafe_buffer_pointer() if data.size else id(x)
