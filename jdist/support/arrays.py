"""Arrays on the devices of several processes: puts them there, reads them back, and refuses donated ones.

With one process these are `jax.device_put` and `np.array`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jdist.errors import DonatedStateError

_GO_ON = "Go on with the state that the call returned, or with `train_step.last_state`; `donate=False` keeps old states usable."
_KEEP_A_COPY = (
    "A call of a step takes its state's arrays, wherever else they are kept: keep a copy, `jax.tree.map(jnp.copy, "
    "state.params)`, or distribute that step with `donate=False`."
)


def promote_types(a: Any, b: Any) -> np.dtype:
    """Promotes two dtypes as `jnp.promote_types` does, also under jax_numpy_dtype_promotion="strict"."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def check_not_donated(tree: Any, what: str = "the state passed in", remedy: str = _GO_ON) -> None:
    """Refuses a tree with arrays that an earlier call has consumed."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise DonatedStateError(
                f"{what} was donated to an earlier call, its buffers are gone (first: "
                f"{jax.tree_util.keystr(path) or what.removesuffix(' passed in')}). {remedy}"
            )


def check_arguments_not_donated(call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses arguments of `call` with arrays that an earlier call has consumed."""
    named = [(f"argument {i}", value) for i, value in enumerate(args, start=1)]
    check_values_not_donated(call, [*named, *((f"keyword argument `{key}`", value) for key, value in kwargs.items())])


def check_values_not_donated(call: str, values: list[tuple[str, Any]]) -> None:
    """Refuses named values with such arrays; see `check_arguments_not_donated`."""
    for name, value in values:
        check_not_donated(value, f"{name} of {call}", _KEEP_A_COPY)


def is_key(x: Any) -> bool:
    """Returns whether `x` is an array of typed PRNG keys, which NumPy cannot hold, or the shape of one."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def put(x: Any, sharding: Sharding | None) -> jax.Array:
    """Puts an array into a sharding; every process has all of it, and keeps its devices' part."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    # It is spread over the processes already.
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x if x.sharding == sharding else resharded(sharding)(x)
    if is_key(x):
        return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    whole = np.asarray(x)
    whole = whole.astype(jax.dtypes.canonicalize_dtype(whole.dtype), copy=False)
    # A copy for each device: on CPU several would share one buffer, which cannot be donated.
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index].copy(), dtype=whole.dtype)


@functools.cache
def resharded(sharding: Sharding) -> Callable[[Any], Any]:
    """Makes the function that moves arrays of several processes into a sharding; all of them have to call it."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def put_rows(x: Any, sharding: NamedSharding, num_rows: int, axis: int) -> jax.Array:
    """Puts an array from each process's rows, those of its own devices, in order."""
    # `num_rows` counts the rows of all processes together.
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if is_key(x):
        rows = put_rows(jax.random.key_data(x), sharding, num_rows, axis)
        return jax.random.wrap_key_data(rows, impl=jax.random.key_impl(x))
    shape = (*x.shape[:axis], num_rows, *x.shape[axis + 1 :])
    return jax.make_array_from_process_local_data(sharding, x, shape)


def to_host(x: Any) -> Any:
    """Copies an array to a NumPy array; a typed PRNG key stays a key array."""
    if is_key(x):
        return jax.random.wrap_key_data(jnp.asarray(to_host(jax.random.key_data(x))), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        # Its parts are gathered, so all processes must call this.
        if not x.is_fully_replicated:
            return np.array(multihost_utils.process_allgather(x, tiled=True))
        x = x.addressable_data(0)
    with jax.transfer_guard_device_to_host("allow"):  # this is asked for, unlike what the guard is to find
        return np.array(x)  # a copy: np.asarray could show a buffer that a later step overwrites


def is_array(x: Any) -> bool:
    """Returns whether a leaf is an array or a number, no function that a state carries along."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def tree_to_host(tree: Any) -> Any:
    """Copies the arrays of a tree as `to_host`; other leaves stay."""
    return jax.tree.map(lambda x: to_host(x) if is_array(x) else x, tree)


def take_rows(x: jax.Array, real: np.ndarray | None) -> jax.Array:
    """Takes the rows of an array where `real`, bool [rows], is true; None: all rows."""
    sharding = x.sharding
    if sharding.is_fully_addressable or not isinstance(sharding, NamedSharding):
        return x if real is None or real.all() else x[real]
    # Every process gets the rows of all.
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    x = resharded(whole)(x)
    return x if real is None or real.all() else _row_taker(whole)(x, put(np.flatnonzero(real), whole))


@functools.cache
def _row_taker(sharding: Sharding) -> Callable[[Any, Any], Any]:
    return jax.jit(lambda x, rows: x[rows], out_shardings=sharding)


def local_rows(x: Any, axis: int = 0) -> Any:
    """Copies to the host the rows along `axis` that this process's devices hold, as `to_host`, without an exchange."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return to_host(x)
    if is_key(x):
        rows = local_rows(jax.random.key_data(x), axis)
        return jax.random.wrap_key_data(jnp.asarray(rows), impl=jax.random.key_impl(x))
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[axis].start or 0)
    return np.concatenate([np.array(shard.data) for shard in shards], axis)
