"""Measured values as plain JSON: NumPy's as Python's, and NaN and infinities, which JSON lacks, as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

_TEXTS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_plain(value: Any, *, not_finite: Callable[[float], Any] = str) -> Any:
    """Converts numbers, arrays, dicts and lists for `json.dumps`; arrays become lists."""
    # `from_plain` inverts it, except for arrays. `not_finite` converts NaN and infinities.
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: to_plain(each, not_finite=not_finite) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each, not_finite=not_finite) for each in value]
    return not_finite(value) if isinstance(value, float) and not math.isfinite(value) else value


def tree_to_plain(tree: Any) -> dict[str, Any]:
    """Converts a tree of dicts, tuples, lists and arrays for `json.dumps`; `tree_from_plain` inverts it, types included.

    Example:
        >>> tree_to_plain((np.array([1.5, np.inf], np.float32),))
        {'tuple': [{'dtype': 'float32', 'shape': [2], 'values': [1.5, 'inf']}]}
    """
    if isinstance(tree, dict):
        return {"dict": {name: tree_to_plain(each) for name, each in tree.items()}}
    if isinstance(tree, tuple | list):
        return {"tuple" if isinstance(tree, tuple) else "list": [tree_to_plain(each) for each in tree]}
    array = np.asarray(tree)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "values": to_plain(array.reshape(-1))}


def tree_from_plain(plain: dict[str, Any]) -> Any:
    """Inverts `tree_to_plain`; numbers become arrays of no axis.

    Example:
        >>> tree_from_plain({"tuple": [{"dtype": "float32", "shape": [2], "values": [1.5, "inf"]}]})
        (array([1.5, inf], dtype=float32),)
    """
    match plain:
        case {"dict": each}:
            return {name: tree_from_plain(value) for name, value in each.items()}
        case {"tuple": each}:
            return tuple(map(tree_from_plain, each))
        case {"list": each}:
            return list(map(tree_from_plain, each))
    return np.array(from_plain(plain["values"]), plain["dtype"]).reshape(plain["shape"])


def from_plain(value: Any) -> Any:
    """Inverts `to_plain`."""
    if isinstance(value, dict):
        return {name: from_plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [from_plain(each) for each in value]
    return _TEXTS.get(value, value) if isinstance(value, str) else value
