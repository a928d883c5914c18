"""A whole job in one process over bad lines, and what has happened in it."""

import contextlib
import dataclasses
import functools
import random
import threading
from collections import Counter
from typing import Any

from jdist.ps.coordinator.servers import Servers
from jdist.ps.coordinator.session import PsOptions, Session
from jdist.ps.program.partition import fixed_shards
from jdist.ps.protocol.messages import Replace
from jdist.ps.protocol.shard import Rules
from jdist.ps.protocol.sync_rounds import Rounds
from jdist.ps.protocol.times import Times
from jdist.ps.server.replicated_shard import ReplicatedShard, slots
from jdist.ps.transport.interface import CallFailed
from jdist.ps.worker.server import WorkerServer
from jdist.strategies.parameter_server import _strategy, strategy_of_worker
from tests.ps.fake_transport import FakeChannel, FakeServer

TIMES = Times(ping_s=0.02, lost_after_s=0.3, closure_s=60, reconnect_s=0.02, max_losses=10_000, ps_timeout_s=60)


@dataclasses.dataclass
class Line:
    """A server, as it is seen over a bad line."""

    server: FakeServer
    network: "Network"

    @property
    def address(self):
        return self.server.address

    def answer(self, method, frame, payload):
        draw = self.network.draw
        self.network.pass_on(self.address)
        if draw("delayed"):
            self.network.wait()
        found = self.server.answer(method, frame, payload)
        if draw("again, late") and self.address.startswith("ps"):
            self.network.later(lambda: self.server.answer(method, frame, payload))
        self.network.pass_on(self.address)
        return found


class Network:
    """Lines on which calls and answers are lost, delayed, doubled, and come again late; `rates` say how often each."""

    def __init__(self, seed, **rates):
        self._random, self._rates = random.Random(seed), {k.replace("_", " "): v for k, v in rates.items()}
        self._lock, self._cut, self._late = threading.Lock(), set(), []
        self.over = threading.Event()
        self.wrong = []

    def draw(self, what):
        with self._lock:
            return not self.over.is_set() and self._random.random() < self._rates.get(what.replace(", ", " "), 0)

    def uniform(self, low, high):
        with self._lock:
            return self._random.uniform(low, high)

    def fault(self, method, header):
        return next((what for what in ("lose the call", "lose the answer", "twice") if self.draw(what)), None)

    def channel(self, server):
        return FakeChannel(Line(server, self), fault=self.fault)

    def pass_on(self, address):
        if address in self._cut:
            raise CallFailed(address, "deadline")

    def wait(self):
        self.over.wait(self.uniform(0, 0.01))

    @contextlib.contextmanager
    def cut(self, address, seconds):
        """Nothing gets to a server, and nothing comes from it, for a time."""
        self._cut.add(address)
        self.over.wait(seconds)
        self._cut.discard(address)
        yield

    def later(self, call):
        def run():
            try:
                call()
            except CallFailed:
                pass  # nobody waits for an answer
            except Exception as exc:  # noqa: BLE001  # a thread of its own: `end` tells
                self.wrong.append(exc)

        timer = threading.Timer(self.uniform(0, 0.1), run)
        timer.daemon = True
        timer.start()  # first, as `end` waits for those in the list
        self._late.append(timer)

    def end(self):
        """No more faults; waits for what is still under way."""
        self.over.set()
        for timer in self._late:
            timer.join(60)
        assert not self.wrong, self.wrong


