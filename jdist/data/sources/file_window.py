"""Files that are in memory together, their rows in the files' order or a random one, and positions among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist.data.leaves import TreeSpec, count_rows, differences, tree_spec
from jdist.errors import BatchError, DatasetError
from jdist.support.checks import as_int
from jdist.typing import PyTree


class FilePosition(NamedTuple):
    """The next row of a source of files."""

    epoch: int = 0
    file: int = 0  # number of the first file of the window, in the epoch's order
    row: int = 0  # rows of the window that were handed out
    rows: int = 0  # rows of the epoch before the window
    seen: int = 0  # the same, including other shards' rows
    counts: tuple[int, ...] = ()  # rows of each file of the window; empty if it was not read


def file_position(saved: Any) -> FilePosition:
    """Reads a position of a JSON dict of its fields."""
    fields = dict(saved) if isinstance(saved, Mapping) else {}
    counts = fields.pop("counts", None)
    numbers = [*fields.values(), *(counts if isinstance(counts, list | tuple) else [None])]
    if set(fields) | {"counts"} != set(FilePosition._fields) or any(
        as_int(number, least=0) is None for number in numbers
    ):
        raise DatasetError(f"this is no saved position in files: {saved!r}")
    return FilePosition(**fields, counts=tuple(counts))


class LoadedFile(NamedTuple):
    """The rows of a file that are kept; `num_rows` is how many the file has."""

    path: str
    rows: PyTree
    num_rows: int


class FileWindow:
    """Rows of files that are in memory together."""

    # `seed` words draw the rows' order; None: the order of the files, and there is one file.

    def __init__(self, files: Sequence[LoadedFile], seed: Sequence[int] | None):
        self.counts = tuple(file.num_rows for file in files)
        kept = [count_rows(file.rows) for file in files]
        self.num_rows = sum(kept)
        self._files = [file.rows for file in files]
        self._ends = np.cumsum(kept)
        self._order: np.ndarray | None = None
        if seed is not None:
            bits = np.random.PCG64(np.random.SeedSequence(seed))
            self._order = np.random.Generator(bits).permutation(self.num_rows)

    def rows(self, start: int, stop: int) -> PyTree:
        """Takes rows by their places in the order; without a seed they share the file's memory."""
        if self._order is None:
            (rows,) = self._files
            return jax.tree.map(lambda leaf: leaf[start:stop], rows)
        chosen = self._order[start:stop]
        file_of = np.searchsorted(self._ends, chosen, side="right")
        parts = []  # the file, its rows, and where these go
        for number in np.unique(file_of):
            places = np.flatnonzero(file_of == number)
            first = self._ends[number] - count_rows(self._files[number])
            parts.append((self._files[number], chosen[places] - first, places))
        taken = [jax.tree.map(lambda leaf, inside=inside: leaf[inside], rows) for rows, inside, _ in parts]
        back = np.argsort(np.concatenate([places for _, _, places in parts]))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[back], *taken)


class FileCheck:
    """Checks that files look alike and have memory of their own."""

    def __init__(self):
        self._first: tuple[str, TreeSpec] | None = None

    def check_alike(self, file: LoadedFile) -> None:
        """Refuses a file whose rows are unlike the first one's; a file without rows passes."""
        if file.num_rows == 0:
            return
        spec = tree_spec(file.rows)
        path, first = self._first = self._first or (file.path, spec)
        if spec != first:
            raise BatchError(
                f"the rows of {file.path!r} differ from those of {path!r}: {differences(first, spec)}. All files need "
                "one structure, one dtype a leaf and one shape a row: convert, pad or crop in `read`"
            )

    def check_memory(self, file: LoadedFile, held: Sequence[LoadedFile]) -> None:
        """Refuses a file whose rows share memory with a file that is still in use."""
        addresses = _addresses(file.rows)
        for other in held:
            if other.path != file.path and addresses & _addresses(other.rows):
                raise BatchError(
                    f"`read` returned the same memory for {other.path!r} and {file.path!r}, but several files are in memory "
                    "at once under `shuffle_seed` and with several `workers`. Return new arrays, or read-only ones "
                    "(`array.flags.writeable = False`) where files share a constant"
                )


def check_counts(files: Sequence[LoadedFile], counts: tuple[int, ...]) -> None:
    """Compares files that are read again with what they were when the position was saved."""
    for file, count in zip(files, counts, strict=False):
        if file.num_rows != count:
            raise DatasetError(
                f"the saved position is in {file.path!r}, which had {count:,} rows then and has {file.num_rows:,} now, so its "
                "rows cannot be told apart. Put the file back, or start at step 0"
            )


def _addresses(rows: PyTree) -> set[int]:
    leaves = [leaf for leaf in jax.tree.leaves(rows) if leaf.size and leaf.flags.writeable]
    return {leaf.__array_interface__["data"][0] for leaf in leaves}
