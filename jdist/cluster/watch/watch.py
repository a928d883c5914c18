"""A process's line to process 0: it tells of itself, hears of the others, and learns at once when one is lost.

The thread here goes on while the program is blocked in a collective, which a lost process would block for ever.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jdist.cluster.watch.exchanges import Exchanges
from jdist.cluster.watch.lines import BadMessage, Reader, send
from jdist.errors import ClusterError, PeerLostError

_CONNECT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who this process is, and where process 0 waits for it.

    Attributes:
        process: its index.
        count: how many processes there are.
        address: its own address, "host:port", as others know it; None: process 0 sees where it comes from.
        host: process 0's host.
        port: the port that process 0 watches on.
        token: shared by all processes of the job; "" for none.
    """

    process: int
    count: int
    address: str | None
    host: str
    port: int
    token: str


class Watch:
    """The line, and the thread that listens to it.

    Args:
        place: who this process is.
        start_timeout_s: how long to wait until all processes have come.
        silence_s: a process that is not heard of for so long is lost.
        on_lost: called once, from the thread, when a process is lost; the program is to end.
        missing: on process 0, which processes have not come yet.

    Raises:
        ClusterError: process 0 was not reached, or not all came, in time; or this process was refused.

    Attributes:
        exchanges: what the processes say to all.
    """

    def __init__(
        self,
        place: Place,
        *,
        start_timeout_s: float,
        silence_s: float,
        on_lost: Callable[[PeerLostError], None],
        missing: Callable[[], list[int]] = list,
    ):
        self.place, self._silence_s, self._on_lost = place, silence_s, on_lost
        self._beat_s = min(1.0, silence_s / 5)
        self._changed = threading.Condition()
        self.exchanges = Exchanges(self._tell)
        self._addresses: list[str] | None = None
        self._refused: str | None = None
        self._stopping: str | None = None
        self._passed = -1  # the last step that the program went on after
        self._stop_at: int | None = None
        self._left: dict[int, str] = {}
        self._lost: PeerLostError | None = None
        self._blocked_s: float | None = None  # since when the program has waited for other processes
        self._step = 0
        self._closed = self._said_bye = False
        self._sending = threading.Lock()
        deadline_s = time.monotonic() + start_timeout_s
        self._connection = self._connect(deadline_s, start_timeout_s)
        hello = {"type": "hello", "process": place.process, "count": place.count, "token": place.token}
        self._tell(hello | ({} if place.address is None else {"address": place.address}))
        self._thread = threading.Thread(target=self._listen, name="jdist-watch", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(
                lambda: self._addresses or self._refused or self._lost, deadline_s - time.monotonic()
            )
        if self._refused is not None:
            self.close()
            raise ClusterError(
                f"process 0 at {place.host}:{place.port} refused process {place.process}: {self._refused}."
            )
        if self._addresses is None and self._lost is None:
            names = ", ".join(map(str, missing()))
            absent = f"; missing: process {names}" if names else ""
            self.close()
            raise ClusterError(
                f"not all of the {place.count} processes came within {start_timeout_s:g} s{absent}. Look at their logs; if "
                "they only start late, raise the time (`CommunicationOptions(start_timeout_s=...)`)."
            )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the processes are, by index."""
        return tuple(self._addresses or ())

    @property
    def stopping(self) -> str | None:
        """Why all processes are to stop, as one of them wished; None if nobody did."""
        return self._stopping

    def progress(self, step: int) -> None:
        """Notes the step that the program is at, for the record of a loss."""
        self._step = step

    def exchange(self, key: str, value: Any, timeout_s: float) -> list[Any]:
        """`Exchanges.exchange`."""
        return self.exchanges.exchange(key, value, timeout_s)

    def wish_to_stop(self, reason: str) -> None:
        """Asks all processes to stop after the same step."""
        self._tell({"type": "wish", "reason": reason})

    def stops_after(self, step: int, timeout_s: float) -> bool:
        """Whether all processes stop now, after `step` steps; to be asked by all, after the same steps.

        As soon as one of them wishes to stop, the thread of each says which step its program has passed, and the program
        passes no other until all have said so: all stop at the next one behind the furthest. The thread answers, not the
        program, as that may be waiting on the devices for a step of a process which itself waits here.

        Raises:
            ClusterError: not all have said where they are in time.
            PeerLostError: a process was lost meanwhile.
        """
        with self._changed:
            self._step = step
            if self._stopping is not None:
                self._changed.wait_for(lambda: self._stop_at is not None or self._lost, timeout_s)
                if self._lost is not None:
                    raise self._lost
                if self._stop_at is None:
                    raise ClusterError(f"the processes did not agree within {timeout_s:g} s on a step to stop at.")
                if step > self._stop_at:
                    return True
            self._passed = step
            return False

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Round what waits for other processes; one that has left by then will never come."""
        before, self._blocked_s = self._blocked_s, time.monotonic()
        try:
            yield
        finally:
            self._blocked_s = before

    def wait_for_loss(self, timeout_s: float) -> PeerLostError | None:
        """The loss of a process, if one is noticed in time: it may be why a collective has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, timeout_s)
        return self._lost

    def say_bye(self) -> None:
        """Tells the others that this program has come to its end."""
        self._said_bye = True
        self._tell({"type": "bye"})

    def close(self) -> None:
        """Ends the line. To the others this process is lost then, unless it has said bye."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)
        self._connection.close()

    def _connect(self, deadline_s: float, start_timeout_s: float) -> socket.socket:
        place, last = self.place, "no answer"
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                connection = socket.create_connection((place.host, place.port), min(_CONNECT_S, left_s))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(self._beat_s)
                return connection
            except OSError as exc:
                last = str(exc)
                time.sleep(min(0.2, max(0.0, left_s)))
        raise ClusterError(
            f"process {place.process} did not reach process 0 at {place.host}:{place.port} within {start_timeout_s:g} s "
            f"({last}). Is it running, is the address right, and is the port open between the machines?"
        )

    def _tell(self, message: dict[str, Any]) -> None:
        # A broken line is the listening thread's to notice.
        with self._sending, contextlib.suppress(OSError):
            send(self._connection, message)

    def _listen(self) -> None:
        reader, heard_s, told_s = Reader(), time.monotonic(), 0.0
        while not self._closed:
            now_s = time.monotonic()
            if now_s - told_s >= self._beat_s:
                if told_s and now_s - told_s > self._silence_s + self._beat_s:
                    return self._lose(
                        self.place.process, f"it stood still for {now_s - told_s:.0f} s: the others ended"
                    )
                told_s = now_s
                self._tell({"type": "beat", "step": self._step})
            self.exchanges.tell_forgotten()
            try:
                data = self._connection.recv(1 << 16)
                messages = reader.feed(data)
            except TimeoutError:
                data, messages = b"-", []
            except (OSError, BadMessage):
                data, messages = b"", []
            if self._closed or self._refused is not None or (self._said_bye and not data):
                return None
            if not data:
                return self._lose(0, "its connection broke: it was killed, or has crashed")
            for message in messages:
                heard_s = time.monotonic()
                if message["type"] == "lost":
                    return self._lose(message["process"], message["cause"], message["address"], message["step"])
                with self._changed:
                    self._take(message)
                    passed = self._passed  # stays as it is from here on, if all are to stop
                    self._changed.notify_all()
                if message["type"] == "stopping":
                    self._tell({"type": "ready", "step": passed})
            if time.monotonic() - heard_s > self._silence_s:
                return self._lose(0, f"nothing was heard of it for {self._silence_s:g} s: it stands still")
            blocked_s = self._blocked_s
            if self._left and blocked_s is not None and time.monotonic() - blocked_s > self._silence_s:
                process = min(self._left)
                return self._lose(process, "its program has ended, while this one waits for it", self._left[process])
        return None

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"type": "welcome", "addresses": list(addresses)}:
                self._addresses = addresses
            case {"type": "refused", "reason": str(reason)}:
                self._refused = reason
            case {"type": "values", "key": str(), "values": list()} | {"type": "void", "key": str(), "process": int()}:
                self.exchanges.take(message)
            case {"type": "stopping", "reason": str(reason)}:
                self._stopping = reason
            case {"type": "stop_at", "step": int(step)}:
                self._stop_at = step
            case {"type": "left", "process": int(process), "address": str(address)}:
                if process != self.place.process:
                    self._left[process] = address

    def _lose(self, process: int, cause: str, address: str | None = None, step: int | None = None) -> None:
        if address is None:
            known = self._addresses or []
            address = known[process] if process < len(known) else f"{self.place.host}:{self.place.port}"
        lost = PeerLostError(process, address, self._step if step is None else step, cause)
        with self._changed:
            self._lost = lost
            self._changed.notify_all()
        self.exchanges.end(lost)
        self._on_lost(lost)
