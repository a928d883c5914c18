"""Lockstep of the processes that feed one dataset: in each step they agree on their batches, and on the end."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from jdist.cluster import exit_status
from jdist.cluster.watch.exchanges import Exchanges
from jdist.cluster.watch.stacks import exchanging
from jdist.data.leaves import TreeSpec, check_rows, check_same, count_rows, leaves_by_path, tree_spec
from jdist.data.position import LocalRows, Numbered, Part, Place, ProcessShard
from jdist.data.prefetch import StopRequest
from jdist.errors import ClusterTimeoutError, DatasetError, PeerFailedError
from jdist.typing import PyTree

T = TypeVar("T")
# For a live process: its source may be slow, or its loop pause. A dead one is noticed long before.
WAIT_S = 1800.0
RECHECK_S = 0.2  # between looks at the `StopRequest`: the garbage collector cannot wake a thread
_TEXT_BYTES = 1 << 18  # of a description by all processes; a message holds four times as much


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The processes that feed one dataset."""

    exchanges: Exchanges  # sends values to all of them
    share: ProcessShard  # this process's
    name: str  # of the dataset, the same on all processes and used once

    def together(self, what: str, make: Callable[[], T], describe: Callable[[T], Any]) -> tuple[T, list[Any]]:
        """Makes something on every process, or fails on all; returns it and all descriptions."""
        # `what` names it in errors: "the dataset function".
        result, message, failure = _attempt(make, lambda made: {"is": describe(made)})
        messages = Channel(self, what, StopRequest()).exchange("", message, failure, what)
        assert messages is not None, "nobody can ask this wait to stop"
        return result, [each["is"] for each in messages]  # pyright: ignore[reportReturnType] # set, as nothing failed

    def bounded(self, text: str) -> str:
        """Shortens a text to its hash where the texts of all processes would be too long for a message."""
        if len(text) * self.share.count <= _TEXT_BYTES:
            return text
        return f"sha256={hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Channel:
    """Exchanges messages for one purpose, such as a pass; a `stop` ends a wait for the other processes."""

    def __init__(self, peers: Peers, purpose: str, stop: StopRequest):
        self.peers = peers
        self._prefix = f"{peers.name}, {purpose}, "
        self._stop = stop
        self._sent: str | None = None  # the key of the last message
        self._to_leave = [self._prefix]

    def exchange(
        self, key: str, message: dict[str, Any], failure: Exception | None, what: str
    ) -> list[dict[str, Any]] | None:
        """Sends a message and returns all processes' messages; None if the wait was stopped."""
        # A key is used once. A call with the same `key` continues a stopped wait. `failure` is the
        # error that the message reports; `what` names its cause for the other processes.
        key = self._prefix + key
        if self._sent != key:
            self._sent = key
            self.peers.exchanges.say(key, message)
        with exchanging():
            messages = self._hear(key)
        if messages is None:
            return None
        if failure is not None:
            raise failure
        for process, each in enumerate(messages):
            if "error" in each:
                raise PeerFailedError(f"{what} failed on process {process}: {each['error']}", exit_code=each["code"])
        return messages

    def _hear(self, key: str) -> list[Any] | None:
        deadline_s = time.monotonic() + WAIT_S
        while not self._stop.asked:
            messages = self.peers.exchanges.hear(key, RECHECK_S)
            if messages is not None:
                return messages
            if time.monotonic() > deadline_s:
                raise ClusterTimeoutError(
                    f"the other processes did not reach {key!r} within {WAIT_S:g} s. All processes must make the same "
                    "datasets in the same order, and iterate over them alike; or the source of one of them stands still."
                )
        return None

    def over(self, items: Iterator[T]) -> Iterator[T]:
        """Iterates, and leaves the channel at the end, also of an iteration that is dropped before it has begun."""

        def iterate() -> Iterator[T]:
            try:
                yield from items
            finally:
                self.leave()

        iteration = iterate()
        weakref.finalize(iteration, self.leave).atexit = False
        return iteration

    def leave(self) -> None:
        """Leaves the channel; the garbage collector may call it, more than once, in several threads at the same time."""
        with contextlib.suppress(IndexError):
            # An atomic pop, so that one call alone forgets: process 0 would keep a second message.
            self.peers.exchanges.forget(self._to_leave.pop())


def _attempt(
    make: Callable[[], T], describe: Callable[[T], dict[str, Any]]
) -> tuple[T | None, dict[str, Any], Exception | None]:
    """Makes something; returns it, the message about it for the other processes, and the error if there was one."""
    try:
        made = make()
        return made, describe(made), None
    except Exception as error:  # noqa: BLE001 - raised once the others have heard of it
        return None, {"error": f"{type(error).__name__}: {error}"[:2000], "code": exit_status.of(error)}, error


def check_alike(texts: list[str], what: str, remedy: str) -> None:
    """Refuses processes that differ, with the two processes and the first difference."""
    # `texts` has a JSON object for each process, with a text for each name, or `bounded`'s hash of
    # it. `what` is different: "the batches of the processes".
    for process, text in enumerate(texts):
        if text != texts[0]:
            difference = _difference(texts[0], text, process)
            raise DatasetError(f"{what} differ: {difference}. {remedy}")


