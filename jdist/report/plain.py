"""Measured values as JSON holds them: numpy's as Python's, and what is no finite number, which JSON lacks, as text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_TEXTS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_plain(value: Any) -> Any:
    """A value of numbers, arrays, dicts and lists for `json.dumps`; `from_plain` gives it back, arrays as lists.

    Example:
        >>> to_plain({"loss": float("nan"), "counts": np.arange(2)})
        {'loss': 'nan', 'counts': [0, 1]}
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: to_plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(value: Any) -> Any:
    """What `to_plain` was given.

    Example:
        >>> from_plain({"loss": "nan", "counts": [0, 1]})
        {'loss': nan, 'counts': [0, 1]}
    """
    if isinstance(value, dict):
        return {name: from_plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [from_plain(each) for each in value]
    return _TEXTS.get(value, value) if isinstance(value, str) else value
