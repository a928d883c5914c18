"""The interface of every transport, and helpers that ask one peer or many: a call and its answer are a header and arrays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict, Unpack

import numpy as np

from jdist.errors import WireError
from jdist.ps.protocol.wire import Spec
from jdist.ps.transport.threads import at_once

Header = dict[str, Any]
Arrays = Sequence[Any]
Answer = tuple[Header, list[np.ndarray]]
Expects = Callable[[Header], Sequence[Spec]]  # from a header to the arrays that come with it
EXHAUSTED = "exhausted"
FINAL = "refused", "unauthenticated", "closed"  # reasons for which the same call would fail again


class CallFailed(ConnectionError):
    """A call got no answer: the peer is gone, missed the deadline, or refused the caller."""

    # Reasons: "unavailable"; "deadline"; "unauthenticated"; "refused" if the peer found the call
    # wrong; "exhausted" if it has no file descriptor left, which may pass; "closed" if this side
    # has ended the connection, so that no other call can succeed; "moved" if the shard's copy does
    # not lead, so that the same call goes to the leader next. `why` adds details.

    def __init__(self, peer: str, reason: str, detail: str = ""):
        if reason == EXHAUSTED:
            detail = "it has no file descriptor left; raise its limit, `ulimit -n`"
        self.why = f"{reason}{f' ({detail})' if detail else ''}"
        super().__init__(f"{peer}: {self.why}")
        self.peer, self.reason = peer, reason

    @property
    def is_final(self) -> bool:
        """Returns whether the same call would fail again."""
        return self.reason in FINAL


class OutOfFilesError(OSError):
    """This process has no file descriptor left. XLA and the C++ library open files, too, and say so in their own words."""


# An open and a close for each push, which both let go of the interpreter, took 4 % of 600 us.
_CHECKED_FOR_S = 0.02
_checked_until_s = 0.0


def check_files(*, fresh: bool = False) -> None:
    """Checks that this process could open another file a moment ago; with `fresh` it tries now."""
    global _checked_until_s
    now = time.monotonic()
    if now < _checked_until_s and not fresh:
        return
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        raise OutOfFilesError(exc.errno, "no file descriptor left") from exc
    _checked_until_s = now + _CHECKED_FOR_S


def no_arrays(header: Header) -> Sequence[Spec]:
    """Expects no arrays, whatever the header."""
    return ()


def integers(header: Header, *names: str) -> list[int]:
    """Returns numbers of a header; refuses a value below 0, or not an int."""
    numbers = [header.get(name) for name in names]
    if any(type(x) is not int or x < 0 for x in numbers):
        raise WireError(f"{', '.join(f'`{name}`' for name in names)} must be whole numbers from 0 on")
    return numbers  # type: ignore[return-value]  # as was just checked


class FailedPrecondition(WireError):
    """A call that would be right, had this process not been restarted: its caller has not heard of that, and soon will."""


@dataclass(frozen=True)
class Method:
    """A method that a server offers."""

    # `(header, arrays) -> (header, arrays)`; may block, several run at the same time
    run: Callable[[Header, list[np.ndarray]], tuple[Header, Arrays]]
    # specs of a call's arrays; checked before memory is allocated for them
    expects: Expects = no_arrays
    limited: bool = False  # limits concurrent calls that bring many bytes over data connections


Methods = Mapping[str, Method]


class CallOptions(TypedDict, total=False):
    """Options of a call."""

    timeout_s: Required[float]  # the call fails after that; the server may still carry it out
    expects: Expects  # specs of the answer's arrays; none by default
    bulk: bool  # whether more than 1 MiB may come back
    data: bool  # whether a small call, too, goes over a data connection, which is faster


class Channel:
    """A connection to one server."""

    peer: str  # the server's address, for messages

    def begin(
        self, method: str, header: Header, arrays: Arrays = (), **options: Unpack[CallOptions]
    ) -> Callable[[], Answer]:
        """Begins a call; returns a wait for its answer, which must be called once."""
        raise NotImplementedError

    def call(self, method: str, header: Header, arrays: Arrays = (), **options: Unpack[CallOptions]) -> Answer:
        """Calls a method; returns the answer's header and arrays, or raises CallFailed."""
        return self.begin(method, header, arrays, **options)()

    def close(self) -> None:
        """Ends the connection; calls under way fail."""
        raise NotImplementedError


def ask_until_one_answers(
    connects: Sequence[Callable[[], Channel]], timeout_s: float, *, give_up_s: float, final: Collection[str] = FINAL
) -> list[Header | CallFailed]:
    """Asks servers for their status, again until one answers or fails for a `final` reason; at least once."""
    end, pause_s = time.monotonic() + give_up_s, 0.05
    while True:
        answers = at_once("jdist-ask", lambda connect: ask_once(connect(), "status", {}, timeout_s), connects)
        failures = [x for x in answers if isinstance(x, CallFailed)]
        refuses = any(exc.reason in final for exc in failures)
        if len(failures) < len(answers) or refuses or time.monotonic() + pause_s > end:
            return answers
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def ask_once(channel: Channel, method: str, header: Header, timeout_s: float) -> Header | CallFailed:
    """Makes the only call of a channel, and closes it; returns the answer or the failure."""
    try:
        return channel.call(method, header, timeout_s=timeout_s)[0]
    except CallFailed as exc:
        return exc
    finally:
        channel.close()
