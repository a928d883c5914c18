"""Which part of a leaf each process writes: whole leaves are process 0's, of a spread leaf each has its own pieces."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

WHOLE_IN = "arrays"  # the folder of process 0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a leaf, as a manifest describes it.

    Attributes:
        folder: where it lies in the checkpoint.
        key: its name there.
        start: its first element in the leaf.
        shape: its shape.
        crc32: of its bytes.
    """

    folder: str
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int

    @property
    def index(self) -> tuple[slice, ...]:
        """Where it is in the leaf."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    @property
    def is_stored(self) -> bool:
        """Whether there is anything to store: an empty array is no more than its shape."""
        return math.prod(self.shape) > 0


@dataclass(frozen=True)
class Held:
    """What this process writes of a leaf.

    Attributes:
        shape: of the whole leaf.
        dtype: of its elements.
        boxes: the first element and the values of each piece; of a whole leaf one, or none on other processes.
        is_whole: whether the leaf is written in one piece.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    boxes: list[tuple[tuple[int, ...], np.ndarray]]
    is_whole: bool


def folder_of(process: int) -> str:
    """The folder that a process writes its pieces to."""
    return WHOLE_IN if process == 0 else f"{WHOLE_IN}_{process}"


def keys(number: int, held: Held) -> list[str]:
    """What the pieces of leaf number `number` are called in their folder."""
    return [str(number) if held.is_whole else f"{number}_{n}" for n in range(len(held.boxes))]


def describe(number: int, leaf: dict[str, Any], pieces: list[Piece]) -> None:
    """Note in the manifest of leaf number `number` where it lies: a whole leaf is known by its number."""
    if [(piece.folder, piece.key) for piece in pieces] == [(WHOLE_IN, str(number))]:
        leaf["crc32"] = pieces[0].crc32
    else:
        leaf["pieces"] = [asdict(piece) for piece in pieces]


def pieces_of(number: int, leaf: dict[str, Any]) -> list[Piece]:
    """The pieces that a manifest names for leaf number `number`."""
    if "pieces" not in leaf:
        shape = tuple(leaf["stored"]["shape"])
        return [Piece(folder=WHOLE_IN, key=str(number), start=(0,) * len(shape), shape=shape, crc32=leaf["crc32"])]
    return [from_json(piece) for piece in leaf["pieces"]]


def from_json(piece: dict[str, Any]) -> Piece:
    """A piece as JSON gave it back."""
    return Piece(**{**piece, "start": tuple(piece["start"]), "shape": tuple(piece["shape"])})
