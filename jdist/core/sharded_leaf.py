"""Arrays of the state in parts, one with each replica: in the devices' memory, or in that of their hosts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jdist.core.context import current_trace
from jdist.errors import DeviceError, StepError
from jdist.support.arrays import to_host
from jdist.support.leaves import describe
from jdist.typing import PyTree

_FETCH = "outside of a step, compute with what `strategy.fetch(state)` returns; a step gets the array itself"
_CLOSED_OVER = (
    'a step closes over it, and gets only its arguments as arrays. Pass it to the step with the role "replicated", or as a '
    "second state"
)

Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ShardedLeaf:
    """A state array that the replicas hold in parts; it takes the array's place in the state."""

    # A step gets the array itself. Outside of a step, compute with `strategy.fetch(x)` or
    # `np.asarray(x)`, and map over `strategy.fetch(state)`: `jax.tree.map` sees `stored`, padding
    # included. `stored` is the array, padded along the axis that is cut, or its elements in
    # row-major order, [rows, columns] or [elements], padded on the first axis.

    stored: Any  # a jax.Array, or a ShapeDtypeStruct where only shapes are known
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def kept(self) -> str:
        """Describes where it is kept."""
        return describe("", self).kept

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * self.dtype.itemsize

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(f"an array in parts has no {name!r}: {_FETCH}")

    def __jax_array__(self) -> jax.Array:
        mend = _CLOSED_OVER if current_trace() is not None else _FETCH
        raise StepError(f"JAX cannot compute with a {self.dtype} array of shape {self.shape} in parts: {mend}")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if isinstance(self.stored, Tracer):
            self.__jax_array__()
        if isinstance(self.stored, jax.ShapeDtypeStruct):
            raise StepError(
                f"of a {self.dtype} array of shape {self.shape} in parts only the shape is known: `jax.eval_shape` makes no "
                "values."
            )
        if copy is False:
            raise ValueError("an array in parts is joined into a new one: `copy=False` is not possible, leave it out.")
        if isinstance(self.stored, jax.Array) and not self.stored.is_fully_addressable:
            raise DeviceError(
                f"a {self.dtype} array of shape {self.shape} is in parts on the devices of several processes: a process alone "
                "cannot read it. Call `strategy.fetch(x)` on all of them, which gathers it."
            )
        whole = restored(np.array(self.stored), self.shape)
        return whole if dtype is None else whole.astype(dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self)[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

    def __repr__(self) -> str:
        # JAX rebuilds registered dataclasses with anything in place of their arrays.
        if not isinstance(self.stored, jax.Array) or isinstance(self.stored, Tracer) or self.stored.size < self.size:
            return f"ShardedLeaf({self.stored!r}, shape={self.shape})"
        return f"ShardedLeaf({self.dtype}{list(self.shape)} {self.kept}; strategy.fetch gives the array)"


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow")
_OPERATORS = (*_BINARY, *(f"r{name}" for name in _BINARY), "neg", "pos", "abs", "lt", "le", "gt", "ge")
for _name in _OPERATORS:  # Python looks them up in the class, past `__getattr__`
    setattr(ShardedLeaf, f"__{_name}__", lambda self, *_: self.__jax_array__())


def is_sharded_leaf(node: object) -> bool:
    """Returns whether `node` is a `ShardedLeaf`, for use as `is_leaf`."""
    return isinstance(node, ShardedLeaf)


def whole_on_host(x: Any) -> Any:
    """Copies an array, in parts or not, to the host whole; `to_host` of the whole array."""
    return restored(to_host(x.stored), x.shape) if is_sharded_leaf(x) else to_host(x)


def restored(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Restores the array of a stored one, on the host."""
    if stored.ndim == len(shape):
        return stored[tuple(map(slice, shape))]
    return stored.reshape(-1)[: math.prod(shape)].reshape(shape)


def spread_like(array: np.ndarray, like: ShardedLeaf) -> ShardedLeaf:
    """Spreads an array on the host as another of its shape is; every process copies the parts of its own devices."""
    shape, sharding = like.stored.shape, like.stored.sharding
    stored = jax.make_array_from_callback(shape, sharding, lambda at: _part(array, shape, at), dtype=array.dtype)
    return ShardedLeaf(stored, like.shape)


def _part(array: np.ndarray, stored: tuple[int, ...], at: Any) -> np.ndarray:
    """Copies a part out of an array of stored shape `stored`, padded with zeros."""
    bounds = [each.indices(size)[:2] for each, size in zip(at, stored, strict=True)]
    part = np.zeros([last - first for first, last in bounds], array.dtype)
    if len(stored) == array.ndim:
        real = array[tuple(slice(*each) for each in bounds)]
        part[tuple(map(slice, real.shape))] = real
    else:
        first, last = (bound * math.prod(stored[1:]) for bound in bounds[0])
        real = array.reshape(-1)[first:last]
        part.reshape(-1)[: real.size] = real
    return part


def map_leaves(change: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps leaves as `jax.tree.map`, with each `ShardedLeaf` as one leaf."""
    return jax.tree.map(change, tree, *rest, is_leaf=is_sharded_leaf)
