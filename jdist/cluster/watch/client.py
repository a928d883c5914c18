"""`Watch`: a process's connection to process 0, which sends beats and hears at once when a process is lost.

Its thread goes on while the program is blocked in a collective, which a lost process would block for ever. It alone
uses the connection; the program leaves it messages, also from a signal handler.
"""

from __future__ import annotations

import math
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jdist.cluster import failpoints
from jdist.cluster.address import join
from jdist.cluster.failpoints import Point
from jdist.cluster.watch.exchanges import Exchanges
from jdist.cluster.watch.messages import MOST_BYTES, BadMessage, Connection, Message, WakeupPipe
from jdist.errors import ClusterError, ClusterTimeoutError, PeerLostError
from jdist.support.versions import versions

_FOR_EVER_S = 1e9  # JSON has no infinity
_QUIET_S = 5.0  # a longer wait for the others is reported on standard error
_PART_BITS = 32  # of the number of a place to stop at: which part after a step
_TRY_S, _RETRY_S = 2.0, 0.2
_SET_S = 2.0  # a wall clock that differs by more from the one that only goes on was set
_IF_LATE = (
    " Look at their logs; if they only start late, raise `CommunicationOptions(start_timeout_s=...)`, in a config "
    "`strategy.communication.start_timeout_s`."
)
_BROKEN = "its connection broke: it was killed, or has crashed"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """This process's identity, and the address of process 0."""

    process: int  # its index
    addresses: tuple[str | None, ...]  # "host:port" of all, by index; None: process 0 sees where it comes from
    host: str  # process 0's host
    port: int  # process 0's watch port
    token: str  # the job's secret; "" for none

    def label(self, process: int) -> str:
        """Names a process for people: its index, and its address if that is known."""
        address = self.addresses[process] if 0 <= process < len(self.addresses) else None
        return f"process {process}" + (f" ({address})" if address else "")


