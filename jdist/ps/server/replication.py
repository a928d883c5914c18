"""A leader's way to its backup: first a copy of the whole state, then each entry in its order, several in one call."""

from __future__ import annotations

import collections
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from jdist.ps.server.shard_transfer import State, pack_shard
from jdist.ps.transport.interface import CallFailed, Channel, Header

_LOG = logging.getLogger(__name__)
MOST_ENTRIES = 256  # of one call
MOST_CALL_BYTES = 64 << 20  # beyond which nothing more is put into a call
MOST_BEHIND_BYTES = 256 << 20  # that may wait while the state is copied
_COPY_S, _CALL_S, _REACH_S = 600.0, 20.0, 2.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class Leader(Protocol):
    """What it needs of the copy that leads; called with its lock held."""

    def state(self) -> tuple[int, State] | None:
        """The last entry's number, and the state after it; None while something waits at the shard."""
        ...

    def backed_up(self, term: int, number: int, *, caught_up: bool) -> None:
        """The backup holds everything up to an entry."""
        ...

    def deposed(self, term: int) -> None:
        """Somebody else leads."""
        ...


class Forwarding:
    """What a leader sends to its backup, in one term.

    Args:
        leader: the copy that leads.
        lock: its lock, notified of news.
        channel: to the backup.
        term: the leader's.
        to: the backup's incarnation; another process in its place is the coordinator's affair.
    """

    def __init__(self, leader: Leader, lock: threading.Condition, channel: Channel, term: int, to: str):
        self._leader, self._lock, self._channel, self._term, self.to = leader, lock, channel, term, to
        self._entries: collections.deque[tuple[int, Header, list[Any]]] = collections.deque()
        self.behind_bytes = 0
        self._closed, self._copy_is_due, self._copied, self._given_up = threading.Event(), True, False, False
        self._since: float | None = None  # what is being sent has had no answer
        self._is_relied_on = False  # callers wait for what is being sent
        self._thread = threading.Thread(target=self._send, name="jdist-forward", daemon=True)
        self._thread.start()

    def add(self, number: int, said: Header, arrays: list[Any]) -> None:
        """An entry has changed the state; called with the lock held."""
        if self._copy_is_due:
            return  # it will be in the copy
        self._entries.append((number, said, arrays))
        self.behind_bytes += _bytes(arrays)

    def begin_anew(self) -> None:
        """The state is another one: a copy of it takes the place of all that was to be sent. Called with the lock held."""
        self._copy_is_due = True

    @property
    def waiting_s(self) -> float:
        """How long the backup has not answered what it was sent."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def reaches(self) -> bool:
        """Whether the backup answers this process."""
        try:
            self._channel.call("status", {}, timeout_s=_REACH_S)
        except (CallFailed, ValueError):  # as in `_send`
            return False
        return True

    def close(self) -> None:
        """Sends nothing any more; called with the lock held."""
        self._closed.set()
        self._entries.clear()
        self._channel.close()
        self._lock.notify_all()

    def join(self, timeout_s: float) -> None:
        """Waits for its thread, once it is closed."""
        self._thread.join(timeout_s)

    def _send(self) -> None:
        pause = _PAUSE_S
        while True:
            with self._lock:
                made = None
                while made is None:
                    if self._closed.is_set():
                        return
                    made = self._next()
                    if made is None:
                        self._lock.wait()
            number, sent, call = made
            self._since = self._since or time.monotonic()
            try:
                if sent == 0 and not self.reaches():  # a copy may take minutes, and a cut link as long to be noticed
                    raise CallFailed(self._channel.peer, "unavailable")
                answer, pause, failed = call(), _PAUSE_S, None
            except (CallFailed, ValueError) as exc:  # a WireError; or gRPC's word for a channel that was closed
                answer, failed = {}, exc
            with self._lock:
                if self._closed.is_set():
                    return
                if failed is None or not self._is_relied_on:
                    self._since = None
                if failed is None and self._took(answer, number, sent):
                    self._lock.notify_all()
                    continue
                self._copy_is_due = self._copy_is_due or sent == 0
            if failed is not None:
                _LOG.info("a backup does not take what it is sent: %s", failed)
            self._closed.wait(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _next(self) -> tuple[int, int, Callable[[], Header]] | None:
        """What is to be sent: the last entry's number, how many entries, and the call; None if there is nothing."""
        if self._given_up:
            return None
        if self._copy_is_due:
            found = self._leader.state()
            if found is None:
                return None
            self._copy_is_due = self._copied = False
            number, state = found
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
        header = {"first": first, "entries": [said for _, said, _ in batch]}
        arrays = [x for _, _, given in batch for x in given]
        return last, len(batch), lambda: self._call("forward", header, arrays, _CALL_S)

    def _call(self, method: str, header: Header, arrays: list[Any], timeout_s: float) -> Header:
        header = {**header, "term": self._term, "to": self.to}
        return self._channel.begin(method, header, arrays, timeout_s=timeout_s)()[
            0
        ]  # over a data connection, if small, too

    def _took(self, answer: Header, number: int, sent: int) -> bool:
        """Whether the backup took it."""
        if answer["took"] == "term":
            self._leader.deposed(answer["term"])
            return True
        if answer["took"] == "stranger":
            self._given_up = True  # until there is another term
            return True
        if answer["took"] == "gap":
            self._copy_is_due = not self._copied
            return False
        self._copied = self._copied or sent == 0
        self._drop(sent)
        caught_up = not self._entries or self.behind_bytes > MOST_BEHIND_BYTES
        caught_up = caught_up and not self._copy_is_due
        self._is_relied_on = self._is_relied_on or caught_up
        self._leader.backed_up(self._term, number, caught_up=caught_up)
        return True

    def _drop(self, entries: int) -> None:
        for _ in range(entries):
            self.behind_bytes -= _bytes(self._entries.popleft()[2])


def _bytes(arrays: list[Any]) -> int:
    return sum(np.asarray(x).nbytes for x in arrays)
