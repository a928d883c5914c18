"""A worker's connection: connects, sends what is assigned, takes in what comes back; and again after a loss."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jdist.errors import ClosureError, NonFiniteClosureError
from jdist.ps.coordinator.closures import WITH_OUTPUTS, Installable
from jdist.ps.coordinator.engine import Engine
from jdist.ps.coordinator.replica_watch import Copies
from jdist.ps.protocol.scheduler_events import Assign, Lost, Registered, Reported
from jdist.ps.protocol.times import Times
from jdist.ps.protocol.wire import to_plain
from jdist.ps.transport.interface import CallFailed, Channel, Header
from jdist.ps.transport.shard_client import ShardClient, unreached

_LOG = logging.getLogger(__name__)
WAITS_S = 3.0  # for a server; then the worker is asked which it reaches


class WorkerLink:
    """One worker, as the coordinator has it.

    Args:
        number: the worker's.
        connect: makes a channel to it.
        engine: what is scheduled.
        briefing: tells it what it has to know.
        times: how long it waits.
    """

    def __init__(self, number: int, connect: Callable[[], Channel], engine: Engine, briefing: Briefing, times: Times):
        self.number = number
        self._connect, self._engine, self._briefing, self._times = connect, engine, briefing, times
        self._registered, self._lost_at = False, collections.deque[float]()
        self._gave_up = False  # whether it was lost only in so far as it gave its closures up
        self._told = False  # of a loss
        self._cut = ""  # why it was cut off from here
        self._assigned: collections.deque[Assign] = collections.deque()
        self._refused = False
        self._channel: Channel | None = None
        # One for each link: what one is assigned, the others need not hear of.
        self._news = threading.Condition(engine.mutex)
        self._thread = threading.Thread(target=self._drive, name=f"jdist-worker-{number}", daemon=True)

    def start(self) -> None:
        """Starts its thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for its end, once the engine is closed."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def assign(self, command: Assign) -> None:
        """Takes closures to be sent; called with the engine's lock held."""
        self._assigned.append(command)
        self._news.notify()

    def end(self) -> None:
        """Ends what is under way, once the engine is closed; called with its lock held."""
        self._news.notify_all()
        if (channel := self._channel) is not None:
            channel.close()

    def _drive(self) -> None:
        while True:
            channel, hopeless = self._connect(), False
            try:
                with self._engine.lock:
                    self._engine.attendance.addresses[self.number] = channel.peer
                    if self._engine.closed.is_set():
                        return
                    self._channel = channel
                self._briefing.attach(channel)
                why, is_cut = self._missing_ways(channel)
                if why:
                    if is_cut and not self._told:
                        self._told = True
                        _LOG.warning("worker %d at %s gets no closures: %s", self.number, channel.peer, why)
                    raise CallFailed(channel.peer, "unavailable", why)
                self._cut = ""
                self._registered, self._gave_up = True, False
                if self._told:
                    _LOG.warning("worker %d is there again", self.number)
                    self._told = False
                self._engine.handle(Registered(worker=self.number))
                self._serve(channel)
            except CallFailed as exc:
                if not self._engine.closed.is_set():
                    level = self._level(exc)
                    self._told = self._told or level == logging.WARNING
                    why = f"{channel.peer}: {self._cut}" if self._cut else exc
                    _LOG.log(level, "worker %d was lost; what it had runs again: %s", self.number, why)
                    hopeless = self._is_hopeless(exc)
            except Exception as exc:  # whatever it is, nobody may wait for this thread for ever
                if self._engine.closed.is_set():
                    return
                self._engine.fail(ClosureError(f"worker {self.number} cannot be driven: {exc}"))
                raise
            finally:
                self._channel = None
                channel.close()
            with self._engine.lock:
                self._assigned.clear()
                self._engine.handle(Lost(worker=self.number, epoch=self._engine.epoch_of(self.number)))
                self._engine.check_workers()
            if hopeless:
                return
            self._engine.closed.wait(self._times.reconnect_s)

    def _missing_ways(self, channel: Channel) -> tuple[str, bool]:
        """What is to be said of servers that the worker does not reach, and whether they answer here; "" if it reaches all."""
        servers, answer_here = self._briefing.unreached(channel)
        if not servers:
            return "", False
        said = f"it does not reach the parameter server {' and '.join(servers)}"
        return said + (", which answers here: the link between them is cut" if answer_here else ""), answer_here

    def _is_cut_off(self, channel: Channel) -> bool:
        why, is_cut = self._missing_ways(channel)
        self._cut = why if is_cut else ""
        return is_cut

    def _level(self, exc: CallFailed) -> int:
        """The user hears of a loss, and once of another token; not of each try to reach a worker."""
        refused_before, self._refused = self._refused, exc.reason == "unauthenticated"
        lost = self._registered and not self._gave_up
        return logging.WARNING if lost or (self._refused and not refused_before) else logging.INFO

    def _is_hopeless(self, exc: CallFailed) -> bool:
        """Whether the worker is not used any more: it was lost, or refused what it was asked, too often. Tells the engine."""
        now = time.monotonic()
        if self._registered or exc.reason == "refused":
            self._lost_at.append(now)
        self._registered = False
        while self._lost_at and self._lost_at[0] < now - self._times.losses_within_s:
            self._lost_at.popleft()
        if len(self._lost_at) < self._times.max_losses:
            return False
        self._engine.quarantine(
            self.number,
            f"worker {self.number} at {exc.peer} was lost {len(self._lost_at)} times; the last time: {exc.reason}",
        )
        return True

    def _serve(self, channel: Channel) -> None:
        lost, names, opened = threading.Event(), dict[int, str](), set[int]()
        pinging = threading.Thread(
            target=self._ping, args=(channel, lost), name=f"jdist-ping-{self.number}", daemon=True
        )
        pinging.start()
        try:
            while True:
                with self._engine.lock:
                    self._news.wait_for(lambda: bool(self._assigned) or self._engine.closed.is_set() or lost.is_set())
                    if self._engine.closed.is_set():
                        return
                    if lost.is_set():
                        raise CallFailed(channel.peer, "unavailable", "it does not answer")
                    assigned = list(self._assigned)
                    self._assigned.clear()
                newest = assigned[-1]  # those of an older history are no closures of this one
                numbers = [c for a in assigned if a.generation == newest.generation for c in a.closures]
                while numbers:
                    numbers = self._execute(channel, names, opened, newest, numbers, lost)
        finally:
            lost.set()
            pinging.join(self._times.lost_after_s)

    def _execute(
        self,
        channel: Channel,
        names: dict[int, str],
        opened: set[int],
        newest: Assign,
        numbers: Sequence[int],
        lost: threading.Event,
    ) -> Sequence[int]:
        """Has closures computed, and reports them.

        Returns:
            Those that have to be sent again, as what they were to read is not there.
        """
        batch = self._engine.batch(newest, numbers)
        if not batch.closures:
            return []
        for function in batch.functions:
            if function not in names:
                names[function] = self._briefing.install(channel, function, self._engine.installable(function))
        for name in batch.batches:
            if name is not None and name[0] not in opened:
                opened.add(name[0])
                if (error := self._briefing.open_dataset(channel, batch.datasets[name[0]])) is not None:
                    self._engine.fail(ClosureError(f"a worker cannot open {batch.datasets[name[0]]['name']}: {error}"))
        said = {"epoch": newest.epoch, "generation": newest.generation}
        closures: dict[str, Any] = {"closures": batch.closures, "functions": [names[f] for f in batch.functions]}
        if any(batch.batches):
            closures["batches"] = [None if name is None else list(name) for name in batch.batches]
        answer, results = channel.call(
            "execute",
            {**said, **closures, "worker": self.number, "settled": batch.settled},
            batch.arguments,
            timeout_s=self._times.closure_s,
            expects=batch.returned,
            bulk=sum(s.size_bytes for outputs in batch.outputs for s in outputs) > 1 << 19,
        )
        if lost.is_set():
            raise CallFailed(channel.peer, "unavailable", "it does not answer")
        arrays, again = iter(results), list[int]()
        told = zip(answer["outcomes"], batch.outputs, batch.updates, batch.batches, strict=True)
        for outcome, outputs, updates, name in told:
            closure, how = outcome["closure"], outcome["outcome"]
            if how == "abandoned":
                continue
            if how == "declined" and name is not None:
                self._engine.ended(closure, name[2], outcome["batches"])
                again.append(closure)
                continue
            leaves = [next(arrays) for _ in outputs] if how in WITH_OUTPUTS else []
            error = _error_of(outcome)
            with self._engine.lock:
                if not self._engine.is_present(self.number, **said):
                    continue  # a rollback has discarded what this was computed from, or the worker counts as lost
                self._engine.arrived(closure, leaves, error)
                if how == "done" and not outcome.get("is_finite", True):
                    self._engine.skipped(closure)
                how = "read" if how == "done" and not updates else how
                base = outcome.get("base", 0)
                self._engine.handle(Reported(worker=self.number, **said, closure=closure, outcome=how, base=base))
                if error is not None:
                    self._engine.fail(error)
        if any(outcome["outcome"] == "abandoned" for outcome in answer["outcomes"]):
            # It was fenced, or a shard is lost to it: as with a lost worker, the shards say what became of the closures.
            self._gave_up = True
            raise CallFailed(channel.peer, "unavailable", "it gave closures up")
        return again

    def _ping(self, busy: Channel, lost: threading.Event) -> None:
        """Asks the worker whether it lives, over a connection of its own; if it has not answered for long, ends the other."""
        channel, last = self._connect(), time.monotonic()
        try:
            while not lost.wait(self._times.ping_s):
                try:
                    said, _ = channel.call("status", self._briefing.routes(), timeout_s=self._times.ping_s)
                    last = time.monotonic()
                    is_lost = said["waiting_s"] > WAITS_S and self._is_cut_off(channel)
                    self._engine.check_workers()
                except CallFailed:
                    is_lost = time.monotonic() - last > self._times.lost_after_s
                    if is_lost:
                        self._cut = f"it has not answered for {self._times.lost_after_s:g} s"
                if is_lost:
                    lost.set()
                    busy.close()
                    with self._engine.lock:
                        self._news.notify_all()
        finally:
            channel.close()