class Watch:
    """The connection, and the thread that serves it; made once all processes have come."""

    def __init__(
        self,
        identity: Identity,
        *,
        start_timeout_s: float,  # until all processes must have come
        silence_s: float,  # after which a process is lost
        on_lost: Callable[[PeerLostError], None],  # called once, from the thread, to end the program
        is_waiting: Callable[[], bool] = lambda: False,  # for other processes
        patience_s: Callable[[], float] = lambda: math.inf,  # of a wait at one step
        where: Callable[[], Mapping[str, Any]] = dict,  # the program is; see `whereabouts`
        say: Callable[[str], object] = print,  # must not block
        wall_s: Callable[[], float] = time.time,  # only compared with the monotonic clock
    ):
        self.identity, self._silence_s, self._on_lost, self._is_waiting = identity, silence_s, on_lost, is_waiting
        self._patience_s, self._where, self._say, self._wall_s = patience_s, where, say, wall_s
        self._ahead_s = wall_s() - time.monotonic()
        self._waits_since, self._calls, self._waits_at = None, 0, 0
        self._beat_s = silence_s / 5
        self.exchanges = Exchanges(self._send)
        self.addresses: tuple[str, ...] = ()  # by index; empty until all have come
        self.stopping: str | None = None  # the reason why all processes are to stop
        self.lost: PeerLostError | None = None  # the first loss
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._no_start: ClusterError | None = None
        self._stop_at: int | None = None
        self._passed, self._step = -1, 0
        self._left: set[int] = set()
        self._closed = self._parted = False
        connection = connect(identity, start_timeout_s)
        failpoints.reached(Point.IN_CONNECT)
        everyones = (len(identity.addresses) + 1) * MOST_BYTES
        self._connection = Connection(connection, most_bytes=everyones, most_unsent_bytes=everyones)
        self._wakeup = WakeupPipe()
        hello = {
            "type": "hello",
            "process": identity.process,
            "count": len(identity.addresses),
            "token": identity.token,
            "versions": versions(),
        }
        address = identity.addresses[identity.process]
        self._send(hello if address is None else {**hello, "address": address})
        self._thread = threading.Thread(target=self._run, name="jdist-watch", daemon=True)
        self._thread.start()
        try:
            self._await_start(start_timeout_s)
        except BaseException:
            self.close()
            raise

    def progress(self, step: int) -> None:
        """Notes a call of a step, and the step that the program is at, for the record of a loss."""
        self._step, self._calls = step, self._calls + 1

    def wish_to_stop(self, reason: str) -> None:
        """Asks all processes to stop after the same step; may be called from a signal handler."""
        self._send({"type": "wish", "reason": reason})

    def stops_after(self, step: int, part: int = 0) -> bool:
        """Returns whether all stop now, after `step` steps and `part` of the next work; all must ask."""
        # All must ask at the same places. Once one process wishes to stop, each sends the last step
        # that it has passed, and passes no other until it knows where all stop. No process waits
        # here for another's program, which may be blocked in a step that needs this one.
        self._step, place = step, (step << _PART_BITS) + part
        with self._changed:
            if self.stopping is None:
                self._passed = place
                return False
        self._wait_for(lambda: self._stop_at is not None, 2 * self._silence_s)
        self._raise_if_lost()
        if self._stop_at is None:
            raise ClusterTimeoutError("the processes did not agree on a step to stop at. Start all of them again.")
        return place >= self._stop_at

    def wait_for_loss(self, timeout_s: float) -> PeerLostError | None:
        """Waits for the loss of a process, which may be why a collective failed; None after `timeout_s`."""
        self._wait_for(lambda: False, timeout_s)
        return self.lost

    def say_bye(self) -> None:
        """Announces that this program has come to its end, and waits until all have; raises if one is lost meanwhile."""
        self._send({"type": "bye"})
        # Without a limit: as long as the others are heard of, they will come to their end.
        self._wait_for(lambda: len(self._left) == len(self.identity.addresses), None)
        self._raise_if_lost()

    def part(self) -> None:
        """Ends the connection after the byes of all."""
        self._parted = True
        self._send({"type": "gone"})
        self._thread.join(self._silence_s)  # process 0 hangs up
        self.close()

    def close(self) -> None:
        """Ends the connection at once; to the others this process is lost, unless it has parted."""
        self._closed = True
        self._wakeup.wake()
        self._thread.join(2.0)

    def _await_start(self, start_timeout_s: float) -> None:
        # Process 0 names the missing when its own time is over, which may have begun later.
        left_s = start_timeout_s + 2 * self._silence_s
        self._wait_for(self._is_decided, min(_QUIET_S, left_s))
        if not self._is_decided() and self.lost is None:
            count = len(self.identity.addresses)
            waits = f"process {self.identity.process} waits for all {count} processes to come"
            print(f"jdist: {waits}, {start_timeout_s:g} s from process 0's start", file=sys.stderr, flush=True)
            self._wait_for(self._is_decided, left_s - _QUIET_S)
        if self._no_start is not None:
            raise self._no_start
        if not self.addresses and self.lost is None:
            raise ClusterTimeoutError(
                f"{self.identity.label(0)} did not say within {start_timeout_s:g} s whether all processes have come. "
                "Is its program still running? Look at its log."
            )

    def _is_decided(self) -> bool:
        return bool(self.addresses or self._no_start)

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        """Waits until the condition holds, a process is lost, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self.lost is not None, timeout_s)

    def _raise_if_lost(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _send(self, message: Message) -> None:
        self._outbox.put(message)
        self._wakeup.wake()

    def _run(self) -> None:
        lost = None
        try:
            with selectors.DefaultSelector() as selector:
                lost = self._listen(selector)
        except (OSError, BadMessage) as exc:
            if self._parted or self._closed or self._no_start is not None:
                pass  # the end was expected
            elif isinstance(exc, BadMessage) and not self.addresses:
                where = join(self.identity.host, self.identity.port)
                self._no_start = ClusterError(
                    f"the program at {where} is not jdist's process 0 ({exc}). Is the address right?",
                    at_fault=f"the program at {where}",
                )
            else:
                lost = self._loss(0, _BROKEN)
        except Exception as exc:  # noqa: BLE001  # with nobody listening, the program could wait for ever
            lost = self._loss(self.identity.process, f"its watch failed: {exc!r}")
        finally:
            self._connection.close()
            self._wakeup.close()
        self.lost = lost
        if lost is not None:
            self._on_lost(lost)  # first: a program that is woken would only get in the way of the record
            self.exchanges.end(lost)
        with self._changed:
            self._changed.notify_all()

    def _listen(self, selector: selectors.BaseSelector) -> PeerLostError | None:
        """Serves the connection until it is closed, or a process is lost."""
        selector.register(self._wakeup, selectors.EVENT_READ)
        selector.register(self._connection.connection, selectors.EVENT_READ)
        awake_s = heard_s = active_s = time.monotonic()
        beat_sent_s, answered = 0.0, False
        while not self._closed and self._no_start is None:
            if (now_s := time.monotonic()) - beat_sent_s >= self._beat_s:
                beat_sent_s = now_s
                self._outbox.put(self._beat(now_s))
            self.exchanges.send_forgotten()
            while not self._outbox.empty():
                self._connection.send(self._outbox.get())
            self._connection.flush()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._connection.has_unsent else 0)
            selector.modify(self._connection.connection, wanted)
            ready = selector.select(max(0.0, beat_sent_s + self._beat_s - time.monotonic()))
            now_s, before_s = time.monotonic(), awake_s
            awake_s = now_s
            self._look_at_wall_clock(now_s)
            if now_s - before_s > self._silence_s:  # looked at first: after a standstill all others seem silent
                still_s = now_s - before_s
                return self._loss(
                    self.identity.process, f"it stood still for {still_s:.0f} s, and the others have ended without it"
                )
            self._wakeup.clear()
            if any(
                key.fileobj is self._connection.connection and events & selectors.EVENT_READ for key, events in ready
            ):
                for message in self._connection.receive():
                    heard_s, answered = now_s, True
                    if (lost := self._take(message)) is not None:
                        return lost
            if now_s - heard_s > self._silence_s and not answered:
                where = join(self.identity.host, self.identity.port)
                self._no_start = ClusterTimeoutError(
                    f"{where} accepts connections, but has not answered for {self._silence_s:g} s: another program has "
                    "the port of jdist's process 0, or process 0 stands still. Check which program listens there; for "
                    "another port set JDIST_WATCH_PORT on all processes.",
                    at_fault=f"the program at {where}",
                )
                return None
            if now_s - heard_s > self._silence_s:
                still = (
                    "stands still" if self.identity.process else "stood still"
                )  # process 0 sees its own silence after it
                return self._loss(0, f"nothing was heard of it for {self._silence_s:g} s: it {still}")
            left = self._left - {self.identity.process}
            if not left or not self._is_waiting():
                active_s = now_s
            elif now_s - active_s > self._silence_s:
                active_s = now_s
                self._outbox.put({"type": "misses", "process": min(left)})  # all hear of it then, this one too
        return None

    def _look_at_wall_clock(self, now_s: float) -> None:
        set_by_s = self._wall_s() - now_s - self._ahead_s
        if abs(set_by_s) > _SET_S:
            self._ahead_s += set_by_s
            who = self.identity.label(self.identity.process)
            self._say(
                f"the wall clock of {who} was set by {set_by_s:+.0f} s at step {self._step} (or its machine slept). The job "
                "goes on, as jdist measures by another clock; the times in logs and files jump."
            )

    def _beat(self, now_s: float) -> Message:
        step, calls = self._step, self._calls  # an evaluation makes calls at one step
        if not self._is_waiting():
            self._waits_since = None
        elif self._waits_since is None or calls != self._waits_at:
            self._waits_since, self._waits_at = now_s, calls
        waits_s = 0.0 if self._waits_since is None else max(now_s - self._waits_since, 1e-3)
        patience_s = float(min(self._patience_s(), _FOR_EVER_S))
        return {"type": "beat", "step": step, "waits_s": waits_s, "patience_s": patience_s}

    def _take(self, message: Message) -> PeerLostError | None:
        """Takes in a message; returns the loss if it reports one."""
        with self._changed:
            match message:
                case {"type": "welcome", "addresses": list(addresses)}:
                    self.addresses = tuple(addresses)
                case {"type": "refused", "reason": str(reason)}:
                    refusal = f"{self.identity.label(0)} refused process {self.identity.process}: {reason}."
                    own = f"this process, {self.identity.process}"
                    at_fault = "the process named above" if message.get("ended") is True else own
                    self._no_start = ClusterError(refusal, at_fault=at_fault)
                case {"type": "absent", "processes": list(absent), "refused": list(refused)}:
                    names = ", ".join(map(self.identity.label, absent))
                    came = f" But {'; '.join(map(str, refused))}." if refused else ""
                    lasts = message.get("lasts") is True  # time and a restart do not help
                    text = (
                        f"not all of the {len(self.identity.addresses)} processes came{'' if lasts else ' in time'}; "
                        f"missing: {names}.{came}{'' if lasts else _IF_LATE}"
                    )
                    at_fault = "the process that was refused, named above" if refused else None
                    late = ClusterTimeoutError(text, at_fault=at_fault)
                    self._no_start = ClusterError(text, at_fault=at_fault) if lasts else late
                case {"type": "values", "key": str(), "values": list()} | {
                    "type": "void",
                    "key": str(),
                    "process": int(),
                }:
                    self.exchanges.take(message)
                case {"type": "where"}:
                    self._outbox.put({"type": "at", **self._where()})
                case {"type": "stopping", "reason": str(reason)}:
                    self.stopping = reason
                    self._outbox.put({"type": "passed", "step": self._passed})
                case {"type": "stop_at", "step": int(step)}:
                    self._stop_at = step
                case {
                    "type": "slow",
                    "process": int(process),
                    "step": int(step),
                    "cause": str(cause),
                    "patience_s": float(patience_s),
                }:
                    who = self.identity.label(process)
                    end = f" After {patience_s:.0f} s all end with exit code 75." if patience_s < _FOR_EVER_S else ""
                    self._say(f"{who} does not go on from step {step}: {cause}.{end} {PeerLostError.if_it_takes_long}")
                case {"type": "left", "process": int(process)}:
                    self._left.add(process)
                case {
                    "type": "lost",
                    "process": int(process),
                    "address": str(address),
                    "step": int(step),
                    "cause": str(cause),
                    "places": list(places),
                }:
                    return PeerLostError(process, address, max(step, self._step), cause, tuple(places))
            self._changed.notify_all()
        return None

    def _loss(self, process: int, cause: str) -> PeerLostError:
        known = self.addresses or self.identity.addresses
        address = known[process] or (
            join(self.identity.host, self.identity.port) if process == 0 else "address not known"
        )
        return PeerLostError(process, address, self._step, cause)


def connect(identity: Identity, timeout_s: float) -> socket.socket:
    """Connects to process 0, which may not listen yet."""
    at = join(identity.host, identity.port)
    deadline_s, last = time.monotonic() + timeout_s, "no answer"
    speak_at_s = time.monotonic() + _QUIET_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            return socket.create_connection((identity.host, identity.port), min(_TRY_S, left_s))
        except OSError as exc:
            last = str(exc)
            if time.monotonic() > speak_at_s:
                speak_at_s = deadline_s
                text = f"process {identity.process} waits for process 0 at {at}, up to {timeout_s:g} s ({last})"
                print(f"jdist: {text}", file=sys.stderr, flush=True)
            time.sleep(min(_RETRY_S, left_s))
    raise ClusterTimeoutError(
        f"process {identity.process} did not reach process 0 at {at} within {timeout_s:g} s ({last}). "
        "Is it running, is the address right, and is the port open between the machines?"
    )
