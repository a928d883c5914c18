"""A consistent cut of all shards: the state after some closures, each on every shard or on none."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jdist.ps.protocol.messages import Cut, Freeze, Snapshot, Thaw
from jdist.ps.transport.shard_client import Together


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    """The state of all shards after some closures.

    Attributes:
        settled: closures below this number are in it.
        applied: and these above.
        version: the shards' version.
        kept: each shard's arrays.
    """

    settled: int
    applied: frozenset[int]
    version: int
    kept: Sequence[Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Disputed:
    """Closures that some shards have applied and others not, as long as the shards were held."""

    closures: frozenset[int]


def take_snapshot(
    shards: Together,
    *,
    number: int,
    generation: int,
    settled: int,
    is_wanted: Callable[[], bool],
    timeout_s: float = 2.0,
) -> ClusterSnapshot | Disputed | None:
    """Takes a snapshot while the job goes on.

    All shards are frozen: what is staged on all of them is still committed, nothing else is admitted. Once they say that
    the same closures are applied, their arrays are such a cut. They are referred to, not copied; the shards are thawed
    before these are read.

    Args:
        shards: the shards.
        number: of the snapshot; higher than of all before it.
        generation: their history.
        settled: closures below this number are applied on all of them.
        is_wanted: asked before each try; a rollback meanwhile makes the snapshot void.
        timeout_s: how long they are held while they disagree, as they do in the middle of a commit.

    Returns:
        The snapshot; what they did not agree on in time; None if they began another history, or it was gone before it was read.

    Raises:
        ShardLostError: a shard does not answer.
    """
    said: dict[str, Any] = {"generation": generation}
    end, cuts, disputed = time.monotonic() + timeout_s, [], frozenset[int]()
    try:
        shards.each(lambda i, client: client.say([Freeze(**said, number=number)]))
        while is_wanted() and time.monotonic() < end:
            answers = shards.each(lambda i, client: client.say([Snapshot(**said)])[0][0])
            if not all(isinstance(answer, Cut) for answer in answers):
                return None
            settled = max(
                settled, *(a.settled for a in answers)
            )  # they may have heard of more meanwhile, and forgotten it
            cuts = [(frozenset(c for c in a.applied if c >= settled), a.version) for a in answers]
            if len(set(cuts)) == 1:
                break
            sets, cuts = [applied for applied, _ in cuts], []
            disputed = frozenset.union(*sets) - frozenset.intersection(*sets)
            time.sleep(0.01)
    finally:
        shards.each(lambda i, client: client.say([Thaw(**said, number=number)]))
    if not cuts:
        return Disputed(disputed) if disputed else None
    applied, version = cuts[0]
    read = shards.each(lambda i, client: client.read(generation, version))
    kept = [arrays for arrays in read if arrays is not None]
    if len(kept) < len(read):
        return None
    return ClusterSnapshot(settled=settled, applied=applied, version=version, kept=kept)