def _error_of(outcome: dict[str, Any]) -> ClosureError | None:
    if outcome["outcome"] == "void" and not outcome.get("is_finite", True):
        return NonFiniteClosureError(outcome["closure"])
    return ClosureError(f"closure {outcome['closure']}: {outcome['error']}") if outcome.get("error") else None


REACH_S = 3.0  # within which a server answers whoever there is a way from


class Briefing:
    """Tells workers.

    Args:
        shards: the shards that keep the state.
        addresses: theirs.
        copies: of each shard, where its two copies are; none where it has one.
        times: how long an answer may take.
    """

    def __init__(self, shards: Sequence[ShardClient], addresses: Sequence[str], copies: Sequence[Copies], times: Times):
        self._shards, self._addresses, self._copies, self._times = shards, list(addresses), copies, times

    def attach(self, channel: Channel) -> None:
        """Tells a worker where the state is."""
        plans = [to_plain(client.plan) for client in self._shards]
        header = {"addresses": self._addresses, "plans": plans}
        channel.call("attach", {**header, **self.routes()}, timeout_s=self._times.lost_after_s)

    def unreached(self, channel: Channel) -> tuple[list[str], bool]:
        """Asks a worker which servers do not answer it.

        Returns:
            `(addresses, is_cut)`: whether all of these answer this process, so that it is the links to them that are cut.
        """
        timeout_s = min(REACH_S, self._times.lost_after_s)
        answer, _ = channel.call("unreached", {"timeout_s": timeout_s}, timeout_s=timeout_s + self._times.lost_after_s)
        found = answer["unreached"]
        same = [client for client in self._shards if client.channel.peer in found]
        return found, bool(same) and not unreached(same, timeout_s)

    def routes(self) -> Header:
        """Where the leader of each shard is, as workers are told; nothing where shards have one copy."""
        return {"routes": [to_plain(copies.channel.route) for copies in self._copies]} if self._copies else {}

    def install(self, channel: Channel, number: int, installable: Installable) -> str:
        """Gives a worker a function; its name there."""
        program = installable.program
        header = {"function": to_plain(installable.function), "program": program.size, "number": number}
        answer, _ = channel.call("install", header, [program], timeout_s=self._times.install_s)
        return answer["name"]

    def open_dataset(self, channel: Channel, dataset: Header) -> str | None:
        """Makes a dataset known to a worker; why it cannot be made there, or None."""
        answer, _ = channel.call("open", dataset, timeout_s=self._times.install_s)
        return answer.get("error")
