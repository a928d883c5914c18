"""One function on a worker: pulls what it reads, computes closures, and brings their gradients to the shards."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist.cluster import failpoints
from jdist.cluster.failpoints import Point
from jdist.core.precision import FACTOR, SMALLEST
from jdist.errors import ShardLostError, WireError
from jdist.ps.program.function_plan import FunctionPlan
from jdist.ps.program.partition import Rows
from jdist.ps.program.shard_plan import ShardPlan, StepView
from jdist.ps.protocol.messages import Commit, Done, Parameters, Pull, Push, Refused, Stage
from jdist.ps.protocol.wire import aligned
from jdist.ps.transport.interface import Header
from jdist.ps.transport.shard_client import ShardClients

ONE_VERSION_S = 60.0


class Abandoned(Exception):
    """The closure is not this worker's any more: it was fenced, or the shards began a new history."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sender:
    """In whose name a worker speaks: what every message of a closure says."""

    worker: int
    epoch: int
    generation: int
    settled: int

    @property
    def said(self) -> Header:
        """The fields of a message."""
        return {name: getattr(self, name) for name in ("worker", "epoch", "generation", "settled")}


class Shards:
    """The shards as all functions of a worker see them.

    Args:
        clients: how to reach them.
    """

    def __init__(self, clients: ShardClients):
        self.clients = clients
        self._history: tuple[int, int] | None = None
        self.newest: list[int] = []  # version that any function has seen of each

    def of(self, who: Sender) -> tuple[int, int]:
        """The history that a closure belongs to: its epoch and generation. In a new one versions begin anew."""
        history = who.epoch, who.generation
        if self._history != history:
            self._history, self.newest = history, [0] * len(self.clients.clients)
        return history


@dataclasses.dataclass(frozen=True)
class Computed:
    """What became of a closure.

    Attributes:
        outputs: what it returns; nothing if it failed.
        is_finite: whether its gradients are, where that matters; if they must be, it has failed.
        base: the version that it was computed from.
    """

    outputs: list[np.ndarray]
    is_finite: bool = True
    base: int = 0


class Installed:
    """A function, compiled, with what was pulled for it.

    Args:
        function: what it is.
        run: the compiled function.
        shards: where its state is.

    Raises:
        WireError: the shards have no such step, or one that reads or pushes something else.
    """

    def __init__(self, function: FunctionPlan, run: Callable[[Sequence[Any]], list[jax.Array]], shards: Shards):
        self.function, self.shards, self._run = function, shards.clients, run
        self._all = shards
        self._scale: WorkerScale | None = None
        self._history: tuple[int, int] | None = None  # of what was pulled
        self._exchanges = [] if function.view is None else _exchanges(function, shards.clients)
        self._versions: list[int | None] = [None] * len(self._exchanges)
        self._inputs = [aligned(s.size_bytes).view(s.numpy).reshape(s.shape) for s in function.inputs]

    def compute(self, who: Sender, closure: int, arguments: Sequence[Any]) -> Computed:
        """One closure, with as many attempts as it takes.

        Args:
            who: in whose name.
            closure: its number.
            arguments: its arrays.

        Returns:
            What became of it.

        Raises:
            Abandoned: it is not this worker's any more.
            ShardLostError: a server does not answer.
        """
        function = self.function
        if function.view is None:
            return Computed(self._called([np.int32(who.worker), *arguments] if function.takes_index else arguments))
        history = self._all.of(who)
        if self._history != history:
            self._history, self._versions = history, [None] * len(self._versions)
        if not function.updates:
            self._pull(who)
            return Computed(self._called(arguments))
        home = closure % len(self._exchanges)
        for attempt in itertools.count():
            if function.stages_only:
                self._pull_one_version(who)
            elif any(
                have is None or have < there for have, there in zip(self._versions, self._all.newest, strict=True)
            ):
                self._pull(who)
            results = self._called(arguments)
            n, m = len(function.pushed), function.num_scalars
            pushed, scalars, outputs = results[:n], results[n : n + m], results[n + m + 1 :]
            # In synchronous mode it is the mean that counts, which the coordinator looks at.
            finite = function.stages_only or function.non_finite == "apply" or bool(results[n + m])
            if not finite and function.non_finite == "raise":
                return Computed([], is_finite=False)
            result = b"".join(x.tobytes() for x in outputs)
            said = {**who.said, "closure": closure, "attempt": attempt, "finite": finite, "view": function.view}
            base = self._versions[0] or 0
            if self._pushed(who, said, pushed, scalars, home, result):
                return Computed(outputs, is_finite=finite, base=base)
        raise AssertionError  # the loop has no end

    def _called(self, arguments: Sequence[Any]) -> list[np.ndarray]:
        def run() -> list[np.ndarray]:
            return [np.asarray(x) for x in self._run([*self._inputs, *arguments])]

        function = self.function
        if function.loss_scale is None:
            return run()
        place, growth_interval = function.loss_scale
        arguments = list(arguments)
        self._scale = self._scale or WorkerScale(float(arguments[place]), growth_interval)
        while True:
            arguments[place] = np.float32(self._scale.scale)
            results = run()
            if self._scale.takes(is_finite=bool(results[len(function.pushed) + function.num_scalars])):
                return results

    def _pushed(
        self, who: Sender, said: Header, pushed: list[Any], scalars: list[Any], home: int, result: bytes
    ) -> bool:
        """Brings a closure's gradients to all shards, and pulls; whether they were not too stale."""
        stages_only = self.function.stages_only
        kind = Push if len(self._exchanges) == 1 and not stages_only else Stage
        bases = list(self._versions)

        def first(i: int, exchange: _Exchange) -> Any:
            shares = [rows.cut(pushed[rows.of]) for rows in exchange.pushes] + scalars
            push = kind(**said, base=bases[i] or 0)
            pull = [self._pull_of(who, bases[i])] if kind is Push else []
            return [push, *pull], shares, result if i == home else None

        failpoints.reached(Point.BEFORE_PUSH)
        told = self.shards.say([first(i, exchange) for i, exchange in enumerate(self._exchanges)])
        found = [(answers, arrays) for answers, arrays, _ in told]
        refused = [answers[0] for answers, _ in found if isinstance(answers[0], Refused)]
        if any(answer.reason != "stale" for answer in refused):
            raise Abandoned
        if kind is Push:
            self._take(0, found[0][0][1], found[0][1])
            return not refused
        if stages_only:  # each attempt begins with a pull
            return not refused
        if refused:
            self._pull(who)
            return False
        failpoints.reached(Point.AFTER_PUSH)
        commit = Commit(**who.said, closures=(said["closure"],))
        told = self.shards.say([([commit, self._pull_of(who, base)], None, None) for base in bases])
        for i, (answers, arrays, _) in enumerate(told):
            if not isinstance(answers[0], Done):
                raise Abandoned
            self._take(i, answers[1], arrays)
        failpoints.reached(Point.AFTER_COMMIT)
        return True

    def _pull_of(self, who: Sender, known: int | None) -> Pull:
        assert self.function.view is not None  # a function without one pulls nothing
        return Pull(**who.said, known=known, view=self.function.view)

    def _pull_one_version(self, who: Sender) -> None:
        """In synchronous mode: until all shards have the same version, which they have but for the moment of a commit."""
        end = time.monotonic() + ONE_VERSION_S
        while True:
            self._pull(who)
            if len(set(self._versions)) == 1:
                return
            if time.monotonic() > end:
                raise ShardLostError(
                    f"the shards have had different versions for {ONE_VERSION_S:g} s: {self._versions}. "
                    "A server is stuck or was replaced; start the job again from its checkpoint."
                )
            time.sleep(0.002)

    def _pull(self, who: Sender) -> None:
        asked = list(self._versions)
        found = self.shards.say([([self._pull_of(who, known)], None, None) for known in asked])
        for i, (answers, arrays, _) in enumerate(found):
            self._take(i, answers[0], arrays)

    def _take(self, i: int, answer: Any, arrays: list[np.ndarray]) -> None:
        """Takes over what a shard sent of the parameters."""
        if not isinstance(answer, Parameters):
            raise Abandoned
        pulled, pulled_once, _ = self._exchanges[i]
        first = self._versions[i] is None
        sent = [*(pulled if answer.changed else ()), *(pulled_once if first else ())]
        for rows, array in zip(sent, arrays, strict=True):
            if rows.stop is None:
                self._inputs[rows.of] = array
            else:
                rows.put(self._inputs[rows.of], array)
        self._versions[i] = answer.version
        self._all.newest[i] = max(self._all.newest[i], answer.version)


