"""Connections to workers: each connects, sends what is assigned, takes in what comes back; and again after a loss."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jdist.errors import ClosureError, NonFiniteClosureError, NoWorkersError
from jdist.ps.coordinator.closure_queue import ClosureQueue, Report
from jdist.ps.coordinator.closures import Function
from jdist.ps.protocol.scheduler_events import Assign, Lost, Registered, Reported
from jdist.ps.protocol.wire import Spec, to_plain
from jdist.ps.transport.interface import CallFailed, Channel, Header
from jdist.ps.transport.shard_client import unreached
from jdist.support.versions import difference, versions

_LOG = logging.getLogger(__name__)
WITH_OUTPUTS = ("done", "staged")
WAITS_S = 3.0  # for a server; then the worker is asked which it reaches
REACH_S = 3.0  # within which a server answers whoever there is a way from


class Workers:
    """The links to all workers, and whether there is a worker for what is scheduled."""

    def __init__(self, connects: Sequence[Callable[[], Channel]], queue: ClosureQueue):
        self._queue, self._times = queue, queue.times
        self._links = [WorkerLink(n, connect, queue, self) for n, connect in enumerate(connects)]
        self._excluded: dict[int, str] = {}
        self._seen_at_s = self._idle_at_s = self._warned_at_s = time.monotonic()

    def start(self) -> None:
        """Starts the links."""
        for link in self._links:
            link.thread.start()

    def assign(self, command: Assign) -> None:
        """Has closures sent to a worker; called with the queue's lock held."""
        self._links[command.worker].assign(command)

    def end(self) -> None:
        """Ends what is under way, once the queue is closed."""
        with self._queue.lock:
            for link in self._links:
                link.end()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the links, once the queue is closed."""
        for link in self._links:
            if link.thread.ident is not None:
                link.thread.join(timeout_s)

    def exclude(self, worker: int, why: str) -> None:
        """Excludes a worker for the rest of the job."""
        _LOG.warning("%s. It is not used any more.", why)
        with self._queue.lock:
            self._excluded[worker] = why
            if len(self._excluded) == len(self._links):
                error = NoWorkersError(f"no worker is left: {'; '.join(self._excluded.values())}")
                self._queue.no_workers = error
                self._queue.fail(error)

    def check(self) -> None:
        """Fails what is scheduled if there has been no worker for long; warns of what all wait for if no closure finishes."""
        with self._queue.lock:
            now_s, queue = time.monotonic(), self._queue
            is_idle, workers = queue.done, queue.dispatch.workers
            if is_idle:
                self._idle_at_s = now_s
            self._warn_of_standstill(now_s)
            if is_idle or queue.silent or any(known.state == "ready" for known in workers.values()):
                self._seen_at_s = now_s
            silent_s = now_s - self._seen_at_s
            if silent_s > self._times.no_worker_timeout_s:
                queue.fail(
                    NoWorkersError(
                        f"no worker has answered for {silent_s:.0f} s. The state on the servers is intact: fetch and "
                        "save it, or start workers and go on."
                    )
                )

    def _warn_of_standstill(self, now_s: float) -> None:
        """Warns once, naming whom everything waits for, if no closure has finished for long."""
        finished_at_s = max(self._idle_at_s, self._queue.finished_at_s)
        if self._warned_at_s > finished_at_s or now_s - finished_at_s < self._times.standstill_s:
            return
        self._warned_at_s = now_s
        dispatch, silent = self._queue.dispatch, sorted(self._queue.silent.items())
        waits = [
            f"parameter server {shard} at {peer}, which has not answered for {now_s - since_s:.0f} s"
            for shard, (peer, since_s) in silent
        ]
        waits += [f"parameter server {shard} to take the state" for shard in sorted(dispatch.restoring)]
        waits += [
            f"worker {w} at {self._links[w].peer or 'an address not tried yet'}, "
            f"{'which has' if each.state == 'ready' else 'which was lost with'} {len(each.closures)} closures, the first of "
            f"them {min(each.closures)}"
            for w, each in sorted(dispatch.workers.items())
            if each.closures and not silent  # else the workers wait for it, too
        ]
        _LOG.warning(
            "no closure has finished for %.0f s; waiting for %s",
            now_s - finished_at_s,
            "; ".join(waits) or "a worker to come",
        )


class WorkerLink:
    """One worker, as the coordinator has it."""

    def __init__(self, number: int, connect: Callable[[], Channel], queue: ClosureQueue, workers: Workers):
        self.number, self.peer = number, ""  # the address is known once it has connected
        self._connect, self._queue, self._times, self._workers = connect, queue, queue.times, workers
        self._registered, self._lost_at = False, collections.deque[float]()
        self._gave_up = False  # whether it was lost only in so far as it gave its closures up
        self._has_warned = False  # of a loss
        self._cut = ""  # why it was cut off from here
        self._other_versions = ""  # those of the worker that differ from this process's
        self._assigned: collections.deque[Assign] = collections.deque()
        self._refused = False
        self._channel: Channel | None = None
        self._names: dict[int, str] = {}  # of functions installed over this connection, by number
        self._opened: set[int] = set()  # datasets, as well
        # One for each link: what one is assigned, the others need not hear of.
        self._news = threading.Condition(queue.mutex)
        self.thread = threading.Thread(target=self._drive, name=f"jdist-worker-{number}", daemon=True)

    def assign(self, command: Assign) -> None:
        """Takes closures to be sent; called with the queue's lock held."""
        self._assigned.append(command)
        self._news.notify()

    def end(self) -> None:
        """Ends what is under way, once the queue is closed; called with its lock held."""
        self._news.notify_all()
        if (channel := self._channel) is not None:
            channel.close()

    def _drive(self) -> None:
        while True:
            channel, is_excluded = self._connect(), False
            try:
                with self._queue.lock:
                    self.peer = channel.peer
                    if self._queue.closed.is_set():
                        return
                    self._channel = channel
                if not self._attach(channel):
                    return
                why, is_cut = self._missing_ways(channel)
                if why:
                    if is_cut and not self._has_warned:
                        self._has_warned = True
                        _LOG.warning("worker %d at %s gets no closures: %s", self.number, channel.peer, why)
                    raise CallFailed(channel.peer, "unavailable", why)
                self._cut = ""
                self._registered, self._gave_up = True, False
                if self._has_warned:
                    _LOG.warning("worker %d is back", self.number)
                    self._has_warned = False
                self._queue.handle(Registered(worker=self.number))
                self._serve(channel)
            except CallFailed as exc:
                if not self._queue.closed.is_set():
                    level = self._level(exc)
                    self._has_warned = self._has_warned or level == logging.WARNING
                    why = f"{channel.peer}: {self._cut}" if self._cut else exc
                    _LOG.log(level, "worker %d was lost; its closures run again: %s", self.number, why)
                    is_excluded = self._was_lost_too_often(exc)
            except Exception as exc:  # whatever it is, nobody may wait for this thread for ever
                if self._queue.closed.is_set():
                    return
                self._queue.fail(ClosureError(f"worker {self.number} cannot be driven: {exc}"))
                raise
            finally:
                self._channel = None
                channel.close()
            with self._queue.lock:
                self._assigned.clear()
                self._queue.handle(Lost(worker=self.number, epoch=self._queue.epoch_of(self.number)))
                self._workers.check()
            if is_excluded:
                return
            self._queue.closed.wait(self._times.reconnect_s)

    def _attach(self, channel: Channel) -> bool:
        """Tells the worker where the state is; returns whether its versions let it compute closures."""
        header = {
            "plans": [to_plain(client.plan) for client in self._queue.shards.clients],
            **self._queue.routes(),
        }
        answer, _ = channel.call("attach", header, timeout_s=self._times.lost_after_s)
        differ = difference(versions(), answer.get("versions"), same_step=False)
        who, before = f"worker {self.number} at {channel.peer}", self._other_versions
        self._other_versions = "" if differ is None else differ.text
        if differ is not None and differ.is_fatal:
            self._workers.exclude(
                self.number, f"{who} has other versions: {differ.text}. Install the same on all hosts"
            )
            return False
        if differ is not None and differ.text != before:
            _LOG.warning("%s has other versions, and may refuse programs: %s", who, differ.text)
        return True

    def _missing_ways(self, channel: Channel) -> tuple[str, bool]:
        """Asks the worker which servers do not answer it; returns `(why, is_cut)`."""
        # `why` is "" if it reaches all; `is_cut`: the missing servers answer this process.
        timeout_s = min(REACH_S, self._times.lost_after_s)
        answer, _ = channel.call("unreached", {"timeout_s": timeout_s}, timeout_s=timeout_s + self._times.lost_after_s)
        servers = answer["unreached"]
        if not servers:
            return "", False
        same = [client for client in self._queue.shards.clients if client.channel.peer in servers]
        is_cut = bool(same) and not unreached(same, timeout_s)
        why = f"it does not reach the parameter server {' and '.join(servers)}"
        return why + (", which answers here: the link between them is cut" if is_cut else ""), is_cut

    def _is_cut_off(self, channel: Channel) -> bool:
        why, is_cut = self._missing_ways(channel)
        self._cut = why if is_cut else ""
        return is_cut

    def _level(self, exc: CallFailed) -> int:
        """Returns how loudly a failure is told: the user hears of a loss, and once of another token, not of each try."""
        refused_before, self._refused = self._refused, exc.reason == "unauthenticated"
        lost = self._registered and not self._gave_up
        return logging.WARNING if lost or (self._refused and not refused_before) else logging.INFO

    def _was_lost_too_often(self, exc: CallFailed) -> bool:
        """Excludes the worker if it was lost, or refused what it was asked, too often."""
        now = time.monotonic()
        if self._registered or exc.reason == "refused":
            self._lost_at.append(now)
        self._registered = False
        while self._lost_at and self._lost_at[0] < now - self._times.losses_within_s:
            self._lost_at.popleft()
        if len(self._lost_at) < self._times.max_losses:
            return False
        times = len(self._lost_at)
        why = f"worker {self.number} at {exc.peer} was lost {times} times; the last time: {exc.reason}"
        why += f" ({self._other_versions})" if self._other_versions else ""
        self._workers.exclude(self.number, why)
        return True

    def _serve(self, channel: Channel) -> None:
        lost = threading.Event()
        self._names, self._opened = {}, set()
        pinging = threading.Thread(
            target=self._ping, args=(channel, lost), name=f"jdist-ping-{self.number}", daemon=True
        )
        pinging.start()
        try:
            while True:
                with self._queue.lock:
                    self._news.wait_for(lambda: bool(self._assigned) or self._queue.closed.is_set() or lost.is_set())
                    if self._queue.closed.is_set():
                        return
                    if lost.is_set():
                        raise CallFailed(channel.peer, "unavailable", "it does not answer")
                    assigned = list(self._assigned)
                    self._assigned.clear()
                newest = assigned[-1]  # closures of an older history do not belong to this one
                numbers = [c for a in assigned if a.generation == newest.generation for c in a.closures]
                while numbers:
                    numbers = self._execute(channel, newest, numbers, lost)
        finally:
            lost.set()
            pinging.join(self._times.lost_after_s)

    def _execute(
        self, channel: Channel, newest: Assign, numbers: Sequence[int], lost: threading.Event
    ) -> Sequence[int]:
        """Has closures computed and reports them; returns those to send again, as there was no data left to read for them."""
        settled, taken = self._queue.take(newest, numbers)
        if not taken:
            return []
        for closure, batch in taken:
            if closure.function.number not in self._names:
                self._names[closure.function.number] = self._install(channel, closure.function)
            if batch is not None and closure.reads is not None and batch[0] not in self._opened:
                self._opened.add(batch[0])
                self._open(channel, closure.reads.of_pass.header)
        sender = {"worker": self.number, "epoch": newest.epoch, "generation": newest.generation}
        header: Header = {
            **sender,
            "closures": [closure.number for closure, _ in taken],
            "functions": [self._names[closure.function.number] for closure, _ in taken],
            "settled": settled,
        }
        if any(batch is not None for _, batch in taken):
            header["batches"] = [None if batch is None else list(batch) for _, batch in taken]
        outputs = [closure.function.plan.outputs for closure, _ in taken]

        def returned(answer: Header) -> list[Spec]:
            pairs = zip(answer["outcomes"], outputs, strict=True)
            return [spec for outcome, specs in pairs if outcome["outcome"] in WITH_OUTPUTS for spec in specs]

        answer, results = channel.call(
            "execute",
            header,
            [x for closure, _ in taken for x in closure.arguments],
            timeout_s=self._times.closure_s,
            expects=returned,
            bulk=sum(spec.size_bytes for specs in outputs for spec in specs) > 1 << 19,
            data=True,
        )
        if lost.is_set():
            raise CallFailed(channel.peer, "unavailable", "it does not answer")
        arrays, again, reports, skipped = iter(results), list[int](), list[Report](), set[int]()
        for outcome, (closure, batch) in zip(answer["outcomes"], taken, strict=True):
            how = outcome["outcome"]
            if how == "abandoned":
                continue
            if how == "declined" and batch is not None and closure.reads is not None:
                closure.reads.of_pass.ended(batch[2], outcome["batches"])
                again.append(closure.number)
                continue
            leaves = [next(arrays) for _ in closure.function.plan.outputs] if how in WITH_OUTPUTS else []
            if how == "done" and not outcome.get("is_finite", True):
                skipped.add(closure.number)
            how = "read" if how == "done" and not closure.function.plan.updates else how
            reported = Reported(**sender, closure=closure.number, outcome=how, base=outcome.get("base", 0))
            reports.append((reported, leaves, _error_of(outcome)))
        self._queue.report(reports, skipped)
        if any(outcome["outcome"] == "abandoned" for outcome in answer["outcomes"]):
            # It was fenced, or lost a shard: as with a lost worker, shards say what became of the closures.
            self._gave_up = True
            raise CallFailed(channel.peer, "unavailable", "it gave closures up")
        return again

    def _install(self, channel: Channel, function: Function) -> str:
        """Gives the worker a function; returns its name there."""
        program = function.program
        header = {"function": to_plain(function.plan), "program": program.size, "number": function.number}
        answer, _ = channel.call("install", header, [program], timeout_s=self._times.install_s)
        return answer["name"]

    def _open(self, channel: Channel, dataset: Header) -> None:
        """Makes a dataset known to the worker."""
        answer, _ = channel.call("open", dataset, timeout_s=self._times.install_s)
        if (error := answer.get("error")) is not None:
            self._queue.fail(ClosureError(f"a worker cannot open {dataset['name']}: {error}"))

    def _ping(self, busy: Channel, lost: threading.Event) -> None:
        """Asks the worker whether it is alive, over a second connection; ends the first if it has not answered for long."""
        channel, last = self._connect(), time.monotonic()
        try:
            while not lost.wait(self._times.ping_s):
                try:
                    status, _ = channel.call("status", self._queue.routes(), timeout_s=self._times.ping_s)
                    last = time.monotonic()
                    is_lost = status["waiting_s"] > WAITS_S and self._is_cut_off(channel)
                    self._workers.check()
                except CallFailed:
                    is_lost = time.monotonic() - last > self._times.lost_after_s
                    if is_lost:
                        self._cut = f"it has not answered for {self._times.lost_after_s:g} s"
                if is_lost:
                    lost.set()
                    busy.close()
                    with self._queue.lock:
                        self._news.notify_all()
        finally:
            channel.close()


def _error_of(outcome: dict[str, Any]) -> ClosureError | None:
    if outcome["outcome"] == "void" and not outcome.get("is_finite", True):
        return NonFiniteClosureError(outcome["closure"])
    return ClosureError(f"closure {outcome['closure']}: {outcome['error']}") if outcome.get("error") else None
