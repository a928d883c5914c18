"""What one shard's machine knows; see `shard`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jdist.ps.messages import Push, Ref

NonFinite = Literal["raise", "skip", "apply"]
OnStale = Literal["refuse", "down_weight"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What a shard does with gradients that are late, or not finite.

    Attributes:
        max_staleness: updates that may lie between a gradient's version and its admission; None: any number.
        on_stale: what happens beyond: "refuse", or "down_weight" by 1 / (1 + staleness).
        non_finite: "raise" refuses, "skip" changes nothing and counts as done, "apply" applies.
    """

    max_staleness: int | None = None
    on_stale: OnStale = "refuse"
    non_finite: NonFinite = "raise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What has happened in a shard since it was restored.

    Attributes:
        updates: updates applied.
        skipped: closures whose gradients were not finite, and were left out.
        refused: gradients that were too stale.
        down_weighted: gradients that were too stale, and admitted with less weight.
        staleness: sum of the staleness of all that were admitted; divided by their number it is the mean.
        admitted: their number.
    """

    updates: int = 0
    skipped: int = 0
    refused: int = 0
    down_weighted: int = 0
    staleness: int = 0
    admitted: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged:
    """A closure's part in this shard, admitted and not yet applied.

    Attributes:
        worker: who computed it; None: the coordinator.
        epoch: under which epoch.
        attempt: in which of its attempts.
        base: the version that it was computed from.
        gradients: its arrays; None where a gradient that is not finite is left out.
        weight: 1, or less for a stale one.
        result: what it returned, on its home shard.
    """

    worker: int | None
    epoch: int
    attempt: int
    base: int
    gradients: Ref | None
    weight: float
    result: Ref | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Applied:
    """A closure that took effect, and is not settled.

    Attributes:
        worker: who computed it; None after a restore, when nobody will be asked for its result.
        result: what it returned, on its home shard.
    """

    worker: int | None
    result: Ref | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """The state of one shard; immutable.

    Attributes:
        rules: about late and non-finite gradients.
        generation: the history it belongs to; 0 while it is empty and takes nothing but a restore.
        version: number of updates.
        fences: for each worker the lowest epoch that is still heard.
        staged: closures admitted and not applied.
        applied: closures applied and not settled.
        settled: closures below this number are done.
        frozen: whether pushes and stages wait.
        thawed: the last snapshot for which they did, and do not any more.
        waiting: those that do, in their order.
        counts: what has happened.
    """

    rules: Rules = Rules()
    generation: int = 0
    version: int = 0
    fences: Mapping[int, int] = dataclasses.field(default_factory=dict)
    staged: Mapping[int, Staged] = dataclasses.field(default_factory=dict)
    applied: Mapping[int, Applied] = dataclasses.field(default_factory=dict)
    settled: int = 0
    frozen: bool = False
    thawed: int = 0
    waiting: tuple[Push, ...] = ()
    counts: Counts = Counts()