def _difference(first: str, other: str, process: int) -> str:
    if not (first.startswith("{") and other.startswith("{")):
        return f"that of process {process} is not that of process 0"
    before, now = json.loads(first), json.loads(other)
    name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
    missing = "not there"
    return f"{name} is {before.get(name, missing)} on process 0, and {now.get(name, missing)} on process {process}"


def parts_in_step(local: LocalBatches, channel: Channel) -> Iterator[Part | None]:
    """Yields this process's parts of global batches, with the place behind each."""
    # A process without further batches continues with empty parts until all have ended. None comes
    # if the wait for the other processes was stopped; the next item continues the wait. The number
    # of the first batch is the same on all.
    full, start = (), local.place.step
    for step in itertools.count(start):
        _, message, failure = _attempt(local.next_rows, lambda rows: {"rows": rows, "end": local.ended})
        if step == start:
            message |= local.describe_first(channel.peers.bounded)
        what = f"making batch {step} (from 0)"
        while (messages := channel.exchange(f"step {step}", message, failure, what)) is None:
            yield None
        if all(each["end"] for each in messages):
            return
        if step == start:
            full = _check_first(messages)
        place = local.place._replace(step=step + 1)
        yield place, LocalRows(local.rows_to_feed(), tuple(each["rows"] for each in messages), full)


def batches_in_step(batches: Iterator[Numbered], channel: Channel) -> Iterator[Numbered | None]:
    """Yields global batches that every process makes in full, once rows, leaves and end agree."""
    # Otherwise one process would wait in a step for another with a finished loop, or an array of
    # another shape. For None see `parts_in_step`.
    bounded = channel.peers.bounded
    for number in itertools.count():
        batch, message, failure = _attempt(
            lambda: next(batches, None),
            lambda each: {"is": bounded(json.dumps(_outline(each and each[1]))), "end": each is None},
        )
        what = f"making batch {number} (from 0)"
        while (messages := channel.exchange(f"step {number}", message, failure, what)) is None:
            yield None
        check_alike(
            [each["is"] for each in messages],
            f"batches {number} (from 0) of the processes",
            'Every process must make the same; for rows of their own use `jdist.InputOptions(autoshard="off")`',
        )
        if messages[0]["end"]:
            return
        yield batch


def _outline(batch: PyTree | None) -> dict[str, str]:
    """Describes what must be the same of a batch on all processes; None: the source has ended."""
    if batch is None:
        return {"the number of rows": "nothing, as its source has ended,"}
    return {"the number of rows": f"{count_rows(batch):,}"} | leaves_by_path(batch)


class LocalBatches:
    """The batches that a process makes, each its part of a global one."""

    # `full` returns the rows of a full batch, None for as many as the first has; it is asked after
    # the first was made. `last` is the source's last batch, which fills up if the source ended
    # before the first step.

    def __init__(
        self,
        batches: Iterator[Numbered],
        start: Place,
        *,
        full: Callable[[], int | None],
        last: Callable[[], PyTree | None],
        state_at_end: Callable[[], Any],
    ):
        self._batches = batches
        self._full_rows = full
        self._last = last
        self._state_at_end = state_at_end
        self._batch: PyTree | None = None
        self._filler: PyTree | None = None  # the last real row
        self._first: TreeSpec | None = None
        self._full = 0  # not known yet
        self.place = start  # behind the batch that came last, but for its number
        self.ended = False

    def next_rows(self) -> int:
        """Moves to the next batch and counts its rows; 0 after the end."""
        if self.ended:
            return 0
        try:
            self.place, batch = next(self._batches)
        except StopIteration:
            self._batch, self.ended = None, True
            self.place = self.place._replace(state=self._state_at_end(), ended=True)
            if self._filler is None and (last := self._last()) is not None:
                self._filler = _last_row(last)
            return 0
        rows = count_rows(batch)
        if self._first is None:
            self._first, self._full = tree_spec(batch), self._full_rows() or rows
        check_same(self._first, batch)
        check_rows(rows, self._full, "a full batch of this process")
        self._batch = batch
        self._filler = _last_row(batch) if rows else self._filler
        return rows

    def describe_first(self, bounded: Callable[[str], str]) -> dict[str, Any]:
        """Describes the first batch for the other processes; empty without a row."""
        if self._filler is None:
            return {}
        leaves = bounded(json.dumps(leaves_by_path(self._filler)))
        return {"leaves": leaves, "full": self._full or self._full_rows()}

    def rows_to_feed(self) -> PyTree:
        """Returns the batch, or one row to fill up with where it has none."""
        if self._batch is not None and count_rows(self._batch):
            return self._batch
        return jax.tree.map(np.array, self._filler)  # copied: a device array may share its buffer


def _last_row(batch: PyTree) -> PyTree | None:
    return jax.tree.map(lambda leaf: leaf[-1:].copy(), batch) if count_rows(batch) else None


def _check_first(messages: list[dict[str, Any]]) -> tuple[int, ...]:
    """Checks that the first batches fit each other; returns the rows of a full batch by process."""
    for process, message in enumerate(messages):
        if "leaves" not in message:
            raise DatasetError(
                f"process {process} has no rows: its source gave none, so its part of a batch cannot be filled up. "
                "Divide the data so that each process has rows"
            )
    check_alike(
        [message["leaves"] for message in messages],
        "the batches of the processes",
        "All need one structure, one dtype a leaf and one shape a row",
    )
    return tuple(message["full"] for message in messages)
