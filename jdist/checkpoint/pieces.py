"""The values of a checkpoint on disk: raw bytes in row-major order, each process's in one file of its own.

A piece is a box of a leaf. Process 0 writes a leaf that it has whole as one piece; of a leaf that is spread over processes
each writes the boxes that it has.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from jdist.checkpoint.folder import Damaged, Place, describe_error, writing

_TOGETHER_BYTES = 1 << 20  # of small leaves, which would take longer one by one
T = TypeVar("T")
Extent = Sequence[tuple[int, int]]  # a box of a leaf: from which index to before which, by axis


class Box(NamedTuple):
    """A part of a leaf: the index of its first element, and its values."""

    start: tuple[int, ...]
    values: np.ndarray


@dataclass(frozen=True)
class LocalLeaf:
    """The boxes of a leaf that this process writes, if any, and the shape of the whole leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype
    boxes: Sequence[Box] = ()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a leaf in a file, as a manifest describes it."""

    file: str  # a path in the checkpoint
    offset: int = 0  # of its first byte in the file
    start: Sequence[int]  # the index of its first element in the leaf
    shape: Sequence[int]  # of the box
    crc32: int  # of its bytes

    def meets(self, extents: Sequence[Extent] | None) -> bool:
        """Returns whether the piece has elements in one of the boxes; None stands for the whole leaf."""
        bounds = [(start, start + size) for start, size in zip(self.start, self.shape, strict=True)]
        return extents is None or any(
            all(a < d and c < b for (a, b), (c, d) in zip(bounds, extent, strict=True)) for extent in extents
        )

    def view(self, leaf: np.ndarray) -> np.ndarray:
        """Views the piece's elements in the whole leaf."""
        slices = [slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True)]
        return leaf[(*slices, ...)]  # with `...` a view of a scalar as well


def _as_bytes(array: np.ndarray) -> memoryview:
    """Views an array as bytes in row-major order; copies it only where it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def write_pieces(file: Place, leaves: Sequence[LocalLeaf]) -> list[list[Piece]]:
    """Writes and flushes this process's pieces, and returns them by leaf; without any it makes no file."""
    if not any(leaf.boxes for leaf in leaves):
        return [[] for _ in leaves]
    pieces: list[list[Piece]] = []
    with writing(file) as handle:
        for leaf in leaves:
            pieces.append([])
            for start, values in leaf.boxes:
                data = _as_bytes(values)
                # Of the values in memory, so that damage on their way to the disk is noticed.
                crc32 = zlib.crc32(data)
                name, offset = file.name, handle.tell()
                pieces[-1].append(Piece(file=name, offset=offset, start=start, shape=values.shape, crc32=crc32))
                handle.write(data)
    return pieces


def read_leaves(
    checkpoint: Place, body: dict[str, Any], needed: Mapping[int, Sequence[Extent] | None]
) -> Iterator[dict[int, np.ndarray]]:
    """Reads leaves of a checkpoint one by one, each equal to the saved one to the bit, and keeps none."""
    # Small leaves come a megabyte at a time. `needed` has the boxes of each leaf by number, None for
    # all of it: other pieces are not read, and their elements are not set.
    leaves = body["leaves"]
    stored = {i: leaves[i]["stored"] for i in sorted(needed)}
    sizes = {i: math.prod(each["shape"]) * jnp.dtype(each["dtype"]).itemsize for i, each in stored.items()}
    for group in groups_of(sizes, _TOGETHER_BYTES):
        yield _read_group(checkpoint, leaves, group, needed)


def groups_of(sizes: Mapping[T, int], most: int) -> Iterator[list[T]]:
    """Divides keys, in their order, into groups of at most so many bytes, or of one key."""
    group: list[T] = []
    held = 0
    for key, size in sizes.items():
        if group and held + size > most:
            yield group
            group, held = [], 0
        group.append(key)
        held += size
    if group:
        yield group


def _read_group(
    checkpoint: Place, leaves: list[dict[str, Any]], numbers: list[int], needed: Mapping[int, Sequence[Extent] | None]
) -> dict[int, np.ndarray]:
    """Reads the pieces of some leaves, file by file."""
    stored = {i: leaves[i]["stored"] for i in numbers}
    arrays = {i: np.empty(each["shape"], jnp.dtype(each["dtype"])) for i, each in stored.items()}
    for i, array in arrays.items():
        if sum(math.prod(piece["shape"]) for piece in leaves[i]["pieces"]) != array.size:
            raise Damaged(f"{checkpoint}: its manifest does not list all pieces of leaf {leaves[i]['path']}")
    pieces = [(Piece(**piece), i) for i in numbers for piece in leaves[i]["pieces"]]
    pieces = [(piece, i) for piece, i in pieces if piece.meets(needed[i])]
    pieces.sort(key=lambda each: (each[0].file, each[0].offset))
    for name, group in itertools.groupby(pieces, key=lambda each: each[0].file):
        try:
            _read_file(checkpoint / name, ((piece, leaves[i]["path"], piece.view(arrays[i])) for piece, i in group))
        except OSError as error:
            raise Damaged(f"{checkpoint / name}: cannot be read: {describe_error(error)}") from error
    return arrays


def _read_file(file: Place, pieces: Iterator[tuple[Piece, str, np.ndarray]]) -> None:
    """Reads pieces of one file; each comes with the path of its leaf, and the elements to fill."""
    with file.open("rb") as handle:
        for piece, path, box in pieces:
            # Straight into the leaf where the box is contiguous there: whole leaves, blocks of rows.
            values = box if box.flags.c_contiguous else np.empty(box.shape, box.dtype)
            data = _as_bytes(values)
            handle.seek(piece.offset)
            if handle.readinto(data) != data.nbytes or zlib.crc32(data) != piece.crc32:
                raise Damaged(f"{file}: its checksum does not match at leaf {path}")
            if values is not box:
                box[...] = values
