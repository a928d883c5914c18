"""Batches of several processes, which agree in every step on what each has, and on the end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jdist.data.leaves import TreeSpec, check_same, count_rows, to_numpy, tree_spec
from jdist.data.peers import Line, check_alike, raise_failure, told
from jdist.data.process_shard import LocalRows
from jdist.errors import BatchError, DatasetError

PyTree = Any


def agreed(
    own: OwnBatches, line: Line, *, start: int, bounded: Callable[[str], str]
) -> Iterator[tuple[int, LocalRows] | None]:
    """This process's parts of global batches, with the position after each.

    A process whose batches have ended goes on with parts of no real rows, until all have.

    Args:
        own: the batches that this process makes.
        line: to the other processes.
        start: the number of the first batch, the same on all.
        bounded: `Peers.bounded`.

    Yields:
        Parts; None when the line was stopped before all had come: the next one goes on waiting.

    Raises:
        DatasetError: a process has no row to begin with.
        PeerFailedError: another process's source failed.
        Exception: what this process's own source raised.
    """
    full = ()
    try:
        for step in itertools.count(start):
            message = own.take()
            if step == start:
                message |= own.description(bounded)
            while (said := line.exchange(f"step {step}", message)) is None:
                yield None
            raise_failure(said, own.failure, f"making batch {step} (from 0)")
            if all(one["end"] for one in said):
                return
            if step == start:
                full = _check_first(said)
            yield step + 1, LocalRows(own.rows_to_feed(), tuple(one["rows"] for one in said), full)
    finally:
        line.leave()


def alike(batches: Iterator[PyTree], line: Line, *, bounded: Callable[[str], str]) -> Iterator[PyTree | None]:
    """Global batches that all processes make whole; they agree that each has the same rows, leaves and end.

    Else one would wait in a step for another whose loop is over, or whose array has another shape.

    Args:
        batches: the batches that this process makes, with numpy leaves.
        line: to the other processes.
        bounded: `Peers.bounded`.

    Yields:
        Batches; None when the line was stopped before all had come: the next one goes on waiting.

    Raises:
        DatasetError: the processes' batches differ.
        PeerFailedError: another process's source failed.
        Exception: what this process's own source raised.
    """
    try:
        for number in itertools.count():
            batch, failure = None, None
            try:
                batch = next(batches, None)
                message = {"is": bounded(json.dumps(_outline(batch))), "end": batch is None}
            except Exception as error:  # noqa: BLE001 - raised once the others have heard of it
                failure, message = error, told(error)
            while (said := line.exchange(f"step {number}", message)) is None:
                yield None
            raise_failure(said, failure, f"making batch {number} (from 0)")
            check_alike(
                [one["is"] for one in said],
                f"batches {number} (from 0) of the processes",
                "Every process has to make the same; one that has rows of its own is fed by "
                '`jdist.InputOptions(autoshard="off")`',
            )
            if said[0]["end"]:
                return
            yield batch
    finally:
        line.leave()


def _outline(batch: PyTree | None) -> dict[str, str]:
    """What has to be the same of a batch on all processes; None: there is none any more."""
    if batch is None:
        return {"the number of rows": "nothing, as its source has ended,"}
    leaves = {leaf.path: str(leaf) for leaf in tree_spec(batch).leaves}
    return {"the number of rows": f"{count_rows(batch):,}"} | leaves


class OwnBatches:
    """The batches that a process makes, each its part of a global one.

    Args:
        batches: one for each step.
        full: rows of a full one; None: as many as the first has. Asked after the first was made.
        last: the last batch of the source, to fill up with where it has ended before the first step; or None.
    """

    def __init__(self, batches: Iterator[PyTree], *, full: Callable[[], int | None], last: Callable[[], PyTree | None]):
        self._batches, self._told, self._last = batches, full, last
        self._batch: PyTree | None = None
        self._filler: PyTree | None = None  # its last row that was real
        self._first: TreeSpec | None = None
        self._full = 0  # not known yet
        self._ended = False
        self.failure: Exception | None = None

    def take(self) -> dict[str, Any]:
        """Goes to the next batch, and says how many rows it has, that there is none, or why."""
        try:
            rows = 0 if self._ended else self._go_on()
        except Exception as error:  # noqa: BLE001 - raised once the others have heard of it
            self.failure = error
            return told(error)
        return {"rows": rows, "end": self._ended}

    def _go_on(self) -> int:
        try:
            batch = to_numpy(next(self._batches))
        except StopIteration:
            self._batch, self._ended = None, True
            if self._filler is None and (last := self._last()) is not None:
                self._filler = _last_row(to_numpy(last))
            return 0
        self._check(batch)
        self._batch = batch
        self._filler = _last_row(batch) if count_rows(batch) else self._filler
        return count_rows(batch)

    def description(self, bounded: Callable[[str], str]) -> dict[str, Any]:
        """What the others have to know of the first batch; nothing if there is no row."""
        if self._filler is None:
            return {}
        leaves = {leaf.path: str(leaf) for leaf in tree_spec(self._filler).leaves}
        return {"leaves": bounded(json.dumps(leaves)), "full": self._full or self._told()}

    def rows_to_feed(self) -> PyTree:
        """The batch; one row to fill up with where it has none."""
        if self._batch is not None and count_rows(self._batch):
            return self._batch
        return jax.tree.map(np.array, self._filler)  # a copy: an array on a device may share its buffer

    def _check(self, batch: PyTree) -> None:
        """Refuses a batch that is not like the first, before the others take this process's word for it."""
        spec, rows = tree_spec(batch), count_rows(batch)
        if self._first is None:
            self._first, self._full = spec, self._told() or rows
        check_same(self._first, spec)
        if rows > self._full:
            raise BatchError(
                f"a batch has {rows} rows, but a full batch of this process has {self._full}; a larger one would "
                "compile the step again. Let the source give its largest batch first, or split this one"
            )


def _last_row(batch: PyTree) -> PyTree | None:
    return jax.tree.map(lambda leaf: leaf[-1:].copy(), batch) if count_rows(batch) else None


def _check_first(said: list[dict[str, Any]]) -> tuple[int, ...]:
    """How many rows each process has of a full batch, if the batches of all processes fit each other."""
    for process, one in enumerate(said):
        if "leaves" not in one:
            raise DatasetError(
                f"process {process} has no rows: its source gave none to begin with, so there is nothing to fill its part "
                "of a batch up with. Share the data out so that each process has some"
            )
    check_alike(
        [one["leaves"] for one in said],
        "the batches of the processes",
        "All need one structure, one dtype a leaf and one shape a row",
    )
    return tuple(one["full"] for one in said)
