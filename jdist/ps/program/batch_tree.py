"""Describes the tree of a batch by plain values that travel: dicts, lists and tuples of shapes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jdist.errors import DatasetError, WireError


def to_structure(spec: Any) -> Any:
    """Describes a tree of `jax.ShapeDtypeStruct` by plain dicts, lists and tuples."""
    if isinstance(spec, dict):
        if not all(isinstance(key, str) for key in spec):
            raise DatasetError("a batch that is made on a worker must have names (str) as keys")
        return {"dict": {key: to_structure(x) for key, x in spec.items()}}
    if type(spec) in (list, tuple):
        return {type(spec).__name__: [to_structure(x) for x in spec]}
    if isinstance(spec, jax.ShapeDtypeStruct):
        return {"array": [list(spec.shape), np.dtype(spec.dtype).name]}
    raise DatasetError(
        f"a batch that is made on a worker has a {type(spec).__name__} in it; it may hold dicts, lists, tuples and arrays."
    )


def from_structure(plain: Any) -> Any:
    """Makes the tree of `jax.ShapeDtypeStruct` that plain values describe."""
    if not isinstance(plain, dict) or len(plain) != 1:
        raise WireError("a node of a batch must be a map of one entry")
    ((kind, value),) = plain.items()
    if kind == "dict" and isinstance(value, dict):
        return {key: from_structure(x) for key, x in value.items()}
    if kind in ("list", "tuple") and isinstance(value, list):
        nodes = [from_structure(x) for x in value]
        return nodes if kind == "list" else tuple(nodes)
    if kind == "array" and isinstance(value, list) and len(value) == 2:
        return jax.ShapeDtypeStruct(tuple(value[0]), np.dtype(value[1]))
    raise WireError("a node of a batch must be a dict, a list, a tuple or an array")
