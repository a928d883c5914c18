"""The leaves of a tree: where each is kept, what it takes of a device's memory, and its path; nothing is computed or copied.

Patterns see a path as names and numbers with "/" between, `params/block_0/kernel`.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jdist.support.table import Table
from jdist.support.words import closest
from jdist.typing import PyTree

Device = Any  # jax.Device, which type checkers take for a variable
_HEADER = ("leaf", "array", "bytes", "how it is kept", "bytes a device")
_MOST_LEAVES = 100
# A key as `jax.tree_util.keystr` writes it: `.name`, `['key']`, `[0]`, `[<flat index 0>]`.
_KEY = re.compile(r"""\.(\w+)|\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]|\[<flat index (\d+)>\]|\[([^\[\]]*)\]""")


@dataclass(frozen=True)
class Way:
    """A way in which arrays are kept."""

    how: str  # "whole on each of 8 devices", "in 8 parts over replica"
    num_parts: int = 1
    part_of: Mapping[Device, int] = field(default_factory=dict, hash=False)  # empty for what no device holds
    on_host: bool = False


_ON_HOST = Way("on the host, as NumPy arrays or numbers", on_host=True)


@dataclass(frozen=True)
class Leaf:
    """One leaf of a tree."""

    path: str
    array: str  # its dtype and shape
    num_bytes: int  # of the full array
    kept: str  # where, in words
    part_bytes: int = 0  # of one device's part, with padding
    way: Way | None = None  # None if no place has it
    of_optimizer: bool = False

    @property
    def bytes_per_device(self) -> int:
        """Bytes in each device's own memory."""
        return 0 if self.way is None or self.way.on_host else self.part_bytes