class History:
    """What took effect where, and what the coordinator called done, in the order in which it happened."""

    def __init__(self):
        self._lock = threading.Lock()
        self.events: list[tuple[Any, ...]] = []
        self.forgotten = 0

    def add(self, *event):
        with self._lock:
            self.events.append(event)

    def check(self, shards, total):
        """That the promise was kept by so many shards, and all of the scheduled closures took effect."""
        base, applied, version = {}, {}, {}
        generation, finished = 0, Counter()
        gone = {}  # shards that have lost their memory, and the history in which they did
        for event in self.events:
            match event:
                case ("restored", shard, number, at, settled, above):
                    key = shard, number
                    # A restore that comes again finds an empty shard, which is noticed, and all of that history undone.
                    assert key not in base or shard in gone, "a shard began a history twice"
                    base[key], applied[key], version[key] = (settled, above), {}, at
                    generation = max(generation, number)
                    if number > gone.get(shard, number):
                        del gone[shard]
                case ("forgot", shard):
                    gone[shard] = generation
                case ("applied", shard, number, before, after, what):
                    key = shard, number
                    assert (before, after) == (version[key], before + len(what)), (
                        "a version that does not follow the last"
                    )
                    version[key] = after
                    for closure, sender in what.items():
                        settled, above = base[key]
                        before_it = {*range(settled), *above, *applied[key]}
                        assert closure not in before_it, f"{closure} took effect twice on {shard}"
                        applied[key][closure] = sender
                case ("finished", closure, number):
                    finished[closure] += 1
                    for shard in {*range(shards)} - gone.keys():  # what it had is computed again
                        settled, above = base[shard, number]
                        has = closure < settled or closure in above or closure in applied[shard, number]
                        assert has, f"{closure} was called done before shard {shard} had it"
        done = {c for c in range(total) if finished[c]}
        assert done == set(range(total)), set(range(total)) - done
        (first, *others) = [(base[s, generation], applied[s, generation]) for s in range(shards)]
        settled, above = first[0]
        assert {*range(settled), *above, *first[1]} == set(range(total))
        for other in others:  # the same closures, by the same computations
            assert other == first
        histories = len({number for _, number in base})
        assert histories <= 1 + self.forgotten, "a rollback, and no shard had lost its memory"


class Recorded(ReplicatedShard):
    """A shard that tells a history what takes effect."""

    def __init__(self, number, history):
        super().__init__(lambda address: None)
        self._number, self._history = number, history

    def _carry_out(self, shard, commands):
        before = self.shard
        super()._carry_out(shard, commands)
        if any(isinstance(command, Replace) for command in commands):
            at = shard.version, shard.settled, frozenset(shard.applied)
            self._history.add("restored", self._number, shard.generation, *at)
        elif new := [c for c in shard.applied if c not in before.applied]:
            senders = {
                c: (e.worker, e.epoch, e.attempt) if (e := before.staged.get(c)) else shard.applied[c].worker
                for c in new
            }
            self._history.add("applied", self._number, shard.generation, before.version, shard.version, senders)


class WatchedJob(Session):
    """Has a history know what the coordinator calls done."""

    def __init__(self, start, options, history):
        super().__init__(start, options)
        self._history = history

    def _make_coordinator(self, *given):
        coordinator = super()._make_coordinator(*given)
        queue = coordinator.queue
        finish = queue.closures.finish

        def noting(command, error=None):
            if command.outcome == "done":
                self._history.add("finished", command.closure, queue.generation)
            return finish(command, error)

        queue.closures.finish = noting
        return coordinator


class InProcess:
    """Workers and servers of this process, with a network between all of them."""

    def __init__(self, network, *, workers=2, ps=2, mode="async", times=TIMES, max_staleness=None):
        self.network, self.history = network, History()
        self.servers = {}
        for i in range(ps):
            self.forget(i, first=True)
        self.workers = [self._worker() for _ in range(workers)]
        for i, worker in enumerate(self.workers):
            self.servers[f"worker{i}"] = FakeServer(f"worker{i}", worker.methods())
        options = PsOptions(
            on_worker=functools.partial(strategy_of_worker, axis="replica"),
            partitioner=fixed_shards(ps),
            placement="round_robin",
            rules=Rules(max_staleness=0 if mode == "sync" else max_staleness, non_finite="skip"),
            times=times,
            rounds=Rounds(size=workers) if mode == "sync" else None,
        )
        names = tuple(f"worker{i}" for i in range(workers)), tuple(f"ps{i}" for i in range(ps))
        servers = Servers(workers=names[0], ps=names[1], connect=self._connect, close=self._close)
        self.strategy = _strategy(WatchedJob(lambda: servers, options, self.history))

    def _connect(self, address):
        return self.network.channel(self.servers[address])

    def _worker(self):
        return WorkerServer(lambda address: self._connect(address), devices=1, timeout_s=2, give_up_s=5)

    def _close(self):
        self.network.end()
        for worker in self.workers:
            worker.close()

    def forget(self, ps, *, first=False):
        """A server dies, and another comes in its place, which knows nothing."""
        if not first:
            self.history.forgotten += 1
            self.history.add("forgot", ps)
        name = f"ps{ps}"
        keeper = Recorded(ps, self.history)
        if first:
            self.servers[name] = FakeServer(name, slots([keeper]))
        else:
            self.servers[name]._methods = slots([keeper])

    def restart(self, worker):
        """A worker dies, and another comes in its place."""
        old = self.servers[f"worker{worker}"]
        self.workers[worker] = self._worker()
        self.servers[f"worker{worker}"] = FakeServer(old.address, self.workers[worker].methods())
        old.stop()
