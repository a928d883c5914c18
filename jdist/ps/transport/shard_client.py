"""Clients of shards: repeat a call until it is answered (shards take a closure once), and ask all shards at the same time."""

from __future__ import annotations

import copy
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import numpy as np

from jdist.cluster import failpoints
from jdist.cluster.failpoints import Point
from jdist.errors import ShardLostError
from jdist.ps.program.shard_plan import ShardPlan
from jdist.ps.protocol.messages import TRAVELLING, Message, Parameters, Pull, Restore
from jdist.ps.protocol.wire import CHUNK_BYTES, Spec, from_plain, to_plain
from jdist.ps.transport.interface import CallFailed, CallOptions, Channel, Header
from jdist.ps.transport.threads import Threads, at_once

T = TypeVar("T")
_RANDOM = random.SystemRandom()  # the pauses take no numbers of `random`, which a program may have seeded
SLOWEST_BYTES_S = 10e6
_END_S = 10.0
Answers = tuple[list[Any], list[Any]]  # answers, arrays


def process_name() -> str:
    """Names this process, for others who ask for the origin of a shard's history."""
    return f"process {os.getpid()} of {socket.gethostname()}"


class ShardClient:
    """A client of one shard."""

    # A call takes at most `timeout_s` and is repeated for `give_up_s`; both grow by the time of the
    # shard's bytes, back and forth, at `SLOWEST_BYTES_S`.

    def __init__(self, channel: Channel, plan: ShardPlan, *, timeout_s: float = 20.0, give_up_s: float = 60.0):
        self.channel, self.plan = channel, plan
        self._sent = plan.sent_specs()
        slow_s = 2 * sum(s.size_bytes for s in self._sent) / SLOWEST_BYTES_S
        self._timeout_s, self._give_up_s = timeout_s + slow_s, give_up_s + slow_s
        self.is_bulk = _is_bulk(self._sent)
        self._under_way: dict[object, float] = {}  # calls without an answer, and since when

    def within(self, seconds: float) -> ShardClient:
        """Returns a client over the same connection that repeats a call for so long."""
        client = copy.copy(self)
        client._timeout_s = client._give_up_s = seconds
        return client

    @property
    def waiting_s(self) -> float:
        """Returns the age of the oldest question without an answer."""
        since = list(self._under_way.values())
        return time.monotonic() - min(since) if since else 0.0

    def restore(self, message: Restore, kept: Sequence[Any], programs: Sequence[bytes]) -> Any:
        """Begins a new history in the shard, with a program for each of its views; an empty one for what updates nothing."""
        sizes = [len(program) for program in programs]
        header = {"say": to_plain(message), "plan": to_plain(self.plan), "programs": sizes, "by": process_name()}
        arrays = [*kept, *(np.frombuffer(program, np.uint8) for program in programs)]
        answer, _ = self._repeated(lambda t: self.channel.call("restore", header, arrays, timeout_s=t))
        return from_plain(TRAVELLING, answer["answer"])

    def say(
        self, messages: Sequence[Message], pushes: Sequence[Any] | None = None, result: bytes | None = None
    ) -> Answers:
        """Sends messages in one call until they are answered: `(answers, arrays)`."""
        # At most one message is a push. `result` is the closure's, if this is its home.
        return self.begin(messages, pushes, result)()

    def begin(
        self, messages: Sequence[Message], pushes: Sequence[Any] | None = None, result: bytes | None = None
    ) -> Callable[[], Answers]:
        """Does as `say`, without waiting for the answer; returns what waits for it."""
        header: Header = {"say": [to_plain(m) for m in messages]}
        arrays: list[Any] = []
        if pushes is not None:
            result = result or b""
            header["result"] = len(result)
            arrays = [*pushes, np.frombuffer(result, np.uint8)]
        answers: list[Any] = []

        def expects(answer: Header) -> list[Spec]:
            nonlocal answers
            answers = [from_plain(TRAVELLING, plain) for plain in answer["answers"]]
            specs: list[Spec] = []
            for message, each in zip(messages, answers, strict=True):
                if isinstance(each, Parameters) and isinstance(message, Pull):
                    places = self.plan.sent(message.view, changed=each.changed, first=message.known is None)
                    specs += [self._sent[i] for i in places]
            return specs

        is_data = any(m.worker is not None for m in messages)  # the coordinator's are control: over gRPC
        asked = object()
        self._under_way[asked] = time.monotonic()

        def begun(timeout_s: float) -> Callable[[], Any]:
            options: CallOptions = {"timeout_s": timeout_s, "expects": expects, "bulk": self.is_bulk, "data": is_data}
            return self.channel.begin("say", header, arrays, **options)

        try:
            first: Callable[[], Any] | CallFailed | None = begun(self._timeout_s)
            if pushes is not None:
                failpoints.reached(Point.IN_PUSH)
        except CallFailed as exc:
            first = exc
        except BaseException:
            del self._under_way[asked]
            raise

        def once(timeout_s: float) -> Any:
            nonlocal first
            if isinstance(first, CallFailed):
                first, failed = None, first
                raise failed
            finish, first = first or begun(timeout_s), None
            return finish()

        def finish() -> Answers:
            try:
                _, received = self._repeated(once)
            finally:
                del self._under_way[asked]
            return answers, received

        return finish

    def read(self, generation: int, version: int) -> list[Any] | None:
        """Reads the last snapshot's arrays; None if it has another version or was read before."""
        # It can be read once: if the answer was lost on its way, another snapshot must be taken.
        kept = self.plan.kept
        wanted = {"generation": generation, "version": version}
        header, arrays = self._repeated(
            lambda t: self.channel.call(
                "read", wanted, timeout_s=t, expects=lambda h: kept if h["arrays"] else (), bulk=_is_bulk(kept)
            )
        )
        return arrays if header["arrays"] == len(kept) else None

    def status(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Asks for incarnation, generation, version and role; once if there is a timeout."""
        if timeout_s is None:
            return self._repeated(self.status)
        header, _ = self.channel.call("status", {}, timeout_s=timeout_s)
        return header

    def _repeated(self, call: Callable[[float], T]) -> T:
        end, pause = time.monotonic() + self._give_up_s, 0.05
        while True:
            try:
                return call(min(self._timeout_s, max(0.1, end - time.monotonic())))
            except CallFailed as exc:
                if exc.is_final or time.monotonic() + pause > end:
                    raise ShardLostError(
                        f"the parameter server {self.channel.peer} does not answer: {exc.why}"
                    ) from exc
            time.sleep(pause * _RANDOM.uniform(0.5, 1.5))
            pause = min(2 * pause, 2.0)


def unreached(clients: Sequence[ShardClient], timeout_s: float) -> list[str]:
    """Asks each shard for its status, in parallel to all calls under way; returns the addresses of those that do not answer."""

    def answers(client: ShardClient) -> bool:
        try:
            client.status(timeout_s)
        except CallFailed:
            return False
        return True

    answered = at_once("jdist-reach", answers, clients)
    return [client.channel.peer for client, is_there in zip(clients, answered, strict=True) if not is_there]


def _is_bulk(arrays: Sequence[Spec]) -> bool:
    return sum(s.size_bytes for s in arrays) > CHUNK_BYTES


class ShardClients:
    """Clients of all shards, which are asked at the same time."""

    def __init__(self, clients: Sequence[ShardClient]):
        self.clients = tuple(clients)
        self._threads = Threads(max(1, len(self.clients)), "jdist-shards")

    def each(self, ask: Callable[[int, ShardClient], T]) -> list[T]:
        """Returns the results of `ask(number, client)`, in order; raises the first error, once all have come back."""
        if len(self.clients) == 1:
            return [ask(0, self.clients[0])]
        under_way = [self._threads.submit(ask, i, client) for i, client in enumerate(self.clients)]
        try:
            errors = [f.exception() for f in under_way]
        except CancelledError:
            raise ShardLostError("the connections to the parameter servers were closed") from None
        for error in errors:
            if error is not None:
                raise error
        return [f.result() for f in under_way]

    def say(self, calls: Sequence[tuple[Sequence[Message], Sequence[Any] | None, bytes | None]]) -> list[Answers]:
        """Sends each shard its messages (as `ShardClient.say`), and waits for all answers."""
        # Small calls are sent one after the other: waking a thread takes longer.
        if len(self.clients) > 1 and any(client.is_bulk for client in self.clients):
            return self.each(lambda i, client: client.say(*calls[i]))
        waits = [client.begin(*what) for client, what in zip(self.clients, calls, strict=True)]
        answers, errors = list[Answers](), list[ShardLostError]()
        for wait in waits:  # all: a connection with an unread answer is of no use any more
            try:
                answers.append(wait())
            except ShardLostError as exc:
                errors.append(exc)
        if errors:
            raise errors[0]
        return answers

    def close(self) -> None:
        """Ends its threads and connections."""
        self._threads.close()
        for client in self.clients:
            client.channel.close()
        self._threads.join(_END_S)
