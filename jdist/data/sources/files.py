"""Batches from files, with a window of them in memory at a time."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist.data.leaves import TreeSpec, count_rows, differences, join, to_numpy, tree_spec
from jdist.data.prefetch import ordered_map
from jdist.data.sources.rows import permutation, rows_options
from jdist.data.sources.sequential import Batches, SequentialSource
from jdist.errors import BatchError, DatasetError
from jdist.support import checks
from jdist.support.tensorflow_names import without_tensorflow_keywords
from jdist.typing import PyTree

Path = str | os.PathLike[str]
SHUFFLE_WINDOW = 4


@without_tensorflow_keywords
def from_files(
    paths: Iterable[Path],
    read: Callable[[Any], PyTree],
    *,
    global_batch: int,
    shuffle_seed: int | None = None,
    shuffle_window: int | None = None,
    epochs: int | None = 1,
    workers: int = 1,
) -> FileSource:
    """Makes a source of batches from files, for data that does not fit into memory at once.

    A saved position names the epoch, the file and the row. To go on there, the files of one window are read again, and no
    other that was read before.

    Args:
        paths: the files, in the order in which they are read.
        read: from a path to a pytree of arrays [rows, ...]; files need not have the same number of rows. It may be
            called from a background thread, with several `workers` from as many at once.
        global_batch: rows of a full batch. Batches reach over the ends of files, never into the next epoch.
        shuffle_seed: a whole number, 0 or more, draws a new order of the files each epoch, and a new order of the rows of
            `shuffle_window` files at a time; None keeps files and rows in order. It depends on the seed and the epoch alone,
            never on the number of devices.
        shuffle_window: how many files are in memory, and shuffled together; None: 4.
        epochs: how often to go through the files; None repeats without end.
        workers: how many threads read files. With 1 a file is read when its rows are needed; more read as many files ahead as
            there are threads, and at least those of the next window. It helps where `read` waits or works in C (disks,
            networks, decoders); what works in Python itself is a matter for Grain's processes.

    Returns:
        A source for `strategy.distribute_dataset` and `jdist.data.shard`.

    Raises:
        DatasetError: no paths were given, or an option is out of range.

    Example:
        >>> import numpy as np
        >>> from jdist.data import from_files
        >>> rows = {"a": np.arange(3), "b": np.arange(3, 5)}
        >>> [batch.tolist() for batch in from_files(["a", "b"], rows.get, global_batch=2)]
        [[0, 1], [2, 3], [4]]
        >>> shuffled = from_files(["a", "b"], rows.get, global_batch=5, shuffle_seed=0)
        >>> [sorted(batch.tolist()) for batch in shuffled]
        [[0, 1, 2, 3, 4]]
    """
    if isinstance(paths, str | bytes | os.PathLike):
        is_pattern = isinstance(paths, str) and any(sign in paths for sign in "*?[")
        remedy = f"sorted(glob.glob({paths!r}))" if is_pattern else f"[{paths!r}]"
        raise DatasetError(f"`paths` must be a list of paths, but it is the one path {paths!r}; write `{remedy}`")
    try:
        paths = tuple(paths)
    except TypeError:
        raise DatasetError(f"`paths` must be a list of paths, but it is {paths!r:.80}") from None
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise DatasetError(f"`paths` must hold strings or `pathlib.Path`s, but it holds {path!r}")
    if not paths:
        raise DatasetError("the dataset is empty: `paths` names no file; check the folder or the pattern")
    if not callable(read):
        raise DatasetError(f"`read` must be a function from a path to arrays, but it is a {type(read).__name__}")
    if shuffle_window is not None and shuffle_seed is None:
        raise DatasetError(
            f"`shuffle_window` is {shuffle_window!r}, but nothing is shuffled without a `shuffle_seed`; give one, or leave "
            "the window out"
        )
    shuffle_window = SHUFFLE_WINDOW if shuffle_window is None else shuffle_window
    return FileSource(
        paths=paths,
        read=read,
        shuffle_window=checks.whole_number("shuffle_window", shuffle_window, DatasetError),
        workers=checks.whole_number("workers", workers, DatasetError),
        **rows_options(global_batch, shuffle_seed, epochs),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class FileSource(SequentialSource):
    """Batches of the rows of files; see `from_files`, which builds one.

    Pass number n is epochs `n * epochs` to `(n + 1) * epochs - 1`, so each pass has orders of its own.

    Attributes:
        paths: the files.
        read: from a path to a pytree of arrays [rows, ...].
        global_batch: rows of a full batch.
        epochs: how often to go through the files; None: without end.
        shuffle_seed: seed of the order; None: the files' own order.
        shuffle_window: how many files are shuffled together.
        workers: how many threads read files.
        every: only one row in so many is kept, counted over all files; if they are shuffled, in each file.
        first: number of the first row that is kept; if files are shuffled, of file 0, and one less of each that follows.
    """

    paths: tuple[Path, ...]
    read: Callable[[Any], PyTree]
    global_batch: int
    epochs: int | None
    shuffle_seed: int | None = None
    shuffle_window: int = SHUFFLE_WINDOW
    workers: int = 1
    every: int = 1
    first: int = 0

    kind = "FileSource"

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_endless", self.epochs is None)

    def open(self, epoch: int, state: Any) -> Batches:
        """See `SequentialSource.open`; here `epoch` is the number of the pass, and `state` a `FilePosition`."""
        begin = 0 if self.epochs is None else epoch * self.epochs
        end = None if self.epochs is None else begin + self.epochs
        start = FilePosition(begin) if state is None else state
        if start.epoch < begin or (end is not None and start.epoch > end):
            raise DatasetError(
                f"the saved position is in epoch {start.epoch}, but pass {epoch} of a source of {self.epochs} epochs goes from "
                f"{begin} to {end}. Give as many `epochs` as when it was saved, or in the first pass more"
            )
        return self._batches(start, end)

    def to_plain(self, state: FilePosition) -> dict[str, Any]:
        return state._asdict() | {"counts": list(state.counts)}

    def from_plain(self, value: Any) -> FilePosition:
        return file_position(value)

    @property
    def full_batch(self) -> int:
        """See `SequentialSource.full_batch`."""
        return self.global_batch

    @property
    def window(self) -> int:
        """Counts the files in memory together, without those that are read ahead."""
        return 1 if self.shuffle_seed is None else min(self.shuffle_window, len(self.paths))

    @property
    def fingerprint(self) -> str:
        """Identifies the files and their order, by their names without folders; see `RandomAccessSource`."""
        names = "\n".join(os.path.basename(os.fspath(path)) for path in self.paths)
        parts = {
            "files": len(self.paths),
            "names": hashlib.sha256(os.fsencode(names)).hexdigest()[:16],
            "global_batch": self.global_batch,
            "shuffle_seed": self.shuffle_seed,
        }
        if self.shuffle_seed is not None:
            parts["shuffle_window"] = self.window
        if self.every > 1:
            parts["shard"] = f"{self.first}/{self.every}"
        return " ".join(f"{key}={value}" for key, value in parts.items())

    def _batches(self, start: FilePosition, end: int | None) -> Batches:
        """Reads the batches from a position up to an epoch, None: without end; yields each with the position behind it."""
        ahead = -(-self.window // self.workers)
        loaded = ordered_map(self._read, lambda: self._indices(start, end), workers=self.workers, ahead=ahead)
        check = FileCheck()
        for epoch in _epochs(start.epoch, end):
            yield from self._epoch(start if epoch == start.epoch else FilePosition(epoch=epoch), loaded, check)

    def _order(self, epoch: int) -> np.ndarray:
        """Draws the order of an epoch's files, as numbers of `paths`."""
        if self.shuffle_seed is None:
            return np.arange(len(self.paths))
        return permutation(len(self.paths), self.shuffle_seed, epoch)

    def _indices(self, start: FilePosition, end: int | None) -> Iterator[int]:
        """Lists the files in the order in which they are read, over all epochs."""
        for epoch in _epochs(start.epoch, end):
            yield from self._order(epoch)[start.file if epoch == start.epoch else 0 :].tolist()

    def _read(self, index: int) -> PyTree:
        rows = to_numpy(self.read(self.paths[index]))
        count_rows(rows)
        return rows

    def _epoch(
        self, start: FilePosition, loaded: Iterator[PyTree], check: FileCheck
    ) -> Iterator[tuple[PyTree, FilePosition]]:
        parts, waiting = list[PyTree](), 0  # rows that do not fill a batch yet
        row = start.row
        for at, window in self._windows(start, loaded, check):
            while row < window.num_rows:
                end = min(row + self.global_batch - waiting, window.num_rows)
                parts.append(window.rows(row, end))
                waiting, row = waiting + end - row, end
                if waiting < self.global_batch:
                    continue
                batch = parts[0] if len(parts) == 1 else join(parts)
                parts, waiting = [], 0
                yield batch, self._behind(at, row, window)
                del batch
            row = 0
            # A copy: it keeps no other rows of the files in memory, and `read` may refill those.
            parts = [join(parts)] if parts else []
            del window  # before the next one is read
        if parts:
            yield parts[0], FilePosition(start.epoch + 1)

    def _windows(
        self, start: FilePosition, loaded: Iterator[PyTree], check: FileCheck
    ) -> Iterator[tuple[FilePosition, FileWindow]]:
        """Reads the windows of an epoch, each with the position of its first row."""
        order = self._order(start.epoch).tolist()
        at, counts = start._replace(row=0, counts=()), start.counts
        held: list[LoadedFile] = []
        while at.file < len(order):
            # While other threads read, what they refill by mistake is found only if it is still there.
            before, held, seen = [] if self.workers == 1 else held, [], at.seen
            for number, index in enumerate(order[at.file : at.file + self.window], at.file):
                file = self._next_file(loaded, index, seen, f"file {number + 1} of {len(order)} of epoch {at.epoch}")
                check.check_alike(file)
                check.check_memory(file, [*before, *held])
                held.append(file)
                seen += file.num_rows
                del file
            check_counts(held, counts)
            window = FileWindow(held, None if self.shuffle_seed is None else (self.shuffle_seed, at.epoch, 1 + at.file))
            if self.workers == 1:
                held.clear()
            rows, counts = at.rows + window.num_rows, ()
            yield at, window
            del window
            at = FilePosition(at.epoch, at.file + self.window, rows=rows, seen=seen)
        if not at.rows:
            kept = "" if self.every == 1 else f" of shard {self.first} of {self.every}"
            raise DatasetError(
                f"the dataset is empty: the {len(self.paths)} files hold no rows{kept}; the first is "
                f"{os.fspath(self.paths[0])!r}"
            )

    def _behind(self, at: FilePosition, row: int, window: FileWindow) -> FilePosition:
        """Returns the position behind the first `row` rows of the window at a position."""
        if row < window.num_rows:
            return at._replace(row=row, counts=window.counts)
        if at.file + self.window >= len(self.paths):
            return FilePosition(at.epoch + 1)
        rows, seen = at.rows + window.num_rows, at.seen + sum(window.counts)
        return FilePosition(at.epoch, at.file + self.window, rows=rows, seen=seen)

    def _next_file(self, loaded: Iterator[PyTree], index: int, seen: int, where: str) -> LoadedFile:
        path = str(os.fspath(self.paths[index]))
        try:
            rows = next(loaded)
        except Exception as error:
            error.add_note(f"while reading {path!r}: {where}, behind {seen:,} rows of it")
            raise
        count = count_rows(rows)
        start = (self.first - (seen if self.shuffle_seed is None else index)) % self.every
        kept = jax.tree.map(lambda leaf: leaf[start :: self.every], rows) if self.every > 1 else rows
        return LoadedFile(path, kept, count)


