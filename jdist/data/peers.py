"""The processes that feed one dataset together, and how they tell each other what they have."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from jdist.cluster import exit_status
from jdist.cluster.watch.stacks import exchanging
from jdist.data.prefetch import Stop
from jdist.data.process_shard import ProcessShard
from jdist.errors import ClusterTimeoutError, DatasetError, PeerFailedError

T = TypeVar("T")
# A process that is alive may take long for a batch, or pause in its loop; that one is gone is noticed long before.
WAIT_S = 1800.0
RECHECK_S = 0.2  # how often a wait looks whether it is still wanted, as the garbage collector cannot wake it
_TEXT_BYTES = 1 << 18  # of what all processes say of one thing; a message of the cluster holds four times as much


class Exchanges(Protocol):
    """How small values reach all processes: `jdist.cluster.watch.exchanges.Exchanges`, or a test's own."""

    def say(self, key: str, value: Any) -> None: ...

    def hear(self, key: str, timeout_s: float) -> list[Any] | None: ...

    def forget(self, prefix: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The processes that feed one dataset.

    Attributes:
        exchanges: how they tell each other.
        share: which of them this is.
        name: of the dataset, the same on all processes and used once.
    """

    exchanges: Exchanges
    share: ProcessShard
    name: str

    def line(self, what: str, stop: Stop | None = None) -> Line:
        """For one purpose."""
        return Line(self.exchanges, f"{self.name}, {what}, ", stop or Stop())

    def together(self, what: str, make: Callable[[], T], describe: Callable[[T], Any]) -> tuple[T, list[Any]]:
        """Makes something on every process, or fails on all if one of them fails.

        Args:
            what: names it, and why it failed: "the dataset function".
            make: makes it.
            describe: what the others are to know of it.

        Returns:
            It, and what each process says of its own.

        Raises:
            PeerFailedError: another process failed.
            Exception: what `make` or `describe` raised here.
        """
        failure = made = None
        try:
            made = make()
            message = {"is": describe(made)}
        except Exception as error:  # noqa: BLE001 - raised once the others have heard of it
            failure, message = error, told(error)
        said = self.line(what).exchange("", message)
        assert said is not None, "nobody has asked it to stop"
        raise_failure(said, failure, what)
        return made, [one["is"] for one in said]  # pyright: ignore[reportReturnType] # without a failure it was made

    def bounded(self, text: str) -> str:
        """A text, or its hash where the texts of all processes would be too long for a message."""
        if len(text) * self.share.count <= _TEXT_BYTES:
            return text
        return f"sha256={hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Line:
    """What the processes tell each other under keys with one beginning.

    Args:
        exchanges: how.
        prefix: the beginning.
        stop: whether to stop waiting.
    """

    def __init__(self, exchanges: Exchanges, prefix: str, stop: Stop):
        self._exchanges, self._prefix, self._stop = exchanges, prefix, stop
        self._said: str | None = None
        self._to_leave = [prefix]

    def exchange(self, what: str, value: Any) -> list[Any] | None:
        """What each process says; None: it was stopped, and asking again with the same `what` goes on waiting.

        Raises:
            ClusterError: a process did not come in time, has left, or is lost.
        """
        key = self._prefix + what
        if self._said != key:
            self._said = key
            self._exchanges.say(key, value)
        with exchanging():
            return self._heard(key)

    def _heard(self, key: str) -> list[Any] | None:
        deadline_s = time.monotonic() + WAIT_S
        while not self._stop.asked:
            said = self._exchanges.hear(key, RECHECK_S)
            if said is not None:
                return said
            if time.monotonic() > deadline_s:
                raise ClusterTimeoutError(
                    f"the other processes did not come to {key!r} within {WAIT_S:g} s. All processes must make the same "
                    "datasets in the same order, and iterate over them alike; or the source of one of them stands still."
                )
        return None

    def leave(self) -> None:
        """Takes no part any more; the garbage collector may call it, and more than once, in any threads at the same time."""
        with contextlib.suppress(IndexError):
            # Popping is one operation, so that one alone forgets: process 0 would keep a second word of it for ever.
            self._exchanges.forget(self._to_leave.pop())


def told(error: Exception) -> dict[str, Any]:
    """What the other processes are told of an error."""
    return {"error": f"{type(error).__name__}: {error}"[:2000], "code": exit_status.of(error)}


def raise_failure(said: list[Any], own: Exception | None, what: str) -> None:
    """Raises this process's own failure, else tells of another one's.

    Args:
        said: what each process said; of an error what `told` gives.
        own: what happened here.
        what: failed.
    """
    if own is not None:
        raise own
    for process, one in enumerate(said):
        if "error" in one:
            raise PeerFailedError(f"{what} failed on process {process}: {one['error']}", exit_code=one["code"])


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
