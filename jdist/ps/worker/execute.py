"""Computes the closures of one function on a worker: pulls what it reads, and pushes gradients to the shards."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist.cluster import failpoints
from jdist.cluster.failpoints import Point
from jdist.core.precision import FACTOR, SMALLEST
from jdist.errors import ShardLostError, WireError
from jdist.ps.program.function_plan import FunctionPlan
from jdist.ps.program.shard_plan import ShardPlan
from jdist.ps.protocol.messages import Commit, Done, Parameters, Pull, Push, Refused
from jdist.ps.protocol.wire import aligned
from jdist.ps.transport.interface import Header
from jdist.ps.transport.shard_client import ShardClient, ShardClients

ONE_VERSION_S = 60.0


class Abandoned(Exception):
    """The closure is not this worker's any more: it was fenced, or the shards began a new history."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sender:
    """The name that a worker speaks in: the fields of every message of a closure."""

    worker: int
    epoch: int
    generation: int
    settled: int


class Shards(ShardClients):
    """The shards, as all functions of a worker see them."""

    def __init__(self, clients: Sequence[ShardClient]):
        super().__init__(clients)
        self._epoch_and_generation: tuple[int, int] | None = None
        self.newest: list[int] = []  # version that any function has seen of each

    def enter(self, who: Sender) -> tuple[int, int]:
        """Returns a closure's epoch and generation; a change of either restarts the count of versions."""
        now = who.epoch, who.generation
        if self._epoch_and_generation != now:
            self._epoch_and_generation, self.newest = now, [0] * len(self.clients)
        return now


@dataclasses.dataclass(frozen=True)
class Computed:
    """The result of a closure."""

    outputs: list[np.ndarray]  # empty if it failed
    is_finite: bool = True  # whether its gradients are; if they must be and are not, it has failed
    base: int = 0  # the version that it was computed from


