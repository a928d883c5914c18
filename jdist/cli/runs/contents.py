"""`jdist checkpoint`: what a checkpoint holds, without reading its arrays."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jdist.checkpoint import folder as disk
from jdist.checkpoint.bucket import BucketPath, open_path
from jdist.checkpoint.fit import name_of
from jdist.checkpoint.orbax import list_orbax
from jdist.errors import CheckpointError
from jdist.support.table import Table
from jdist.support.words import size
from jdist.weights.files import Reader, has_files

_TIMEOUT_S = 60.0
_MOST_LETTERS = 400  # longest text printed of the saved position, which may have a state for each worker


def show(path: str) -> int:
    """Prints the leaves and metadata of a checkpoint (the newest in a folder), a safetensors file or an Orbax tree."""
    try:
        return _show(path)
    except BrokenPipeError:  # of what is printed
        raise
    except OSError as error:  # no permission, a loop of links, a name that is too long
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _show(path: str) -> int:
    place = open_path(path, _TIMEOUT_S)
    is_file = isinstance(place, Path) and place.is_file()
    if there := [] if is_file else _checkpoints(place):
        shown, body = _newest(there)
        steps = ", ".join(f"{step:,}" for step in sorted(map(disk.step_of, there)))
        print(f"{shown}: step {body['step']:,}" + (f"; there are steps {steps}" if len(there) > 1 else ""))
        for name in ("data", "metrics", "metadata"):
            text = json.dumps(body[name])
            print(f"{name}: {text if len(text) <= _MOST_LETTERS else f'{text[:_MOST_LETTERS]}...'}")
        leaves = [{**leaf, "path": name_of(leaf["path"])} for leaf in body["leaves"]]
    elif is_file or (isinstance(place, Path) and has_files(place)):
        with Reader(place) as reader:
            tensors = reader.tensors.items()
            leaves = [{"path": name, "shape": each.shape, "dtype": str(each.numpy_dtype)} for name, each in tensors]
        print(f"{place}: safetensors")
    elif isinstance(place, BucketPath):
        raise CheckpointError(f"{place}: found no jdist checkpoint")
    else:
        try:
            found, leaves = list_orbax(path)
        except CheckpointError as error:
            raise CheckpointError(f"no jdist checkpoint, no safetensors, and no Orbax tree: {error}") from error
        print(f"{found}: an Orbax checkpoint")
    sizes = [_num_bytes(leaf) for leaf in leaves]
    rows = [
        (leaf["path"], leaf["dtype"], str(list(leaf["shape"])), f"{num_bytes:,}")
        for leaf, num_bytes in zip(leaves, sizes, strict=True)
    ]
    print(f"\n{Table('', rows, ('leaf', 'dtype', 'shape', 'bytes'))}")
    print(f"\n{len(leaves):,} {'leaf' if len(leaves) == 1 else 'leaves'}, {size(sum(sizes))}")
    return 0


def _checkpoints(place: disk.Place) -> list[disk.Place]:
    """Lists the checkpoints in a run folder or a folder of checkpoints; of one of them that alone."""
    if disk.NAME.fullmatch(place.name):
        return [place]
    return disk.list_committed(place / "checkpoints") or disk.list_committed(place)


def _newest(there: list[disk.Place]) -> tuple[disk.Place, dict[str, Any]]:
    """Reads the newest manifest that can be read, as resuming does; prints what it skips."""
    for place in there[:0:-1]:
        try:
            return place, disk.read_manifest(place)
        except CheckpointError as error:
            print(f"passed over: {error}")
    return there[0], disk.read_manifest(there[0])


def _num_bytes(leaf: dict[str, Any]) -> int:
    """Counts the saved bytes of a leaf; Orbax's numbers and texts have only a kind."""
    stored = leaf.get("stored", leaf)
    if stored["dtype"].startswith("python ") or stored["dtype"] == "string":
        return 0
    return math.prod(stored["shape"]) * jnp.dtype(stored["dtype"]).itemsize
