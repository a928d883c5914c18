"""Elements that another library reads by their numbers: rows, or batches."""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdist.data.leaves import differences, tree_spec
from jdist.errors import BatchError
from jdist.typing import PyTree

_SAMPLED_BYTES = 4096


class Elements(abc.ABC):
    """Elements that a library reads by number: rows, or full batches."""

    kind: str  # its name in messages, "grain MapDataset"
    is_fresh: bool  # nobody else has or reuses the memory of what `read` and `element` return

    @abc.abstractmethod
    def __len__(self) -> int:
        """Counts those of one epoch."""

    @abc.abstractmethod
    def name(self, number: int, epoch: int) -> str:
        """Describes an element, for errors."""

    @abc.abstractmethod
    def _read(self, number: int, epoch: int) -> PyTree: ...

    @abc.abstractmethod
    def _identify(self) -> dict[str, str]: ...

    def element(self, number: int, epoch: int) -> PyTree:
        """Reads one element unchanged; names it in the library's errors."""
        try:
            return self._read(int(number), epoch)
        except Exception as error:
            error.add_note(f"while reading {self.name(int(number), epoch)}")
            raise

    def read(self, numbers: np.ndarray, epoch: int) -> PyTree:
        """Reads elements and joins them along a new first axis."""
        rows = [self.element(number, epoch) for number in numbers]
        try:
            return self._stack(rows)
        except ValueError:
            self.refuse_unlike(rows, numbers, epoch)
            raise

    def refuse_unlike(self, rows: Sequence[PyTree], numbers: np.ndarray, epoch: int) -> None:
        """Raises a `BatchError` that names the first row that cannot be stacked."""
        if (unlike := unlike_row(rows, [self.name(int(number), epoch) for number in numbers])) is not None:
            raise BatchError(
                f"in the {self.kind} {' '.join(unlike)}. All rows need one structure, one dtype a leaf and one shape: pad, "
                "crop or convert"
            ) from None

    def _stack(self, rows: list[PyTree]) -> PyTree:
        return jax.tree.map(_stack, *rows)

    @functools.cached_property
    def identity(self) -> Mapping[str, str]:
        """Tells these data from others, in words without spaces by name."""
        return self._identify()


def _stack(*leaves: np.ndarray) -> np.ndarray:
    """Stacks a leaf of several rows; `np.stack` would convert them to one dtype, which another batch then has not."""
    if len({leaf.dtype for leaf in leaves}) > 1:
        raise ValueError("dtypes differ")
    return np.stack(leaves)


def unlike_row(rows: Sequence[Any], names: Sequence[str]) -> tuple[str, str] | None:
    """Finds the name of the first row that cannot be stacked with those before, and what differs; None if all can."""
    specs = [tree_spec(jax.tree.map(np.atleast_2d, row)) for row in rows]
    for name, spec in zip(names, specs, strict=False):  # the last batch of a stream may be short
        if spec != specs[0]:
            return name, f"differs from {names[0]}: {differences(specs[0], spec)}"
    return None


def content_hash(sources: Sequence[Any]) -> str:
    """Hashes the first and the last element of each source, so that its price does not grow with the data."""
    content = hashlib.sha256()
    for source in sources:
        for number in sorted({0, len(source) - 1}):
            content.update(element_bytes(source[number]))
    return content.hexdigest()[:12]


def element_bytes(element: Any) -> bytes:
    """Makes bytes of an element: of each leaf its path, and its value, or else its type."""
    parts = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(element)[0]:
        parts += [jax.tree_util.keystr(path).encode(), _leaf_bytes(leaf)]
    return b"\0".join(parts)


def _leaf_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, bytes):
        return leaf[:_SAMPLED_BYTES]
    if isinstance(leaf, str | bool | int | float):
        return repr(leaf)[:_SAMPLED_BYTES].encode()
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        array = np.asarray(leaf)
        return f"{array.dtype}{array.shape}".encode() + array.reshape(-1)[:_SAMPLED_BYTES].tobytes()
    return type(leaf).__name__.encode()