class Installed:
    """A compiled function and its pulled state; refuses shards with other steps than its plan."""

    def __init__(self, function: FunctionPlan, run: Callable[[Sequence[Any]], list[jax.Array]], shards: Shards):
        if len(function.read) != len(function.inputs):
            raise WireError(f"a function of {len(function.inputs)} inputs that reads {len(function.read)} leaves")
        self.function, self._shards, self._run = function, shards, run
        self._scale: tuple[float, int] | None = None  # and how many gradients in a row were finite
        self._epoch_and_generation: tuple[int, int] | None = None  # of what was pulled
        self._plans = [] if function.view is None else [client.plan for client in shards.clients]
        _check_plans(function, self._plans)
        self._versions: list[int | None] = [None] * len(self._plans)
        self._inputs = {
            i: aligned(s.size_bytes).view(s.numpy).reshape(s.shape)
            for i, s in zip(function.read, function.inputs, strict=True)
        }

    def compute(self, who: Sender, closure: int, arguments: Sequence[Any]) -> Computed:
        """Computes a closure in the name of `who`, in as many attempts as it takes."""
        function = self.function
        if function.view is None:
            return Computed(self._called([np.int32(who.worker), *arguments] if function.takes_index else arguments))
        now = self._shards.enter(who)
        if self._epoch_and_generation != now:
            self._epoch_and_generation, self._versions = now, [None] * len(self._versions)
        if not function.updates:
            self._pull(who)
            return Computed(self._called(arguments))
        home = closure % len(self._plans)
        for attempt in itertools.count():
            if function.stages_only:
                self._pull_one_version(who)
            elif any(
                have is None or have < there for have, there in zip(self._versions, self._shards.newest, strict=True)
            ):
                self._pull(who)
            results = self._called(arguments)
            n, m = len(function.pushed), function.num_scalars
            pushed = dict(zip(function.pushed, results[:n], strict=True))
            scalars, outputs = results[n : n + m], results[n + m + 1 :]
            # In synchronous mode it is the mean that counts, which the coordinator looks at.
            finite = function.stages_only or function.non_finite == "apply" or bool(results[n + m])
            if not finite and function.non_finite == "raise":
                return Computed([], is_finite=False)
            result = b"".join(x.tobytes() for x in outputs)
            fields = {**vars(who), "closure": closure, "attempt": attempt, "finite": finite, "view": function.view}
            base = self._versions[0] or 0
            if self._push(who, fields, pushed, scalars, home, result):
                return Computed(outputs, is_finite=finite, base=base)
        raise AssertionError  # the loop has no end

    def _called(self, arguments: Sequence[Any]) -> list[np.ndarray]:
        def run() -> list[np.ndarray]:
            return [np.asarray(x) for x in self._run([*self._inputs.values(), *arguments])]

        function = self.function
        if function.loss_scale is None:
            return run()
        place, growth_interval = function.loss_scale
        arguments = list(arguments)
        scale, good = self._scale or (float(arguments[place]), 0)
        while True:
            arguments[place] = np.float32(scale)
            results = run()
            is_finite = bool(results[len(function.pushed) + function.num_scalars])
            # At the smallest scale non-finite gradients stand: no other scale would mend them.
            stands = is_finite or scale <= SMALLEST
            scale, good = self._scale = moved_scale(scale, good, is_finite=is_finite, growth_interval=growth_interval)
            if stands:
                return results

    def _push(
        self, who: Sender, fields: Header, pushed: dict[int, Any], scalars: list[Any], home: int, result: bytes
    ) -> bool:
        """Pushes a closure's gradients to all shards, and pulls; returns whether they were fresh enough."""
        view, stages_only = self._view, self.function.stages_only
        stage = len(self._plans) > 1 or stages_only
        bases = list(self._versions)

        def first(i: int, plan: ShardPlan) -> Any:
            shares = [rows.cut(pushed[rows.of]) for rows in plan.views[view].rows] + scalars
            push = Push(**fields, stage=stage, base=bases[i] or 0)
            pull = [] if stage else [self._pull_of(who, bases[i])]
            return [push, *pull], shares, result if i == home else None

        failpoints.reached(Point.BEFORE_PUSH)
        replies = self._shards.say([first(i, plan) for i, plan in enumerate(self._plans)])
        refused = [answers[0] for answers, _ in replies if isinstance(answers[0], Refused)]
        if any(answer.reason != "stale" for answer in refused):
            raise Abandoned
        if not stage:
            ((answers, arrays),) = replies
            self._take(0, answers[1], arrays)
            return not refused
        if stages_only:  # each attempt begins with a pull
            return not refused
        if refused:
            self._pull(who)
            return False
        failpoints.reached(Point.AFTER_PUSH)
        commit = Commit(**vars(who), closures=(fields["closure"],))
        replies = self._shards.say([([commit, self._pull_of(who, base)], None, None) for base in bases])
        for i, (answers, arrays) in enumerate(replies):
            if not isinstance(answers[0], Done):
                raise Abandoned
            self._take(i, answers[1], arrays)
        failpoints.reached(Point.AFTER_COMMIT)
        return True

    @property
    def _view(self) -> int:
        assert self.function.view is not None  # a function without one has no part in the state
        return self.function.view

    def _pull_of(self, who: Sender, known: int | None) -> Pull:
        return Pull(**vars(who), known=known, view=self._view)

    def _pull_one_version(self, who: Sender) -> None:
        """Pulls until all shards have the same version, as they have but for the moment of a commit."""
        end = time.monotonic() + ONE_VERSION_S
        while True:
            self._pull(who)
            if len(set(self._versions)) == 1:
                return
            if time.monotonic() > end:
                raise ShardLostError(
                    f"the shards' versions have differed for {ONE_VERSION_S:g} s: {self._versions}. "
                    "Start the job again from its checkpoint."
                )
            time.sleep(0.002)

    def _pull(self, who: Sender) -> None:
        replies = self._shards.say([([self._pull_of(who, known)], None, None) for known in self._versions])
        for i, (answers, arrays) in enumerate(replies):
            self._take(i, answers[0], arrays)

    def _take(self, i: int, answer: Any, arrays: list[np.ndarray]) -> None:
        """Takes in the parameters that a shard sent."""
        if not isinstance(answer, Parameters):
            raise Abandoned
        plan = self._plans[i]
        sent = plan.sent(self._view, changed=answer.changed, first=self._versions[i] is None)
        for rows, array in zip([plan.rows[k] for k in sent], arrays, strict=True):
            if rows.stop is None:
                self._inputs[rows.of] = array
            else:
                rows.put(self._inputs[rows.of], array)
        self._versions[i] = answer.version
        self._shards.newest[i] = max(self._shards.newest[i], answer.version)


def _check_plans(function: FunctionPlan, plans: Sequence[ShardPlan]) -> None:
    """Checks that shards send nothing but what a function reads, and take nothing but what it pushes."""
    view = function.view or 0  # a function without one has no plans
    try:
        pulled = {plan.rows[k].of for plan in plans for k in plan.sent(view, changed=True, first=True)}
        pushed = {rows.of for plan in plans for rows in plan.views[view].rows}
    except IndexError as exc:
        raise WireError("a shard's plan is broken: it sends rows that it does not keep") from exc
    if not pulled <= {*function.read} or not pushed <= {*function.pushed}:
        raise WireError("a function of another state than the shards'")


def moved_scale(scale: float, good: int, *, is_finite: bool, growth_interval: int) -> tuple[float, int]:
    """Moves a worker's loss scale, and how many gradients in a row were finite, as `jdist.core.precision.LossScaling` says."""
    if not is_finite:
        return max(scale / FACTOR, SMALLEST), 0
    return (min(scale * FACTOR, 2.0**127), 0) if good + 1 == growth_interval else (scale, good + 1)
