"""Files of safetensors: which tensors they hold, and boxes of these."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdist.checkpoint.folder import describe_error
from jdist.errors import CheckpointError

NAME = "model.safetensors"
INDEX = ".index.json"
METADATA = "__metadata__"  # in place of a tensor in a header
CONFIG = "config.json"  # Hugging Face's, next to the files of a model
_HEADS = ("num_attention_heads", "n_head", "num_key_value_heads")
_SUFFIX = ".safetensors"
_BLOCK_BYTES = 16 << 20
_ONE_OF = re.compile(r".*-\d+-of-(\d+)\.safetensors")
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str  # in the terms of safetensors

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name}"

    @property
    def numpy_dtype(self) -> np.dtype:
        """Its dtype; raises a `CheckpointError` where NumPy has none for it."""
        if self.dtype not in DTYPES:
            raise CheckpointError(f"{self}: has dtype {self.dtype}; jdist reads {', '.join(DTYPES)}")
        return jnp.dtype(DTYPES[self.dtype])


class Reader:
    """Opens files of safetensors and reads boxes of their tensors."""

    def __init__(self, files: Any):
        safe_open = _safetensors().safe_open
        self.tensors: dict[str, Tensor] = {}
        self.heads: dict[Path, list[int]] = {}
        self.bytes_read = 0
        self._open = contextlib.ExitStack()
        self._handles: dict[Path, Any] = {}
        with contextlib.ExitStack() as stack:  # closes them where one of them is not right
            for path, listed in _find(files):
                self._handles[path] = handle = stack.enter_context(_opened(safe_open, path))
                self._add(path, handle, listed)
                self.heads[path] = _heads_beside(path)
            self._open = stack.pop_all()

    def _add(self, path: Path, handle: Any, listed: set[str] | None) -> None:
        names = set(handle.keys())
        if listed is not None and names != listed:
            one = sorted(names ^ listed)[0]
            which = "which the index does not list" if one in names else "which the index lists, is not there"
            raise CheckpointError(
                f"{path}: tensor {one}, {which}. The files are not those of their index: copy all again"
            )
        for name in sorted(names):
            if name in self.tensors:
                raise CheckpointError(f"{path}: tensor {name} is in {self.tensors[name].file} as well. Leave one out")
            each = handle.get_slice(name)
            self.tensors[name] = Tensor(name, path, tuple(each.get_shape()), each.get_dtype())

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self, tensor: Tensor, box: Sequence[slice]) -> np.ndarray:
        """Reads a box of a tensor, some rows at a time."""
        # safetensors holds Python's lock while it reads. A large tensor takes so long that other
        # processes would count this one as lost.
        dtype, shape = tensor.numpy_dtype, tuple(each.stop - each.start for each in box)
        rows = max(1, _BLOCK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
        if not shape or shape[0] <= rows:
            return self._read_block(tensor, box)
        values = np.empty(shape, dtype)
        for at in range(0, shape[0], rows):
            block = slice(box[0].start + at, box[0].start + min(at + rows, shape[0]))
            values[at : at + rows] = self._read_block(tensor, [block, *box[1:]])
        return values

    def _read_block(self, tensor: Tensor, box: Sequence[slice]) -> np.ndarray:
        handle = self._handles[tensor.file]
        is_whole = all(each == slice(0, size) for each, size in zip(box, tensor.shape, strict=True))
        try:
            # An array without elements or axes has no slices.
            values = handle.get_tensor(tensor.name) if is_whole else handle.get_slice(tensor.name)[tuple(box)]
        except Exception as error:
            raise CheckpointError(f"{tensor}: cannot be read: {describe_error(error)}") from error
        values = np.asarray(values, tensor.numpy_dtype)
        if values.shape != tuple(each.stop - each.start for each in box):
            raise CheckpointError(f"{tensor}: a slice {list(box)} of it came in shape {list(values.shape)}")
        self.bytes_read += values.nbytes
        return values


def _heads_beside(file: Path) -> list[int]:
    try:
        config = json.loads((file.parent / CONFIG).read_bytes())
    except (OSError, ValueError):  # it is missing, or not Hugging Face's
        return []
    return [config[key] for key in _HEADS if isinstance(config, dict) and isinstance(config.get(key), int)]


def has_files(path: Path) -> bool:
    """Returns whether a path is a file of safetensors or an index of some, or a folder with one."""
    if path.is_dir():
        return any(path.glob(f"*{_SUFFIX}*"))
    return path.is_file() and path.name.endswith((_SUFFIX, INDEX))


def _opened(safe_open: Any, path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file does not exist") from None
    except Exception as error:
        cut = _first_cut_off(path)
        text = f"{path}: cannot be read as safetensors: {describe_error(error)}."
        if cut is not None:
            raise CheckpointError(f"{text} It ends within tensor {cut}; copy it again from an intact file") from error
        raise CheckpointError(f"{text} It is another kind of file, or damaged; copy it again") from error


def _first_cut_off(path: Path) -> str | None:
    """Finds the first tensor that is not whole in a file; None if its header cannot be read either."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                return None
            header = json.loads(file.read(length))
        ends = {name: each["data_offsets"][1] for name, each in header.items() if name != METADATA}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    cut = [(end, name) for name, end in ends.items() if 8 + length + end > size]
    return min(cut)[1] if cut else None


