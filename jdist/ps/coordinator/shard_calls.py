"""Delivers the scheduler's messages to shards, retrying until each is answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jdist.errors import ShardLostError
from jdist.ps.coordinator.closure_queue import ClosureQueue
from jdist.ps.protocol.messages import Answer, Commit, Held, Refused, Restore
from jdist.ps.protocol.scheduler_events import Answered, Tell
from jdist.ps.protocol.times import Times
from jdist.ps.transport.interface import CallFailed
from jdist.ps.transport.shard_client import ShardClient, Together, whose

MOST_REFUSALS = 5


def deliver(
    command: Tell,
    *,
    shards: Together,
    queue: ClosureQueue,
    times: Times,
    state_of: Callable[[int], tuple[Sequence[Any], Sequence[bytes]]],
    on_replaced: Callable[[int, str], None],
) -> None:
    """Sends a shard a message until it answers, however long that takes: its watch bounds it. One of an old history is dropped.

    Args:
        command: to which shard, and what.
        shards: all of them.
        queue: gets an `Answered`, or hears that the shard is lost.
        times: how long to wait between two tries.
        state_of: from a shard's number to what it begins with: its arrays, and a program for each of its views.
        on_replaced: takes the history that a shard has instead of this coordinator's, and who began it.
    """
    client, refusals = shards.clients[command.shard], 0
    while not queue.closed.is_set() and command.message.generation == queue.generation:
        try:
            answer = _answer_to(command, client, queue, state_of)
        except ShardLostError as exc:
            refusals += isinstance(exc.__cause__, CallFailed) and exc.__cause__.reason == "refused"
            # It cannot begin with that state. Whatever else fails there leaves it empty, which its watch sees.
            if refusals and (isinstance(command.message, Restore) or refusals > MOST_REFUSALS):
                return queue.shard_lost(command.shard, ShardLostError(f"{exc}; see what it has written"))
            queue.closed.wait(times.ping_s)
            continue
        except Exception as exc:  # whatever it is, nobody may wait for this thread for ever
            queue.shard_lost(command.shard, ShardLostError(f"a parameter server cannot be told: {exc!r}"))
            raise
        if _is_behind(answer, command):
            # It has lost its memory, or is about to begin this history: it does not know, which is not to say
            # that it has nothing.
            queue.closed.wait(times.ping_s)
            continue
        if (
            isinstance(command.message, Restore)
            and isinstance(answer, Refused)
            and queue.generation == answer.generation
        ):
            begun_by = client.status()["begun_by"]
            if begun_by != whose():  # else only the first answer was lost
                return on_replaced(answer.generation, begun_by)
        return queue.handle(Answered(shard=command.shard, message=command.message, answer=answer))


def _answer_to(
    command: Tell,
    client: ShardClient,
    queue: ClosureQueue,
    state_of: Callable[[int], tuple[Sequence[Any], Sequence[bytes]]],
) -> Answer:
    message = command.message
    if isinstance(message, Restore):
        return client.restore(message, *state_of(command.shard))
    scalars = None
    if isinstance(message, Commit) and message.as_one:
        view, scalars = queue.scalars_of(message)
        message = dataclasses.replace(message, view=view)
    (answer,), _, results = client.say([message], scalars)
    return dataclasses.replace(answer, results=tuple(results.items())) if isinstance(answer, Held) else answer


def _is_behind(answer: Answer, command: Tell) -> bool:
    return (
        isinstance(answer, Refused)
        and answer.reason in ("empty", "generation")
        and answer.generation < command.message.generation
    )
