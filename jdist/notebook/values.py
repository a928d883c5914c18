"""Files of plain values, and of arrays in them: the arguments and the result of a function in another process.

A file is NumPy's .npz without pickled objects: arrays, and one JSON text with their places in the value.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

PLAIN = "None, bool, int, float, str, bytes, NumPy arrays, and lists, tuples and dicts (also of collections) of these"
_TREE = "tree"
_ATOMS = (type(None), bool, int, float, str)
_DICTS = {each.__name__: each for each in (Counter, OrderedDict)}
_FACTORIES = {each.__name__: each for each in (bool, int, float, str, bytes, list, tuple, dict)} | {"": None} | _DICTS


class NotPlain(Exception):
    """A value cannot be written; `path` is its place in the whole, `["weights"][0]`."""

    def __init__(self, path: str, value: object):
        super().__init__(path)
        self.path, self.value = path, value


def write(file: Path, value: Any, *, jax_arrays: bool) -> None:
    """Writes a plain value to an .npz file; with `jax_arrays` JAX arrays as NumPy's."""
    arrays: dict[str, np.ndarray] = {}
    tree = json.dumps(_plain(value, "", arrays, jax_arrays))
    with open(file, "wb") as opened:
        np.savez(opened, allow_pickle=False, **{_TREE: np.array(tree)}, **arrays)


def read(file: Path) -> Any:
    """Reads the value from a file of `write`."""
    with np.load(file, allow_pickle=False) as arrays:
        return _value(json.loads(str(arrays[_TREE])), arrays)


def check(value: Any, *, jax_arrays: bool) -> None:
    """Raises NotPlain for a value that `write` would refuse."""
    _plain(value, "", {}, jax_arrays)


def kind(value: object) -> str:
    """Names the type of a value for errors: "a jax.Array", "a flax.linen.Dense"."""
    if is_jax_array(value):
        return "a jax.Array"
    of = type(value)
    name = of.__qualname__ if of.__module__ in ("builtins", "__main__") else f"{of.__module__}.{of.__qualname__}"
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def is_jax_array(value: object) -> bool:
    """Whether it is an array of JAX, without importing JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def _plain(value: Any, path: str, arrays: dict[str, np.ndarray], jax_arrays: bool) -> Any:
    """Makes a value for JSON, which names the arrays that it adds to `arrays`."""
    if type(value) in _ATOMS:
        return value
    if type(value) in (list, tuple):
        entries = [_plain(x, f"{path}[{i}]", arrays, jax_arrays) for i, x in enumerate(value)]
        return entries if type(value) is list else {"tuple": entries}
    if isinstance(value, dict) and (form := _form_of(value)) is not None:
        entries = [
            [_plain(k, path, arrays, False), _plain(v, f"{path}[{k!r}]", arrays, jax_arrays)] for k, v in value.items()
        ]
        return {"dict": entries} | form
    if type(value) is bytes:
        return {"bytes": value.decode("latin-1")}
    if jax_arrays and is_jax_array(value):
        value = _on_host(value, path)
    if isinstance(value, np.ma.MaskedArray):  # it would lose its mask
        raise NotPlain(path, value)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array, name = np.asarray(value), f"array_{len(arrays)}"
        is_registered = array.dtype.isbuiltin == 2  # bfloat16 and other types that NumPy can only write as their bytes
        arrays[name] = array.reshape(-1).view(np.uint8) if is_registered else array
        where = {"array": name, "is": "array" if isinstance(value, np.ndarray) else "scalar"}
        return where | ({"dtype": array.dtype.name, "shape": list(array.shape)} if is_registered else {})
    raise NotPlain(path, value)


def _form_of(value: dict) -> dict[str, str] | None:
    """Describes the type of a dict for JSON; None for one that is not known."""
    if isinstance(value, defaultdict):
        factory = value.default_factory
        known = type(value) is defaultdict and factory in _FACTORIES.values()
        return {"type": "defaultdict", "of": "" if factory is None else factory.__name__} if known else None
    if type(value) in _DICTS.values():
        return {"type": type(value).__name__}
    return {} if type(value) is dict else None


def _on_host(value: Any, path: str) -> np.ndarray:
    import jax

    is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    if is_key or not (value.is_fully_addressable or value.is_fully_replicated):
        raise NotPlain(path, value)
    return np.asarray(value)


def _value(plain: Any, arrays: Any) -> Any:
    if isinstance(plain, list):
        return [_value(x, arrays) for x in plain]
    if not isinstance(plain, dict):
        return plain
    if "tuple" in plain:
        return tuple(_value(x, arrays) for x in plain["tuple"])
    if "dict" in plain:
        entries = {_value(k, arrays): _value(v, arrays) for k, v in plain["dict"]}
        if "of" in plain:
            return defaultdict(_FACTORIES[plain["of"]], entries)
        return _DICTS[plain["type"]](entries) if "type" in plain else entries
    if "bytes" in plain:
        return plain["bytes"].encode("latin-1")
    array = arrays[plain["array"]]
    if "dtype" in plain:
        import jax.numpy as jnp  # knows the names of its types

        array = array.view(jnp.dtype(plain["dtype"])).reshape(plain["shape"])
    return array if plain["is"] == "array" else array[()]
