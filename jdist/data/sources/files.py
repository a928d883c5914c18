"""Batches from files, one of which is in memory at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jdist.data.leaves import count_rows, join, to_numpy
from jdist.data.sources.protocol import whole_number
from jdist.errors import DatasetError
from jdist.support.tensorflow_names import without_tensorflow_keywords

PyTree = Any
Path = str | os.PathLike[str]


@without_tensorflow_keywords
def from_files(
    paths: Iterable[Path], read: Callable[[Any], PyTree], *, global_batch: int, epochs: int | None = 1
) -> FileSource:
    """Makes a source of batches from files, for data that does not fit into memory at once.

    Args:
        paths: the files, in the order in which they are read.
        read: from a path to a pytree of arrays [rows, ...]; files need not have the same number of rows. It may be
            called from a background thread.
        global_batch: rows of a full batch. Batches reach over the ends of files, never into the next epoch.
        epochs: how often to go through the files; None repeats without end.

    Returns:
        A source that only goes forward, for `strategy.distribute_dataset` and `jdist.data.shard`. Its position
        cannot be saved: how many rows a file has is known only when it is read.

    Raises:
        DatasetError: there are no paths, or an option is out of range.

    Example:
        >>> import numpy as np
        >>> from jdist.data import from_files
        >>> rows = {"a": np.arange(3), "b": np.arange(3, 5)}
        >>> [batch.tolist() for batch in from_files(["a", "b"], rows.get, global_batch=2)]
        [[0, 1], [2, 3], [4]]
    """
    if isinstance(paths, str | bytes | os.PathLike):
        raise DatasetError(f"`paths` must be a list of paths, but it is the one path {paths!r}; write `[{paths!r}]`")
    paths = tuple(paths)
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise DatasetError(f"`paths` must hold strings or `pathlib.Path`s, but it holds {path!r}")
    if not paths:
        raise DatasetError("the dataset is empty: `paths` names no file; check the folder or the pattern")
    if not callable(read):
        raise DatasetError(f"`read` must be a function from a path to arrays, but it is a {type(read).__name__}")
    return FileSource(
        paths=paths,
        read=read,
        global_batch=whole_number(global_batch, name="global_batch", least=1),
        epochs=None if epochs is None else whole_number(epochs, name="epochs", least=1),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class FileSource(Iterable[PyTree]):
    """Batches of the rows of files; see `from_files`, which builds one.

    Attributes:
        paths: the files.
        read: from a path to a pytree of arrays [rows, ...].
        global_batch: rows of a full batch.
        epochs: how often to go through the files; None: without end.
        every: only one row in so many is kept, counted over all files.
        first: number of the first row that is kept.
    """

    paths: tuple[Path, ...]
    read: Callable[[Any], PyTree]
    global_batch: int
    epochs: int | None
    every: int = 1
    first: int = 0

    def __iter__(self) -> Iterator[PyTree]:
        for _ in itertools.count() if self.epochs is None else range(self.epochs):
            empty = True
            for batch in self._epoch():
                empty = False
                yield batch
            if empty:
                kept = "" if self.every == 1 else f" of shard {self.first} of {self.every}"
                raise DatasetError(
                    f"the dataset is empty: the {len(self.paths)} files hold no rows{kept}; the first is "
                    f"{os.fspath(self.paths[0])!r}"
                )

    def _epoch(self) -> Iterator[PyTree]:
        rest, waiting = None, 0  # rows that do not fill a batch yet
        for rows in self._kept_rows():
            start, count = 0, count_rows(rows)
            if rest is not None:
                start = min(self.global_batch - waiting, count)
                rest, waiting = join([rest, _cut(rows, 0, start)]), waiting + start
                if waiting < self.global_batch:
                    continue
                yield rest
            while count - start >= self.global_batch:
                yield _cut(rows, start, start + self.global_batch)
                start += self.global_batch
            # A copy: it keeps no other rows of the file in memory, and `read` may refill those.
            rest, waiting = join([_cut(rows, start, count)]) if start < count else None, count - start
        if rest is not None:
            yield rest

    def _kept_rows(self) -> Iterator[PyTree]:
        """Reads the rows of each file that are kept."""
        seen = 0
        for path in self.paths:
            try:
                rows = to_numpy(self.read(path))
                count = count_rows(rows)
            except Exception as error:
                error.add_note(f"while reading {os.fspath(path)!r}")
                raise
            yield _cut(rows, (self.first - seen) % self.every, count, self.every)
            seen += count


def _cut(rows: PyTree, start: int, stop: int, step: int = 1) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[start:stop:step], rows)
