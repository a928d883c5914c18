"""States of other libraries' iterators as values that JSON can hold."""

from __future__ import annotations

import base64
import importlib
import sys
from typing import Any

import numpy as np

from jdist.errors import DatasetError

_TYPE = "__type__"


def to_plain(value: Any, kind: str, path: str = "") -> Any:
    """Converts a tree of plain values, bytes, arrays and torch tensors to JSON values."""
    torch = sys.modules.get("torch")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return {_TYPE: "bytes", "data": base64.b64encode(value).decode()}
    if torch is not None and isinstance(value, torch.Tensor):
        return {**_of_array(value.detach().cpu().numpy()), _TYPE: "tensor"}
    if isinstance(value, np.ndarray | np.generic) and not np.asarray(value).dtype.hasobject:
        return _of_array(np.asarray(value))
    if isinstance(value, list):
        return [to_plain(each, kind, f"{path}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, tuple):
        return {_TYPE: "tuple", "items": to_plain(list(value), kind, path)}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _TYPE not in value:
            return {key: to_plain(each, kind, f"{path}[{key!r}]") for key, each in value.items()}
        return {_TYPE: "dict", "items": [to_plain(list(pair), kind, path) for pair in value.items()]}
    raise DatasetError(
        f"the position of the {kind} cannot be saved: its state has a {type(value).__name__} at {path or 'the top'}. Let "
        "`state_dict()` return numbers, texts, bytes, arrays, tensors, lists and dicts alone"
    )


def from_plain(value: Any) -> Any:
    """Undoes `to_plain`."""
    if isinstance(value, list):
        return [from_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TYPE)
    if kind is None:
        return {key: from_plain(each) for key, each in value.items()}
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind == "tuple":
        return tuple(from_plain(value["items"]))
    if kind == "dict":
        return dict(from_plain(pair) for pair in value["items"])
    array = np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"]).copy()
    if kind == "tensor":
        return importlib.import_module("torch").from_numpy(array)
    return array if value["shape"] or kind != "array" else array[()]


def _of_array(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {_TYPE: "array", "dtype": str(array.dtype), "shape": list(array.shape), "data": data}
