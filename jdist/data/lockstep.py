"""Keeps the processes that feed one dataset in step: they agree in every step on what each has, and on the end."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from jdist.cluster import exit_status
from jdist.cluster.watch.stacks import exchanging
from jdist.data.leaves import TreeSpec, check_same, count_rows, to_numpy, tree_spec
from jdist.data.prefetch import Stop
from jdist.data.process_shard import LocalRows, ProcessShard
from jdist.errors import BatchError, ClusterTimeoutError, DatasetError, PeerFailedError

PyTree = Any
T = TypeVar("T")
# Of a live process: it may take long for a batch, or pause in its loop. A dead one is noticed long before.
WAIT_S = 1800.0
RECHECK_S = 0.2  # between looks whether a wait is still wanted, as the garbage collector cannot wake it
_TEXT_BYTES = 1 << 18  # of one description by all processes; a message of the cluster holds four times as much


class Exchanges(Protocol):
    """Sends small values to all processes: `jdist.cluster.watch.exchanges.Exchanges`, or a test's."""

    def say(self, key: str, value: Any) -> None: ...

    def hear(self, key: str, timeout_s: float) -> list[Any] | None: ...

    def forget(self, prefix: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The processes that feed one dataset.

    Attributes:
        exchanges: sends values to all of them.
        share: which of them this is.
        name: of the dataset, the same on all processes and used once.
    """

    exchanges: Exchanges
    share: ProcessShard
    name: str

    def channel(self, purpose: str, stop: Stop | None = None) -> Channel:
        """Opens a channel for one purpose."""
        return Channel(self.exchanges, f"{self.name}, {purpose}, ", stop or Stop())

    def together(self, what: str, make: Callable[[], T], describe: Callable[[T], Any]) -> tuple[T, list[Any]]:
        """Makes something on every process, or fails on all if one of them fails.

        Args:
            what: names it, and why it failed: "the dataset function".
            make: makes it.
            describe: gives what the others have to know of it.

        Returns:
            It, and each process's description.

        Raises:
            PeerFailedError: another process failed.
            Exception: what `make` or `describe` raised here.
        """
        failure = result = None
        try:
            result = make()
            message = {"is": describe(result)}
        except Exception as error:  # noqa: BLE001 - raised once the others have heard of it
            failure, message = error, error_message(error)
        messages = self.channel(what).exchange("", message)
        assert messages is not None, "nobody has asked it to stop"
        raise_failure(messages, failure, what)
        return result, [each["is"] for each in messages]  # pyright: ignore[reportReturnType] # set, as nothing failed

    def bounded(self, text: str) -> str:
        """Gives a text, or its hash where the texts of all processes would be too long for a message."""
        if len(text) * self.share.count <= _TEXT_BYTES:
            return text
        return f"sha256={hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Channel:
    """Exchanges values among the processes under keys with one prefix.

    Args:
        exchanges: sends them.
        prefix: of the keys.
        stop: whether to stop waiting.
    """

    def __init__(self, exchanges: Exchanges, prefix: str, stop: Stop):
        self._exchanges = exchanges
        self._prefix = prefix
        self._stop = stop
        self._sent: str | None = None  # the key of the last value
        self._to_leave = [prefix]

    def exchange(self, what: str, value: Any) -> list[Any] | None:
        """Sends a value and gives each process's; None: it was stopped, and a call with the same `what` goes on waiting.

        Raises:
            ClusterError: a process did not come in time, has left, or is lost.
        """
        key = self._prefix + what
        if self._sent != key:
            self._sent = key
            self._exchanges.say(key, value)
        with exchanging():
            return self._receive(key)

    def _receive(self, key: str) -> list[Any] | None:
        deadline_s = time.monotonic() + WAIT_S
        while not self._stop.asked:
            values = self._exchanges.hear(key, RECHECK_S)
            if values is not None:
                return values
            if time.monotonic() > deadline_s:
                raise ClusterTimeoutError(
                    f"the other processes did not come to {key!r} within {WAIT_S:g} s. All processes must make the same "
                    "datasets in the same order, and iterate over them alike; or the source of one of them stands still."
                )
        return None

    def leave(self) -> None:
        """Leaves the channel; the garbage collector may call it, more than once, in several threads at the same time."""
        with contextlib.suppress(IndexError):
            # Popping is atomic, so that one call alone forgets: process 0 would keep a second message for ever.
            self._exchanges.forget(self._to_leave.pop())


def error_message(error: Exception) -> dict[str, Any]:
    """Describes an error for the other processes."""
    return {"error": f"{type(error).__name__}: {error}"[:2000], "code": exit_status.of(error)}


def raise_failure(messages: list[Any], failure: Exception | None, what: str) -> None:
    """Raises this process's failure, else reports another process's.

    Args:
        messages: of each process; of one that failed, its `error_message`.
        failure: of this process.
        what: names what failed.
    """
    if failure is not None:
        raise failure
    for process, message in enumerate(messages):
        if "error" in message:
            raise PeerFailedError(f"{what} failed on process {process}: {message['error']}", exit_code=message["code"])


def check_alike(texts: list[str], what: str, remedy: str) -> None:
    """Refuses processes that differ where they must not.

    Args:
        texts: of each process, a JSON object with a text for each name; or `bounded`'s hash of it.
        what: is different, "the batches of the processes".
        remedy: a sentence.

    Raises:
        DatasetError: names two processes and the first thing in which they differ.
    """
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


def parts_in_step(
    local: LocalBatches, channel: Channel, *, start: int, bounded: Callable[[str], str]
) -> Iterator[tuple[int, LocalRows] | None]:
    """Gives this process's parts of global batches, with the position after each.

    A process whose batches have ended goes on with parts of no real rows, until all have.

    Args:
        local: the batches that this process makes.
        channel: to the other processes.
        start: the number of the first batch, the same on all.
        bounded: `Peers.bounded`.

    Yields:
        Parts; None when the channel was stopped before all had come; the next one goes on waiting.

    Raises:
        DatasetError: a process has no row to begin with.
        PeerFailedError: another process's source failed.
        Exception: what this process's own source raised.
    """
    full = ()
    try:
        for step in itertools.count(start):
            message = local.take()
            if step == start:
                message |= local.description(bounded)
            while (messages := channel.exchange(f"step {step}", message)) is None:
                yield None
            raise_failure(messages, local.failure, f"making batch {step} (from 0)")
            if all(each["end"] for each in messages):
                return
            if step == start:
                full = _check_first(messages)
            yield step + 1, LocalRows(local.rows_to_feed(), tuple(each["rows"] for each in messages), full)
    finally:
        channel.leave()


def batches_in_step(
    batches: Iterator[PyTree], channel: Channel, *, bounded: Callable[[str], str]
) -> Iterator[PyTree | None]:
    """Gives global batches that every process makes whole, once all have the same rows, leaves and end.

    Else one process would wait in a step for another whose loop is over, or whose array has another shape.

    Args:
        batches: the batches that this process makes, with numpy leaves.
        channel, bounded: see `parts_in_step`, for None and the other errors as well.

    Raises:
        DatasetError: the processes' batches differ.
    """
    try:
        for number in itertools.count():
            batch, failure = None, None
            try:
                batch = next(batches, None)
                message = {"is": bounded(json.dumps(_outline(batch))), "end": batch is None}
            except Exception as error:  # noqa: BLE001 - raised once the others have heard of it
                failure, message = error, error_message(error)
            while (messages := channel.exchange(f"step {number}", message)) is None:
                yield None
            raise_failure(messages, failure, f"making batch {number} (from 0)")
            check_alike(
                [each["is"] for each in messages],
                f"batches {number} (from 0) of the processes",
                "Every process has to make the same; one that has rows of its own is fed by "
                '`jdist.InputOptions(autoshard="off")`',
            )
            if messages[0]["end"]:
                return
            yield batch
    finally:
        channel.leave()


def _outline(batch: PyTree | None) -> dict[str, str]:
    """Describes what has to be the same of a batch on all processes; None: there is none any more."""
    if batch is None:
        return {"the number of rows": "nothing, as its source has ended,"}
    leaves = {leaf.path: str(leaf) for leaf in tree_spec(batch).leaves}
    return {"the number of rows": f"{count_rows(batch):,}"} | leaves


class LocalBatches:
    """The batches that a process makes, each its part of a global one.

    Args:
        batches: one for each step.
        full: rows of a full one; None: as many as the first has. Asked after the first was made.
        last: the last batch of the source, to fill up with where it has ended before the first step; or None.
    """

    def __init__(self, batches: Iterator[PyTree], *, full: Callable[[], int | None], last: Callable[[], PyTree | None]):
        self._batches = batches
        self._full_rows = full
        self._last = last
        self._batch: PyTree | None = None
        self._filler: PyTree | None = None  # its last row that was real
        self._first: TreeSpec | None = None
        self._full = 0  # not known yet
        self._ended = False
        self.failure: Exception | None = None

    def take(self) -> dict[str, Any]:
        """Goes to the next batch; gives its number of rows, the end, or the error, as a message for the others."""
        try:
            rows = 0 if self._ended else self._next_rows()
        except Exception as error:  # noqa: BLE001 - raised once the others have heard of it
            self.failure = error
            return error_message(error)
        return {"rows": rows, "end": self._ended}

    def _next_rows(self) -> int:
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
        """Describes the first batch for the others; empty if there is no row."""
        if self._filler is None:
            return {}
        leaves = {leaf.path: str(leaf) for leaf in tree_spec(self._filler).leaves}
        return {"leaves": bounded(json.dumps(leaves)), "full": self._full or self._full_rows()}

    def rows_to_feed(self) -> PyTree:
        """Gives the batch; where it has no row, one to fill up with."""
        if self._batch is not None and count_rows(self._batch):
            return self._batch
        return jax.tree.map(np.array, self._filler)  # a copy: an array on a device may share its buffer

    def _check(self, batch: PyTree) -> None:
        """Refuses a batch that is not like the first, before the others count on it."""
        spec, rows = tree_spec(batch), count_rows(batch)
        if self._first is None:
            self._first, self._full = spec, self._full_rows() or rows
        check_same(self._first, spec)
        if rows > self._full:
            raise BatchError(
                f"a batch has {rows} rows, but a full batch of this process has {self._full}; a larger one would "
                "compile the step again. Let the source give its largest batch first, or split this one"
            )


def _last_row(batch: PyTree) -> PyTree | None:
    return jax.tree.map(lambda leaf: leaf[-1:].copy(), batch) if count_rows(batch) else None


def _check_first(messages: list[dict[str, Any]]) -> tuple[int, ...]:
    """Checks that the first batches fit each other; gives the rows of a full batch that each process has."""
    for process, message in enumerate(messages):
        if "leaves" not in message:
            raise DatasetError(
                f"process {process} has no rows: its source gave none to begin with, so there is nothing to fill its part "
                "of a batch up with. Share the data out so that each process has some"
            )
    check_alike(
        [message["leaves"] for message in messages],
        "the batches of the processes",
        "All need one structure, one dtype a leaf and one shape a row",
    )
    return tuple(message["full"] for message in messages)
