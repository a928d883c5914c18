"""A leader's link to its backup: first a copy of the whole state, then each log entry in its order, several in one call."""

from __future__ import annotations

import collections
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jdist.ps.protocol.replica_role import BackupAnswer
from jdist.ps.server.shard_transfer import ShardState, pack_shard
from jdist.ps.transport.interface import CallFailed, Channel, Header

_LOG = logging.getLogger(__name__)
_RANDOM = random.SystemRandom()  # the pauses take no numbers of `random`, which a program may have seeded
MOST_ENTRIES = 256  # of one call
MOST_CALL_BYTES = 64 << 20  # beyond which nothing more is put into a call
MOST_BEHIND_BYTES = 256 << 20  # that may wait while the state is copied
_COPY_S, _CALL_S, _REACH_S = 600.0, 20.0, 2.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class BackupLink:
    """A leader's link to its backup, in one term; its functions are called with the lock held."""

    def __init__(
        self,
        channel: Channel,
        *,
        # The leader's; the lock is the leader's as well, notified of news.
        term: int,
        # The backup's. A process in its place takes nothing until the coordinator knows of it.
        incarnation: str,
        lock: threading.Condition,
        # The last entry's number and the state after it; None while pushes wait at the shard.
        state: Callable[[], tuple[int, ShardState] | None],
        # The number up to which the backup holds all entries; whether it has caught up.
        acknowledged: Callable[[int, bool], None],
        # The term under which another copy leads.
        deposed: Callable[[int], None],
    ):
        self._channel, self._term, self._lock = channel, term, lock
        self._state, self._acknowledged, self._deposed = state, acknowledged, deposed
        self.incarnation = incarnation
        self._entries: collections.deque[tuple[int, Header, list[Any]]] = collections.deque()
        # The arrays of entries that the backup does not hold yet.
        self.behind_bytes = 0
        self._closed = threading.Event()
        self._copy_is_due = True
        self._is_copied = self._is_given_up = False
        self._since: float | None = None  # what is being sent has had no answer
        self._is_relied_on = False  # callers wait for what is being sent
        self._thread = threading.Thread(target=self._send, name="jdist-forward", daemon=True)
        self._thread.start()

    def add(self, number: int, entry: Header, arrays: list[Any]) -> None:
        """Sends an entry that has changed the state; called with the lock held."""
        if self._copy_is_due:
            return  # it will be in the copy
        self._entries.append((number, entry, arrays))
        self.behind_bytes += _bytes(arrays)

    def copy_again(self) -> None:
        """Sends a copy of a state that was replaced, instead of all that was to be sent; called with the lock held."""
        self._copy_is_due = True

    @property
    def waiting_s(self) -> float:
        """Seconds for which the backup has not answered."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def reaches(self) -> bool:
        """Asks whether the backup answers this process."""
        try:
            self._channel.call("status", {}, timeout_s=_REACH_S)
        except (CallFailed, ValueError):  # as in `_send`
            return False
        return True

    def close(self) -> None:
        """Ends the connection; called with the lock held."""
        self._closed.set()
        self._entries.clear()
        self._channel.close()
        self._lock.notify_all()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread of a closed link."""
        self._thread.join(timeout_s)

    def _send(self) -> None:
        pause = _PAUSE_S
        while True:
            with self._lock:
                request = None
                while request is None:
                    if self._closed.is_set():
                        return
                    request = self._next()
                    if request is None:
                        self._lock.wait()
            number, entries, call = request
            self._since = self._since or time.monotonic()
            try:
                if entries == 0 and not self.reaches():  # a copy takes minutes, and a cut link as long to be noticed
                    raise CallFailed(self._channel.peer, "unavailable")
                answer, pause, failed = call(), _PAUSE_S, None
            except (CallFailed, ValueError) as exc:  # a WireError; or gRPC's word for a channel that was closed
                answer, failed = {}, exc
            with self._lock:
                if self._closed.is_set():
                    return
                if failed is None or not self._is_relied_on:
                    self._since = None
                if failed is None and self._take_answer(answer, number, entries):
                    self._lock.notify_all()
                    continue
                self._copy_is_due = self._copy_is_due or entries == 0
            if failed is not None:
                _LOG.info("a backup refuses the state or entries sent to it: %s", failed)
            self._closed.wait(pause * _RANDOM.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _next(self) -> tuple[int, int, Callable[[], Header]] | None:
        """Returns the last entry's number, how many entries to send (0: a copy), and the call; None if nothing is due."""
        if self._is_given_up:
            return None
        if self._copy_is_due:
            numbered_state = self._state()
            if numbered_state is None:
                return None
            self._copy_is_due = self._is_copied = False
            number, state = numbered_state
            self._drop(len(self._entries))  # they are in the state
            header, arrays = pack_shard(state)
            return number, 0, lambda: self._call("install", {**header, "number": number}, arrays, _COPY_S)
        if not self._entries:
            return None
        batch, size = list[tuple[int, Header, list[Any]]](), 0
        for entry in self._entries:
            if batch and (len(batch) == MOST_ENTRIES or size > MOST_CALL_BYTES):
                break
            batch.append(entry)
            size += _bytes(entry[2])
        first, last = batch[0][0], batch[-1][0]
        header = {"first": first, "entries": [entry for _, entry, _ in batch]}
        arrays = [x for _, _, payload in batch for x in payload]
        return last, len(batch), lambda: self._call("forward", header, arrays, _CALL_S)

    def _call(self, method: str, header: Header, arrays: list[Any], timeout_s: float) -> Header:
        header = {**header, "term": self._term, "to": self.incarnation}
        return self._channel.call(method, header, arrays, timeout_s=timeout_s, data=True)[0]

    def _take_answer(self, answer: Header, number: int, entries: int) -> bool:
        """Takes in the backup's answer; returns whether the next request can be sent at once."""
        match answer["took"]:
            case BackupAnswer.LOWER_TERM:
                self._deposed(answer["term"])
                return True
            case BackupAnswer.OTHER_PROCESS:
                self._is_given_up = True  # until there is another term
                return True
            case BackupAnswer.GAP:
                self._copy_is_due = not self._is_copied
                return False
        self._is_copied = self._is_copied or entries == 0
        self._drop(entries)
        is_near = not self._entries or self.behind_bytes > MOST_BEHIND_BYTES
        caught_up = is_near and not self._copy_is_due
        self._is_relied_on = self._is_relied_on or caught_up
        self._acknowledged(number, caught_up)
        return True

    def _drop(self, entries: int) -> None:
        for _ in range(entries):
            self.behind_bytes -= _bytes(self._entries.popleft()[2])


def _bytes(arrays: list[Any]) -> int:
    return sum(np.asarray(x).nbytes for x in arrays)
