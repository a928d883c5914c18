"""Checks that replicas hold one state: a forgotten all-reduce trains N models, and nothing else notices.

Moving averages of a replica's own rows, as batch normalisation keeps them, are seen in the traced step, before anything is
compiled. What else differs shows in the arrays. `shard_map` trusts an output that is declared replicated, and reading it
returns replica 0's copy: numpy, a reshard and a checkpoint all *heal* the difference silently. So each device hashes its own
copy inside another `shard_map`, and the hashes are compared on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist.core.collective_marks import collective_of
from jdist.core.layout import over_replicas
from jdist.core.strategy import Strategy
from jdist.errors import ReplicaDivergenceError
from jdist.jaxpr import graph, variation
from jdist.jaxpr.affine import SAY_WHAT_IT_IS, AffineRule
from jdist.support.arrays import is_key, to_host
from jdist.typing import PyTree

_BY_HAND = ("ppermute", "all_to_all", "reduce_scatter", "psum_scatter")
_SMALL, _FEW = 2**12, 4  # elements of a small leaf; large leaves of a program
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def _words(leaf: jax.Array) -> jax.Array:
    """Reads the bits of a leaf as a flat uint32 array; two words for each 8-byte element."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bool_ or leaf.dtype.itemsize == 0 or str(leaf.dtype) in ("int2", "uint2", "int4", "uint4"):
        leaf = leaf.astype(jnp.int8)
    bits = jax.lax.bitcast_convert_type(leaf, _UINTS.get(leaf.dtype.itemsize, jnp.uint32))
    return bits.ravel().astype(jnp.uint32)