def _epochs(first: int, end: int | None) -> Iterable[int]:
    return itertools.count(first) if end is None else range(first, end)


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
    are_numbers = all(checks.as_int(number, least=0) is not None for number in numbers)
    if set(fields) | {"counts"} != set(FilePosition._fields) or not are_numbers:
        raise DatasetError(f"not a saved position in files: {saved!r}")
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
        self._order = None if seed is None else permutation(self.num_rows, *seed)

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
        """Refuses a file with rows unlike the first one's; a file without rows passes."""
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
        """Refuses a file with rows that share memory with a file still in use."""
        addresses = _addresses(file.rows)
        for other in held:
            if other.path != file.path and addresses & _addresses(other.rows):
                raise BatchError(
                    f"`read` returned the same memory for {other.path!r} and {file.path!r}, but several files are in memory "
                    "at once under `shuffle_seed` and with several `workers`. Return new arrays, or read-only ones "
                    "(`array.flags.writeable = False`) where files share a constant"
                )


def check_counts(files: Sequence[LoadedFile], counts: tuple[int, ...]) -> None:
    """Compares files that are read again with their content when the position was saved."""
    for file, count in zip(files, counts, strict=False):
        if file.num_rows != count:
            raise DatasetError(
                f"the saved position is in {file.path!r}, which had {count:,} rows then and has {file.num_rows:,} now, so its "
                "rows cannot be told apart. Put the file back, or start at step 0"
            )


def _addresses(rows: PyTree) -> set[int]:
    leaves = [leaf for leaf in jax.tree.leaves(rows) if leaf.size and leaf.flags.writeable]
    return {leaf.__array_interface__["data"][0] for leaf in leaves}
