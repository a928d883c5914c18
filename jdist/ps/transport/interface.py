"""The interface of every transport: a call with a header and arrays, answered by a header and arrays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Required, TypedDict, Unpack

import numpy as np

from jdist.errors import WireError
from jdist.ps.protocol.wire import Spec

Header = dict[str, Any]
Arrays = Sequence[Any]
Answer = tuple[Header, list[np.ndarray]]
Expects = Callable[[Header], Sequence[Spec]]  # from a header to the arrays that come with it
EXHAUSTED = "exhausted"


class CallFailed(ConnectionError):
    """A call got no answer: the peer is gone, did not answer by the deadline, or refused the caller.

    Attributes:
        peer: the server's address.
        reason: "unavailable"; "deadline" where no answer came in time; "unauthenticated"; "refused" where the peer found the
            call wrong; "exhausted" where it has no file descriptor left, which may pass; "closed" where this side has ended the
            connection, so that no other call will do better; "moved" where the copy of a shard that was asked does not lead,
            so that the same call goes to the leader next.
        why: the same, and what else is known.
    """

    def __init__(self, peer: str, reason: str, detail: str = ""):
        if reason == EXHAUSTED:
            detail = "it has no file descriptor left; raise its limit, `ulimit -n`"
        self.why = f"{reason}{f' ({detail})' if detail else ''}"
        super().__init__(f"{peer}: {self.why}")
        self.peer, self.reason = peer, reason

    @property
    def is_final(self) -> bool:
        """Whether the same call would fail again."""
        return self.reason in ("refused", "unauthenticated", "closed")


class OutOfFilesError(OSError):
    """This process has no file descriptor left. XLA and the C++ library open files, too, and say so in their own words."""


# An open and a close for each push, which both let go of the interpreter, took 4 % of 600 us.
_CHECKED_FOR_S = 0.02
_checked_until_s = 0.0


def check_files(*, anew: bool = False) -> None:
    """Makes sure that this process could open another file a moment ago.

    Args:
        anew: whether that is to be tried now.

    Raises:
        OutOfFilesError: it could not.
    """
    global _checked_until_s
    now = time.monotonic()
    if now < _checked_until_s and not anew:
        return
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        raise OutOfFilesError(exc.errno, "no file descriptor left") from exc
    _checked_until_s = now + _CHECKED_FOR_S


def no_arrays(header: Header) -> Sequence[Spec]:
    """Expects no arrays, whatever the header."""
    return ()


class FailedPrecondition(WireError):
    """A call that would be right, had this process not been started anew: its caller has not heard of that, and soon will."""


@dataclass(frozen=True)
class Method:
    """One thing that a server does.

    Attributes:
        run: `(header, arrays) -> (header, arrays)`; may block, several run at the same time.
        expects: the arrays that come with a call of this header; checked before memory is allocated for them.
        limited: whether only so many calls that bring many bytes are under way at once, over data connections.
    """

    run: Callable[[Header, list[np.ndarray]], tuple[Header, Arrays]]
    expects: Expects = no_arrays
    limited: bool = False


Methods = Mapping[str, Method]


class CallOptions(TypedDict, total=False):
    """Options of a call.

    Attributes:
        timeout_s: seconds after which the call has failed; the server may still do what it was asked.
        expects: the arrays that come with an answer of this header; none, unless said.
        bulk: whether more than 1 MiB may come back.
    """

    timeout_s: Required[float]
    expects: Expects
    bulk: bool


class Channel(Protocol):
    """A connection to one server."""

    @property
    def peer(self) -> str:
        """The server's address, for messages."""
        ...

    def call(self, method: str, header: Header, arrays: Arrays = (), **options: Unpack[CallOptions]) -> Answer:
        """Calls a method.

        Args:
            method: its name.
            header: plain values.
            arrays: what goes with it.
            **options: see `CallOptions`.

        Returns:
            The answer's header and arrays.

        Raises:
            CallFailed: there was no answer.
        """
        ...

    def begin(
        self, method: str, header: Header, arrays: Arrays = (), **options: Unpack[CallOptions]
    ) -> Callable[[], Answer]:
        """As `call`, over a data connection where there is one, and without waiting for the answer.

        Returns:
            What waits for it; to be called once.
        """
        ...

    def close(self) -> None:
        """Ends the connection; calls under way fail."""
        ...