def leaves_of(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[Leaf]:
    """Describes the leaves of a tree; `is_leaf` finds arrays in parts, which have the field `stored`."""
    return [describe(path_of(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_leaf)]


def path_of(path: Any) -> str:
    """Writes the path of a leaf."""
    return jax.tree_util.keystr(path).removeprefix(".") or "itself"


def describe(path: str, leaf: Any) -> Leaf:
    """Describes a leaf by what JAX says of it, also if it is deleted, traced or a shape."""
    if isinstance(leaf, bool | int | float | complex):
        leaf = np.asarray(leaf, jnp.result_type(leaf))
    if not hasattr(leaf, "dtype"):
        return Leaf(path, type(leaf).__name__, 0, "on the host, a Python value")
    stored, itemsize = getattr(leaf, "stored", leaf), itemsize_of(leaf.dtype)
    array, num_bytes = f"{leaf.dtype}{list(leaf.shape)}", math.prod(leaf.shape) * itemsize
    if isinstance(stored, Tracer):
        return Leaf(path, array, num_bytes, "traced: known when the program runs")
    if isinstance(stored, np.ndarray | np.generic):
        return Leaf(path, array, num_bytes, "on the host", num_bytes, _ON_HOST)
    sharding = stored.sharding
    if sharding is None:
        return Leaf(path, array, num_bytes, "only its shape is known")
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return Leaf(path, array, num_bytes, f"{sharding.spec} of an abstract mesh")
    way, part = _way(sharding, stored.shape), sharding.shard_shape(stored.shape)
    kept = way.how + (f": {list(part)} each" if way.num_parts > 1 else "")
    kept += f", stored as {list(stored.shape)}" if stored.shape != leaf.shape else ""
    if isinstance(stored, jax.Array) and stored.is_deleted():
        return Leaf(path, array, num_bytes, f"deleted (donated to a step): was {kept}")
    return Leaf(path, array, num_bytes, kept, math.prod(part) * itemsize, way)


def table_of(leaves: Sequence[Leaf], title: str) -> Table:
    """Makes the table of leaves; of many it has the first."""
    rows = [(x.path, x.array, f"{x.num_bytes:,}", x.kept, f"{x.bytes_per_device:,}") for x in leaves[:_MOST_LEAVES]]
    if len(leaves) > _MOST_LEAVES:
        rows.append((f"… {len(leaves) - _MOST_LEAVES:,} more", "", "", "", ""))
    total, held = sum(x.num_bytes for x in leaves), sum(x.bytes_per_device for x in leaves)
    return Table(title, [*rows, ("all", "", f"{total:,}", f"{held / max(1, total):.1%} of it", f"{held:,}")], _HEADER)


def itemsize_of(dtype: Any) -> int:
    """Counts the bytes of an element; of a PRNG key those of its data."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return data.size * data.dtype.itemsize
    return dtype.itemsize


def _way(sharding: Sharding, shape: tuple[int, ...]) -> Way:
    if isinstance(sharding, NamedSharding):
        entries = [(each,) if isinstance(each, str) else each or () for each in sharding.spec]
        axes = tuple(axis for entry in entries for axis in entry if sharding.mesh.shape[axis] > 1)
        return _way_over(sharding.mesh, axes, sharding.memory_kind)
    return _in_words(_parts_by_index(sharding, shape), "", sharding.memory_kind)


def _parts_by_index(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, int]:
    """Numbers the parts of an array by their order in it."""
    starts = {
        device: tuple(each.start or 0 for each in index)
        for device, index in sharding.devices_indices_map(shape).items()
    }
    numbers = {start: i for i, start in enumerate(sorted(set(starts.values())))}
    return {device: numbers[start] for device, start in starts.items()}


@functools.lru_cache(64)
def _way_over(mesh: Mesh, axes: tuple[str, ...], memory_kind: str | None) -> Way:
    """Numbers the parts of an array that is divided over mesh axes, in the order of its parts."""
    sizes = [mesh.shape[axis] for axis in axes]
    at = [np.indices(mesh.devices.shape)[mesh.axis_names.index(axis)] for axis in axes]
    numbers = np.ravel_multi_index(at, sizes) if axes else np.zeros(mesh.devices.shape, int)
    part_of = dict(zip(mesh.devices.flat, map(int, numbers.flat), strict=True))
    named = [f"{axis}={n}" for axis, n in zip(axes, sizes, strict=True)] if len(axes) > 1 else axes
    return _in_words(part_of, " x ".join(named), memory_kind)


def _in_words(part_of: Mapping[Device, int], over: str, kind: str | None) -> Way:
    one = next(iter(part_of))
    on_host = kind is not None and kind.endswith("host") and kind != one.default_memory().kind
    num_parts = 1 + max(part_of.values())
    copies = len(part_of) // num_parts
    if num_parts > 1:
        how = f"in {num_parts:,} parts" + (f" over {over}" if over else "")
    else:
        how = f"whole on {one.platform}:{one.id}" if copies == 1 else f"whole on each of {copies:,} devices"
    how += " in host memory" if on_host else ""
    how += f", {copies:,} copies of each" if copies > 1 and num_parts > 1 else ""
    return Way(how, num_parts, part_of, on_host)


def join_path(path: Iterable[Any]) -> str:
    """Writes a path of JAX's keys as a pattern sees it."""
    return "/".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path)


def parse_path(written: str) -> str:
    """Converts a path that `jax.tree_util.keystr` wrote to one as a pattern sees it.

    Example:
        >>> parse_path(".params['block_0'][1].scale")
        'params/block_0/1/scale'
    """
    return "/".join(names_in(written))


def names_in(written: str) -> tuple[str, ...]:
    """Lists the names in a path that `jax.tree_util.keystr` wrote.

    Example:
        >>> names_in(".params['a/b'][1]")
        ('params', 'a/b', '1')
    """
    return tuple(
        ast.literal_eval(quoted) if quoted else name or index or other
        for name, quoted, index, other in _KEY.findall(written)
    )


def matches_path(pattern: str, path: str) -> bool:
    """Returns whether a regular expression matches a path or its end, from the name of a node on."""
    return re.fullmatch(rf"(?:.*/)?(?:{pattern})", path) is not None


def nearest_path(pattern: str, paths: Iterable[str]) -> str | None:
    """Finds the path with the end nearest to a pattern; None without paths."""
    ends = {"/".join(path.split("/")[-1 - pattern.count("/") :]): path for path in reversed(list(paths))}
    near = closest(pattern, ends, cutoff=0)
    return None if near is None else ends[near]