def _find(files: Any) -> list[tuple[Path, set[str] | None]]:
    """Lists the files that are meant, and what an index says is in each."""
    paths = list(files) if isinstance(files, Iterable) and not isinstance(files, str | os.PathLike) else [files]
    if not paths:
        raise CheckpointError("`files` is empty: give a file, a folder, an index or several files")
    found: list[tuple[Path, set[str] | None]] = []
    for path in map(local_path, paths):
        if path.is_dir():
            found += _in_folder(path)
        elif path.name.endswith(INDEX):
            found += _of_index(path)
        else:
            found.append((path, None))
    return found


def local_path(path: Any) -> Path:
    """Makes a path absolute; refuses a URL: `pathlib` would make it a folder on this disk."""
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"{path!r:.80} is not a path of safetensors files")
    if "://" in os.fspath(path):
        raise CheckpointError(
            f"{path}: is a URL, and safetensors files are read and written on a disk. Copy them there"
        )
    return Path(path).expanduser().absolute()


def _in_folder(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """Finds the one index in a folder, or else the one file that is complete by itself."""
    # Several files without an index are leftovers of a killed save.
    parts: list[Path] = []
    for pattern in (f"*{_SUFFIX}{INDEX}", f"*{_SUFFIX}"):
        there = sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
        parts = [path for path in there if (match := _ONE_OF.fullmatch(path.name)) and int(match[1]) > 1]
        there = [path for path in there if path not in parts]
        if len(there) > 1:
            named = ", ".join(path.name for path in there[:5])
            raise CheckpointError(f"{folder}: has {len(there)} of {pattern}: {named}. Say which, or give a list of all")
        if there and there[0].name.endswith(INDEX):
            return _of_index(there[0])
        if there:
            return [(there[0], None)]
    if parts:
        raise CheckpointError(
            f"{folder}: {parts[0].name} is one of several files, and their index, *{_SUFFIX}{INDEX}, is missing. Copy it "
            "next to them, or give a list of all"
        )
    raise CheckpointError(f"{folder}: has no *{_SUFFIX} and no index of such files, or is not there")


def _of_index(path: Path) -> list[tuple[Path, set[str] | None]]:
    try:
        files = json.loads(path.read_text())["weight_map"]
        by_file: dict[str, set[str]] = {}
        for name, file in files.items():
            by_file.setdefault(os.fspath(file), set()).add(name)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file does not exist") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f'{path}: is not an index: {describe_error(error)}. It must be JSON with "weight_map", from names of tensors to '
            "files"
        ) from error
    for file, names in by_file.items():
        if Path(file).name != file:
            raise CheckpointError(f"{path}: the file {file!r} is not in the folder of the index")
        if not (path.parent / file).exists():
            raise CheckpointError(
                f"{path.parent / file}: is not there, and {path.name} lists {len(names):,} tensors in it, {min(names)} among "
                "them. Copy it next to the index"
            )
    return [(path.parent / file, names) for file, names in sorted(by_file.items())]


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise CheckpointError(
            f"safetensors cannot be imported: {error}. Install it: pip install 'jdist[weights]'"
        ) from error
    return safetensors