def hash_leaf(leaf: jax.Array) -> jax.Array:
    """Hashes a leaf in 32 bits (uint32 scalar) that depend on each bit and its position."""
    words = _words(jnp.asarray(leaf))
    # A plain sum misses two elements that swapped places, so each word is first mixed with its
    # position, by the finaliser of MurmurHash3 (public domain). It is one-to-one: one changed word
    # always changes the sum.
    position = jax.lax.iota(jnp.uint32, words.size)
    return _mix(words ^ _mix(position + jnp.uint32(0x9E3779B9))).sum(dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def make_check(strategy: Strategy) -> Callable[[list[jax.Array]], np.ndarray]:
    """Makes the function that hashes every leaf on every replica: `leaves -> uint32 [num_replicas, num_leaves]`."""
    # Compiling takes as long as the program has kernels. Small leaves of one shape are hashed as one array. Large ones, as
    # that would copy them, come a few at a time, by one program for each shape.
    own = PartitionSpec(strategy.axes)

    def of_small(groups: list[list[jax.Array]]) -> jax.Array:
        return jnp.concatenate([jax.vmap(hash_leaf)(jnp.stack(group)) for group in groups])[None]

    small = jax.jit(over_replicas(strategy, of_small, PartitionSpec(), own))
    large = jax.jit(over_replicas(strategy, lambda few: jnp.stack([*map(hash_leaf, few)])[None], PartitionSpec(), own))
    joined = jax.jit(over_replicas(strategy, lambda parts: jnp.concatenate(parts, axis=1), own, own))

    def check(leaves: list[jax.Array]) -> np.ndarray:
        groups: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            groups.setdefault((leaf.size > _SMALL, leaf.shape, leaf.dtype), []).append(i)
        together = [places for (is_large, *_), places in groups.items() if not is_large]
        several = [places for (is_large, *_), places in groups.items() if is_large]
        few = [places[i : i + _FEW] for places in several for i in range(0, len(places), _FEW)]
        parts = [small([[leaves[i] for i in places] for places in together])] if together else []
        parts += [large([leaves[i] for i in places]) for places in few]
        hashes = to_host(parts[0] if len(parts) == 1 else joined(parts))
        return hashes[:, np.argsort([i for places in (*together, *few) for i in places])]

    return check


def is_of_this_host(leaf: jax.Array) -> bool:
    """Returns whether the host can read every copy of an array where it lies."""
    return leaf.is_fully_addressable and all(device.platform == "cpu" for device in leaf.sharding.device_set)


def number_copies(devices: Sequence[Any], leaves: Sequence[jax.Array]) -> np.ndarray:
    """Numbers the different copies of each leaf, as `make_check` hashes them; compiles nothing."""
    numbers = np.zeros((len(devices), len(leaves)), np.uint32)
    for i, leaf in enumerate(leaves):
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        with jax.transfer_guard_device_to_host("allow"):
            shards = {shard.device: np.asarray(shard.data) for shard in data.addressable_shards}
        # Eight bytes at once: of single ones the results of the comparison would be as large as the copies.
        copies = [shards[device].reshape(-1).view(np.uint8) for device in devices]
        copies = [copy.view(np.uint64) if copy.size % 8 == 0 else copy for copy in copies]
        numbers[:, i] = [next(j for j, other in enumerate(copies) if np.array_equal(copy, other)) for copy in copies]
    return numbers


def compare(hashes: np.ndarray, paths: list[str], holders: np.ndarray | None = None) -> None:
    """Refuses differing copies of the same arrays; `hashes` is uint32 [copies, arrays]."""
    # `holders`, int [copies, arrays], is the replica that holds each copy; None: the copy's index.
    # If one replica holds all copies, they are on its devices.
    differing = np.flatnonzero((hashes != hashes[0]).any(axis=0))
    if not differing.size:
        return
    if holders is None:
        holders = np.broadcast_to(np.arange(len(hashes))[:, None], hashes.shape)
    names, n = tuple(paths[i] for i in differing), int(holders.max()) + 1
    differences = [_who_differs(hashes[:, i].tolist(), holders[:, i].tolist(), n) for i in differing]
    lines = [f"  {name}: {who}" for name, (_, who) in zip(names[:10], differences[:10], strict=True)]
    if len(names) > 10:
        lines.append(f"  and {len(names) - 10} more leaves")
    raise ReplicaDivergenceError(
        f"{len(names)} of {len(paths)} leaves of the state differ between the {n} replicas:\n"
        + "\n".join(lines)
        + "\nSomething local to a replica reached the state. Take gradients by `jdist.value_and_grad` (not `jax.`; of nnx "
        "modules by `jdist.nnx.value_and_grad`), pass batch statistics and counters through "
        '`jdist.aggregate(x, "mean")`, and gradients by per-replica values through `jdist.all_reduce(grads, "sum")`.',
        names,
        tuple(replicas for replicas, _ in differences),
    )


def _who_differs(hashes: list[int], holders: list[int], n: int) -> tuple[tuple[int, ...], str]:
    """Finds the replicas outside the majority, and says so in words; without a majority these are all that hold a copy."""
    groups: dict[int, list[int]] = {}
    for replica, value in zip(holders, hashes, strict=True):
        groups.setdefault(value, []).append(replica)
    most = max(groups.values(), key=len)
    everyone = tuple(sorted(set(holders)))
    if any(set(a) & set(b) for a, b in itertools.combinations(groups.values(), 2)):
        inside = sorted(replica for replica in everyone if sum(replica in group for group in groups.values()) > 1)
        return tuple(inside), f"the devices of replicas {inside} differ among each other"
    if 2 * len(most) > len(hashes):
        odd = tuple(sorted(set(holders) - set(most)))
        return odd, f"replicas {list(odd)} differ from the majority"
    if len(groups) == len(everyone):
        return everyone, "all replicas differ" if len(everyone) == n else f"replicas {list(everyone)} differ"
    alike = (sorted(set(group)) for group in groups.values())
    return everyone, f"no majority, the same on {' and on '.join(map(str, alike))}"


def check_averages_combined(
    closed: Any,
    old: Sequence[Any],  # the arguments that hold the state's leaves
    new: Sequence[Any],  # the results that hold the new state's leaves
    batch: Sequence[Any],  # the arguments that hold a replica's rows
    state: PyTree,  # the new state, arrays or shapes
    sizes: tuple[int, int],  # number of replicas, and of microbatches of each
) -> None:
    """Refuses a replicated state with moving averages that each replica computes from its own rows."""
    # Other differences are found by comparing the replicas after a step. The trace of a step shows
    # a moving average before anything is compiled.
    # With its own collectives a step may combine values in a way that the check cannot see.
    by_hand = [v for eqn in graph.body_of(closed).eqns if _is_by_hand(eqn) for v in eqn.outvars]
    varying = variation.varying(closed, batch) - variation.of_one_microbatch(closed, by_hand)
    paths = jax.tree_util.tree_leaves_with_path(state)
    if len(paths) != len(old) or len(old) != len(new):
        return  # the state has changed its tree, which is refused elsewhere
    own = [
        (jax.tree_util.keystr(path) or "the state", before, after)
        for (path, _), before, after in zip(paths, old, new, strict=True)
        if graph.is_in(after, varying) and jnp.issubdtype(after.aval.dtype, jnp.floating)
    ]
    rules = [(name, AffineRule(closed, before, after, sizes, rows=batch)) for name, before, after in own]
    slopes = [(name, slope, rule) for name, rule in rules for slope in [rule.of_program()]]
    moving = [each for each in slopes if isinstance(each[1], float | int) and 0 < each[1] < 1]
    if not moving:
        return
    (name, slope, rule), *others = moving
    more = f", and {len(others)} more like it," if others else ""
    # If parameters differ as well, the optimiser's gradients do: it keeps moving averages of these.
    if len(moving) < len(own):
        remedy = (
            "Take gradients by `jdist.value_and_grad` (not `jax.`; of nnx modules by `jdist.nnx.value_and_grad`). If it is not "
            f"the optimiser's: {SAY_WHAT_IT_IS}"
        )
    elif not rule.is_mean:
        remedy = SAY_WHAT_IT_IS
    else:
        remedy = (
            'Bring it together: `jdist.aggregate(new, "mean")`, or `aggregation={"batch_stats": "mean"}` of '
            "`jdist.TrainState.create`; or give the layer the rows of all replicas, "
            "`BatchNorm(axis_name=jdist.replica_axes())`."
        )
    raise ReplicaDivergenceError(
        f"state leaf {name}{more} becomes {slope:.6g} times its old value and something computed from a replica's own rows: a "
        "moving average, such as batch normalisation and optimisers keep, which the replicas would hold different values of. "
        f"{remedy}",
        tuple(name for name, *_ in moving),
        tuple(tuple(range(sizes[0])) for _ in moving),
    )


def _is_by_hand(eqn: Any) -> bool:
    return collective_of(eqn) is None and graph.uses_primitive(eqn, *_BY_HAND)
