"""What each process writes of a leaf: whole leaves are process 0's, of a spread leaf each has its own pieces, as raw bytes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jdist.checkpoint.folder import Damaged

Box = tuple[tuple[int, ...], np.ndarray]  # the first element of a piece in its leaf, and the values


@dataclass(frozen=True)
class Held:
    """What this process writes of a leaf.

    Attributes:
        shape: of the whole leaf.
        dtype: of its elements.
        whole: the leaf, where this process writes it alone.
        boxes: else the pieces that this process has; none where another process writes the leaf.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    whole: np.ndarray | None = None
    boxes: Sequence[Box] = ()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a leaf, as a manifest describes it.

    Attributes:
        file: where its bytes are, in row-major order; a path in the checkpoint.
        start: its first element in the leaf.
        shape: its shape.
        crc32: of its bytes.
    """

    file: str
    start: Sequence[int]
    shape: Sequence[int]
    crc32: int

    def put_into(self, leaf: np.ndarray, checkpoint: Path) -> None:
        """Reads it into its place in the whole leaf.

        Raises:
            Damaged: the bytes are not those that were in memory.
        """
        data = (checkpoint / self.file).read_bytes()
        if zlib.crc32(data) != self.crc32:
            raise Damaged(f"{checkpoint / self.file}: its checksum does not match")
        box = tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))
        leaf[box] = np.frombuffer(data, leaf.dtype).reshape(self.shape)


def write_pieces(folder: Path, held: Sequence[Held]) -> list[list[Piece]]:
    """Write this process's pieces of all leaves, if it has any.

    Args:
        folder: to be made, in the checkpoint.
        held: what this process has of each leaf.

    Returns:
        The pieces of each leaf.
    """
    if any(each.boxes for each in held):
        folder.mkdir()
    written: list[list[Piece]] = []
    for number, each in enumerate(held):
        written.append([])
        for start, array in each.boxes:
            file = folder / f"{number}_{len(written[-1])}.bin"
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            crc32 = zlib.crc32(data.data)
            data.tofile(file)
            name = f"{folder.name}/{file.name}"
            written[-1].append(Piece(file=name, start=start, shape=array.shape, crc32=crc32))
    return written