class _Exchange(NamedTuple):
    """What a function exchanges with one shard: rows of its inputs, and of what it pushes, by their place among them."""

    pulled: list[Rows]
    pulled_once: list[Rows]
    pushes: list[Rows]


def _exchanges(function: FunctionPlan, shards: ShardClients) -> list[_Exchange]:
    assert function.view is not None  # a function without one has no part in the state
    inputs, pushed = ({number: n for n, number in enumerate(of)} for of in (function.read, function.pushed))

    def exchange(plan: ShardPlan, view: StepView) -> _Exchange:
        pulled, pulled_once = ([plan.rows[k] for k in places] for places in (view.pulled, view.pulled_once))
        return _Exchange(_in_place(pulled, inputs), _in_place(pulled_once, inputs), _in_place(view.rows, pushed))

    try:
        plans = [client.plan for client in shards.clients]
        return [exchange(plan, plan.views[function.view]) for plan in plans]
    except LookupError as exc:
        raise WireError("a function of another state than the shards'") from exc


def _in_place(rows: Sequence[Rows], places: dict[int, int]) -> list[Rows]:
    return [dataclasses.replace(r, of=places[r.of]) for r in rows]


class WorkerScale:
    """Moves as `jdist.core.precision.LossScaling` says.

    Args:
        scale: the first one.
        growth_interval: number of closures in a row with finite gradients after which it doubles.
    """

    def __init__(self, scale: float, growth_interval: int):
        self.scale = scale
        self._growth_interval, self._good = growth_interval, 0

    def takes(self, *, is_finite: bool) -> bool:
        """Whether gradients computed with this scale stand; else they are to be computed again, with the scale as it is now.

        Args:
            is_finite: whether they are. Those that are not stand at the smallest scale: no other would mend them.
        """
        if not is_finite:
            self._good = 0
            stands = self.scale <= SMALLEST
            self.scale = max(self.scale / FACTOR, SMALLEST)
            return stands
        self._good += 1
        if self._good == self._growth_interval:
            self.scale, self._good = min(self.scale * FACTOR, 2.0**127), 0
        return True
