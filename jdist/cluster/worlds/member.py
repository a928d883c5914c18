"""`Member`: a process's connection to the host of its job's worlds."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jdist.cluster.address import split
from jdist.cluster.watch.messages import MOST_BYTES, BadMessage, Connection, Message, WakeupPipe
from jdist.errors import ClusterError, ClusterTimeoutError
from jdist.support.versions import versions

_BEAT_S = 1.0
_JOIN_S = 2.0
_SILENCE_S = 30.0
_TRY_S, _RETRY_S = 2.0, 0.2


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process's place in a world."""

    generation: int
    rank: int
    addresses: tuple[str, ...]  # of all processes, by rank
    jax: str  # the address of JAX's coordination service
    watch: str  # of the watch
    step: int | None  # at which all go on; None: at the beginning
    newcomers: tuple[int, ...]  # ranks that have no state yet


class Released(Exception):
    """This process has left its job for good."""


class Member:
    """The connection and the thread that serves it."""

    def __init__(
        self,
        host: str,
        *,
        name: str,
        number: int,
        address: str | None,
        token: str,
        silence_s: float,  # after which the host has a process for lost
        timeout_s: float,  # for processes to come, at the start and after a loss
        on_broken: Callable[[int], object],  # called from the thread with the generation that all must leave
        on_regroup: Callable[[], object],
        on_end: Callable[[str], object],  # the host is gone, or has fenced this process
    ):
        self.aside = False  # whether the job runs already without this process
        self._on_broken, self._on_regroup, self._on_end = on_broken, on_regroup, on_end
        self._outbox: list[Message] = []
        self._answer: Message | None = None
        self._failure: str | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._wakeup = WakeupPipe()
        connection = _connect(host, timeout_s)
        self._connection = Connection(connection, most_bytes=MOST_BYTES, most_unsent_bytes=MOST_BYTES)
        hello = {"type": "hello", "name": name, "number": number, "token": token, "versions": dict(versions())}
        hello |= {"silence_s": silence_s, "gather_s": timeout_s}
        self._send(hello if address is None else {**hello, "address": address})
        self._thread = threading.Thread(target=self._run, name="jdist-member", daemon=True)
        self._thread.start()
        answer = self._wait("an answer to its hello", timeout_s)
        self.aside = answer["type"] == "aside"

    def next_world(self, generation: int, steps: Iterable[int], *, leaves: bool = False) -> Place:
        """Says that this process has left a world (-1: none), and waits for its place in the next one."""
        # As long as the host is heard of: it has a deadline for those that all wait for.
        self._send({"type": "ready", "generation": generation, "steps": [*steps], "leaves": leaves})
        answer = self._wait("its next world")
        if answer["type"] == "released":
            raise Released
        return Place(
            generation=answer["generation"],
            rank=answer["rank"],
            addresses=tuple(answer["addresses"]),
            jax=answer["jax"],
            watch=answer["watch"],
            step=answer["step"],
            newcomers=tuple(answer["newcomers"]),
        )

    def bye(self) -> None:
        """Ends the connection: the program has come to its end."""
        self._send({"type": "bye"})
        self.close()

    def close(self) -> None:
        """Ends the connection; without a `bye` this process is lost to the others."""
        self._closed = True
        self._wakeup.wake()
        self._thread.join(_JOIN_S)

    def _send(self, message: Message) -> None:
        with self._changed:
            self._outbox.append(message)
        self._wakeup.wake()

    def _wait(self, what: str, timeout_s: float | None = None) -> Message:
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self._failure is not None, timeout_s)
            answer, self._answer = self._answer, None
        if answer is not None:
            return answer
        if self._failure is not None:
            raise ClusterError(self._failure)
        raise ClusterTimeoutError(
            f"the host of the job's worlds did not send this process {what} within {timeout_s:g} s."
        )

    def _run(self) -> None:
        failure = "the host of the job's worlds is gone"
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wakeup, selectors.EVENT_READ)
                selector.register(self._connection.connection, selectors.EVENT_READ)
                failure = self._serve(selector)
        except (OSError, BadMessage) as exc:
            failure = f"{failure} ({exc})"
        finally:
            self._connection.close()
            if not self._closed:
                self._on_end(
                    failure
                )  # first: it ends the process, and a program that is woken would say something else
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _serve(self, selector: selectors.BaseSelector) -> str:
        sent_s, heard_s = 0.0, time.monotonic()
        while True:
            with self._changed:
                messages, self._outbox = self._outbox, []
            if time.monotonic() - sent_s >= _BEAT_S:
                messages.append({"type": "beat"})
                sent_s = time.monotonic()
            for message in messages:
                self._connection.send(message)
            if self._closed:
                return "this process has left the job"
            begun_s = time.monotonic()
            selector.select(_BEAT_S)
            self._wakeup.clear()
            messages, now_s = self._connection.receive(), time.monotonic()
            heard_s = now_s if messages or now_s - begun_s > 2 * _BEAT_S else heard_s  # or it stood still itself
            if now_s - heard_s > _SILENCE_S:
                return f"nothing was heard of the host of the job's worlds for {_SILENCE_S:g} s"
            for message in messages:
                if (failure := self._take(message)) is not None:
                    return failure

    def _take(self, message: Message) -> str | None:
        match message:
            case {"type": "world" | "aside" | "welcome" | "released"}:
                with self._changed:
                    self._answer = message
                    self._changed.notify_all()
                self._closed = self._closed or message["type"] == "released"
            case {"type": "broken", "generation": int(generation)}:
                self._on_broken(generation)
            case {"type": "regroup"}:
                self._on_regroup()
            case {"type": "refused" | "end", "reason": str(reason)}:
                return f"the job goes on without this process: {reason}" if message["type"] == "refused" else reason
            case {"type": "fenced"}:
                return "the others have lost this process, and go on without it"
        return None


def _connect(host: str, timeout_s: float) -> socket.socket:
    """Connects to the host, which may not listen yet."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection(split(host), _TRY_S)
        except OSError as exc:
            if time.monotonic() > deadline_s:
                raise ClusterTimeoutError(
                    f"the host of the job's worlds at {host} was not reached within {timeout_s:g} s ({exc}). Does the "
                    "launcher, or process 0, still run, and is the port open between the machines?"
                ) from exc
        time.sleep(_RETRY_S)
