"""A whole job in one process: coordinator, workers and shards over the fake transport."""

import contextlib
import dataclasses
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest

from jdist.cluster import exit_status
from jdist.errors import ClosureCancelledError, ClosureError, JobReplacedError, NoWorkersError, ShardLostError
from jdist.ps.coordinator import snapshots
from jdist.ps.coordinator.closure_queue import ClosureQueue
from jdist.ps.coordinator.coordinator import Coordinator
from jdist.ps.coordinator.remote_value import Pending, RemoteValue, leaf
from jdist.ps.program.artifact import pack
from jdist.ps.program.function_plan import FunctionPlan, make_function, plan_function
from jdist.ps.protocol.messages import Restore
from jdist.ps.protocol.scheduler_events import Assign, Decided
from jdist.ps.protocol.sync_rounds import Rounds
from jdist.ps.protocol.times import Times
from jdist.ps.protocol.wire import spec_of
from jdist.ps.server.replicated_shard import slots
from jdist.ps.transport.interface import Method
from jdist.ps.transport.routed import place_copies
from jdist.ps.transport.shard_client import process_name
from jdist.ps.worker.server import WorkerServer
from jdist.support.versions import versions
from tests.ps.fake_transport import FakeChannel, FakeServer, only_copy
from tests.ps.real_cluster import wait_until
from tests.ps.server import test_shard_server as shard_server
from tests.ps.server.test_shard_server import fail_at, program

TIMES = Times(ping_s=0.05, lost_after_s=0.5, closure_s=60, reconnect_s=0.05)


class Job(shard_server.Job):
    """A job of this process; calls of workers to shards meet `fault`."""

    def __init__(self, num_ps, num_workers, *, fault=lambda method, header: None, times=TIMES):
        super().__init__(num_ps, optax.sgd(0.1, 0.9), non_finite="skip")
        self.keepers = [only_copy() for _ in self.layout.shards]
        self.servers = {f"ps{i}": FakeServer(f"ps{i}", slots([k])) for i, k in enumerate(self.keepers)}
        self.faults = {}  # by server, of the coordinator's calls

        def connect(address):
            return FakeChannel(self.servers[address], fault=fault)

        self.workers = [WorkerServer(connect, timeout_s=2, give_up_s=5) for _ in range(num_workers)]
        self.worker_servers = [FakeServer(f"worker{i}", w.methods()) for i, w in enumerate(self.workers)]
        self.times = times
        self.programs = [[program(self.layout, shard)] for shard in self.layout.shards]
        function, self.arguments = make_function(self.parts), jax.tree.leaves(self.given)
        self.function = plan_function(self.layout, 0, function)
        self.packed = pack(function.run, [*(self.leaves[i] for i in self.parts.read), *self.arguments])
        self.begin()

    def begin(self):
        """Begins, or begins anew with another coordinator."""

        def connect(address):
            fault = lambda method, header: self.faults.get(address, lambda *_: None)(method, header)  # noqa: E731
            return FakeChannel(self.servers[address], fault=fault)

        self.coordinator = Coordinator(
            [lambda i=i: FakeChannel(self.worker_servers[i]) for i in range(len(self.workers))],
            place_copies(connect, list(self.servers), list(self.servers), replicas=1),
            self.layout.shards,
            times=self.times,
            depth=4,
        )
        self.queue = self.coordinator.queue
        self.clients = self.queue.shards.clients
        self.coordinator.begin(self.layout.split_leaves(self.leaves), self.programs)
        self.step = self.queue.add(self.function, self.packed)

    def forget(self, shard=-1):
        """A server dies, and another comes in its place."""
        self.keepers[shard] = only_copy()
        self.servers[list(self.servers)[shard]]._methods = slots([self.keepers[shard]])

    def come_back(self, worker=0):
        """A new process comes in a worker's place."""
        methods = WorkerServer(self.workers[worker]._connect).methods()
        self.worker_servers[worker] = FakeServer(f"worker{worker}", methods)

    def schedule(self, arguments=None):
        return self.queue.schedule(self.step, self.arguments if arguments is None else arguments)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.coordinator.close()


def steps_of(job, kept):
    """The counter in each shard's arrays."""
    place = job.names.index(".step")
    return [int(arrays[[r.of for r in s.rows].index(place)]) for s, arrays in zip(job.layout.shards, kept, strict=True)]


def count(job):
    return steps_of(job, [keeper._kept for keeper in job.keepers])


def test_results_are_those_of_the_present_history():
    """What a rollback has discarded is computed again, and what was to be read of it is what comes then."""
    with Job(1, 1) as job:
        pending = [job.schedule() for _ in range(6)]
        job.queue.join()
        before = [each.wait(20) for each in pending]
        with job.queue.lock:  # nothing is computed meanwhile
            job.queue.memory_lost(0)
            assert not any(each.done for each in pending)
            assert not job.queue.is_present(0, job.queue.epoch_of(0), job.queue.generation - 1)
            assert job.queue.is_present(0, job.queue.epoch_of(0), job.queue.generation)
        job.queue.join()
        again = [each.wait(20) for each in pending]
        assert not any(a is b for a, b in zip(again, before, strict=True))
        for a, b in zip(again, before, strict=True):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_coordinator_that_another_has_replaced_says_so_and_leaves_the_servers_to_it(num_ps):
    with Job(num_ps, 2) as job:
        job.schedule().wait(60)
        before = job.coordinator
        late = job.schedule()
        job.begin()
        assert before.queue.closed.wait(20)
        other = f"another coordinator ({process_name()})"
        found = f"{other} has taken over the parameter servers: their history is number 2, and this"
        for call in (before.queue.join, before.snapshots.take, lambda: before.queue.schedule(0, job.arguments)):
            with pytest.raises(JobReplacedError, match=re.escape(found)) as raised:
                call()
        assert exit_status.of(raised.value) == exit_status.USAGE  # after which no launcher starts it again
        if not late.done or late.error is not None:
            with pytest.raises(JobReplacedError):
                late.wait(20)
        for _ in range(20):
            job.schedule()
        job.queue.join(60)
        assert count(job) == [20] * num_ps
        assert job.queue.generation == 2
        before.close()


def test_a_closure_of_an_update_that_has_failed_ends_its_round():
    function = FunctionPlan(arguments=(), outputs=())
    decided, queue = [], ClosureQueue([], TIMES, rounds=Rounds(size=2), copies=[])
    made = queue.add(function, b"", combine=lambda results: ([], True, None))
    queue.executors[Assign] = lambda command: None
    pending = queue.schedule_round(made, [[], []])
    pending[0].arrive([])
    pending[1].arrive([], ClosureError("no memory"))
    queue.handle = decided.append
    queue.decide((0, 1))
    assert decided == [Decided(closures=(0, 1), commit=False)]
    assert str(queue._error) == "the results of closures (0, 1) cannot be combined: no memory"


def test_of_two_coordinators_that_begin_at_the_same_time_one_gives_way(monkeypatch):
    with Job(1, 1) as job:
        job.queue.join(20)
        monkeypatch.setattr("jdist.ps.transport.shard_client.process_name", lambda: "process 1 of another")
        job.clients[0].restore(Restore(generation=2), job.layout.split_leaves(job.leaves)[0], job.programs[0])
        job.queue.memory_lost(0)  # it begins history 2, too
        assert job.queue.closed.wait(20)
        with pytest.raises(JobReplacedError, match=r"\(process 1 of another\)"):
            job.queue.join(20)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_server_whose_update_fails_once_begins_anew_and_the_count_is_exact_all_the_same(num_ps):
    with Job(num_ps, 2) as job:
        pending = [job.schedule() for _ in range(10)]
        pending[4].wait(60)
        job.queue.join(60)
        fail_at(job.keepers[-1], 3)
        pending += [job.schedule() for _ in range(20)]
        job.queue.join(60)
        assert count(job) == [30] * num_ps
        assert job.queue.generation == 2
        assert all(np.isfinite(p.wait(0)[0]) for p in pending)


def test_snapshots_that_are_wanted_at_the_same_time_are_each_of_one_moment():
    with Job(2, 2) as job, ThreadPoolExecutor(3) as pool:
        pending = [job.schedule() for _ in range(60)]
        found = [pool.submit(job.coordinator.snapshots.take) for _ in range(12)]
        for snapshot in (f.result(60) for f in found):
            assert steps_of(job, snapshot.kept) == [snapshot.version] * 2
        job.queue.join(60)
        assert all(p.done for p in pending)


def test_a_snapshot_of_which_an_answer_is_lost_is_taken_again():
    with Job(2, 1) as job:
        job.schedule().wait(60)
        lost = iter(["lose the answer"])
        job.faults["ps1"] = lambda method, header: next(lost, None) if method == "read" else None
        assert steps_of(job, job.coordinator.snapshots.take().kept) == [1, 1]
        assert next(lost, None) is None


def test_a_worker_that_one_coordinator_lost_often_serves_the_next_at_once():
    with Job(1, 1) as job:
        job.schedule().wait(60)
        for _ in range(3):
            job.worker_servers[0].stop()
            job.worker_servers[0] = FakeServer("worker0", job.workers[0].methods())
            job.schedule().wait(60)
        assert job.queue.epoch_of(0) > 2
        job.coordinator.close()
        job.begin()
        job.schedule().wait(60)
        assert job.queue.epoch_of(0) == 1


def test_a_snapshot_is_not_used_before_the_results_of_all_that_is_in_it_are_here(monkeypatch):
    taken, take = threading.Event(), snapshots.take_snapshot

    def noting(*given, **options):
        try:
            return take(*given, **options)
        finally:
            taken.set()

    monkeypatch.setattr(snapshots, "take_snapshot", noting)
    with Job(2, 1) as job, ThreadPoolExecutor(1) as pool:
        job.schedule().wait(60)
        execute, has_run, answers = job.worker_servers[0]._methods["execute"], threading.Event(), threading.Event()

        def slow(header, arrays):
            found = execute.run(header, arrays)
            has_run.set()
            answers.wait(60)
            return found

        job.worker_servers[0]._methods = {**job.worker_servers[0]._methods, "execute": Method(slow, execute.expects)}
        pending = job.schedule()
        assert has_run.wait(60)
        snapshot = pool.submit(job.coordinator.snapshots.take)
        assert taken.wait(60)
        # Were a shard to forget everything now, nobody would compute the closure again, and nobody would have its result.
        assert (snapshot.done(), job.queue.newest.version) == (False, 0)
        answers.set()
        assert snapshot.result(60).version == 2
        assert np.isfinite(pending.wait(60)[0])


class TestAShardThatIsGone:
    TIMES = dataclasses.replace(TIMES, ps_timeout_s=0.5)

    def test_every_call_says_so_and_nobody_waits_until_it_is_back_with_all_it_had(self):
        with Job(2, 2, times=self.TIMES) as job:
            pending = [job.schedule() for _ in range(30)]
            pending[5].wait(60)
            job.servers["ps1"].stop()
            said = r"the parameter server ps1 has not answered for \d+ s: unavailable\. Start it again"
            for _ in range(2):
                with pytest.raises(ShardLostError, match=said):
                    job.queue.join(60)
                with pytest.raises(ShardLostError, match=said):
                    job.schedule()
            for p in pending:
                with contextlib.suppress(ShardLostError, ClosureCancelledError):
                    p.wait(60)
            job.servers["ps1"].resume()
            while not job.queue.done:
                with contextlib.suppress(ShardLostError):
                    job.queue.join(60)
            cancelled = sum(isinstance(p.error, ClosureCancelledError) for p in pending)
            assert count(job) == [30 - cancelled] * 2
            assert all(p.done for p in pending)

    def test_a_coordinator_that_begins_without_it_says_so_and_leads_no_other(self):
        with Job(2, 1) as job:
            job.schedule().wait(60)
            job.coordinator.close()
            job.servers["ps1"].stop()
            term = job.keepers[0].status({}, [])[0]["term"]
            with pytest.raises(ShardLostError, match="no answer from the parameter server ps1: unavailable"):
                job.begin()
            assert job.keepers[0].status({}, [])[0]["term"] == term


def test_snapshots_bound_what_the_coordinator_keeps(monkeypatch):
    monkeypatch.setattr("jdist.ps.coordinator.closures.SNAPSHOT_EVERY", 10)
    with Job(2, 1) as job:
        most = 0
        for _ in range(80):
            job.schedule().wait(60)
            most = max(most, len(job.queue.closures.known))
        assert most < 70  # of 80, without any snapshot; how soon one is through depends on the machine


def test_a_gradient_that_is_not_finite_fails_its_closure_and_cancels_the_queue():
    with Job(1, 1) as job:
        job.schedule().wait(60)
        bad = [x * np.float32("nan") if np.asarray(x).dtype == np.float32 else x for x in job.arguments]
        failed = job.schedule(bad)
        later = [job.schedule() for _ in range(200)]
        with pytest.raises(ClosureError, match=r"closure 1: a gradient is NaN or infinite"):
            job.queue.join(60)
        assert isinstance(failed.error, ClosureError)
        cancelled = sum(isinstance(p.error, ClosureCancelledError) for p in later)
        assert cancelled > 100
        job.schedule()  # the error was told once
        job.queue.join(60)
        assert count(job) == [202 - cancelled]


def test_closing_ends_every_thread():
    before = set(threading.enumerate())
    with Job(2, 2) as job:
        job.schedule().wait(60)
    for worker in job.workers:
        worker.close()
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("jdist")]
    for thread in left:
        thread.join(10)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("limit", ["MOST_QUEUED", "MOST_QUEUED_BYTES"])
def test_a_full_queue_makes_the_next_call_wait(monkeypatch, limit):
    where = "closure_queue" if limit == "MOST_QUEUED" else "closures"
    monkeypatch.setattr(f"jdist.ps.coordinator.{where}.{limit}", 5 if limit == "MOST_QUEUED" else 1000)
    with Job(1, 1) as job:
        job.schedule().wait(60)
        job.worker_servers[0].stop()
        scheduled = []

        def schedule():
            for _ in range(20):
                scheduled.append(job.schedule())

        scheduling = threading.Thread(target=schedule)
        scheduling.start()
        scheduling.join(1.0)
        waits, there = scheduling.is_alive(), len(scheduled)
        job.come_back()
        scheduling.join(60)
        job.queue.join(60)
        assert (waits, there < 20, len(scheduled), count(job)) == (True, True, 20, [21])


def test_a_worker_that_refuses_all_it_is_asked_is_left_alone_and_the_user_hears_of_it(caplog):
    with Job(1, 1) as job:
        job.schedule().wait(60)
        methods = job.workers[0].methods()
        job.worker_servers[0]._methods = {**methods, "execute": Method(lambda header, arrays: 1 / 0)}
        pending = [job.schedule() for _ in range(3)]
        with pytest.raises(NoWorkersError, match=r"no worker is left: worker 0 at worker0 was lost 8 times.*refused"):
            job.queue.join(60)
        assert all(p.done for p in pending)
        with pytest.raises(NoWorkersError):
            job.schedule()


@pytest.mark.parametrize(
    ("other", "refuses", "said"),
    [
        (
            {"jax": "0.99.0", "reads": [98, 99]},
            "nothing",
            r"worker 0 at worker0 has other versions: jax is 0\.99\.0 on far and .* on .*; far reads exported programs of "
            r"calling conventions \[98, 99\], and .* writes .*\. Install the same on all hosts\. It is not used any more",
        ),
        ({"protocol": 99}, "nothing", r"jdist's wire protocol is 99 on far and 1 on .* It is not used any more"),
        (
            {"jax": "0.9.1"},
            "nothing",
            r"worker0 has other versions, and may refuse programs: jax is 0\.9\.1 on far and ",
        ),
        ({"jax": "0.9.1"}, "install", r"was lost 8 times; the last time: refused \(jax is 0\.9\.1 on far and "),
    ],
)
def test_a_worker_of_other_versions_is_named_here_with_both(caplog, other, refuses, said):
    with Job(1, 2) as job:
        job.schedule().wait(60)
        job.worker_servers[0].stop()
        theirs = {"versions": {**versions(), "host": "far", **other}}
        methods = {**job.workers[0].methods(), refuses: Method(lambda header, arrays: 1 / 0)}
        attach = methods["attach"].run
        methods["attach"] = Method(lambda header, arrays: (attach(header, arrays)[0] | theirs, []))
        job.worker_servers[0] = FakeServer("worker0", methods)
        wait_until(lambda: job.schedule().wait(60) and re.search(said, caplog.text))


def test_what_a_function_fails_with_on_a_worker_is_shown_and_cancels_the_queue(monkeypatch):
    def fail(self, arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory on this worker")

    with Job(1, 1) as job:
        job.schedule().wait(60)
        with monkeypatch.context() as patch:
            patch.setattr("jdist.ps.worker.execute.Installed._called", fail)
            failed = job.schedule()
            with pytest.raises(ClosureError, match=r"(?s)closure 1: Traceback.*out of memory on this worker"):
                job.queue.join(60)
        assert isinstance(failed.error, ClosureError)
        job.schedule()
        job.queue.join(60)
        assert count(job) == [2]


def test_a_long_chain_of_closures_whose_first_one_fails():
    with Job(1, 1) as job:
        first = Pending()
        value, values = RemoteValue([first], leaf(0)), []
        for _ in range(3000):
            pending = job.queue.schedule(job.step, [value] * len(job.arguments))
            value = RemoteValue([pending], leaf(0))
            values.append(pending)
        first.arrive([], ClosureError("the first"))
        job.queue.join(60)
        assert all(isinstance(p.error, ClosureCancelledError) for p in values)


def test_when_much_has_come_while_a_snapshot_was_taken_the_next_one_is_due(monkeypatch):
    monkeypatch.setattr("jdist.ps.coordinator.closures.MOST_LOGGED_BYTES", 400)  # some four closures' arguments
    with Job(1, 2) as job:
        for _ in range(100):  # would wait for ever at twice that
            job.schedule()
        job.queue.join(60)
        assert count(job) == [100]


def test_functions_without_a_state_leave_nothing_behind():
    worker = WorkerServer(lambda address: None)
    server = FakeServer("worker", worker.methods())
    job = Coordinator([lambda: FakeChannel(server)], [], [], times=TIMES)
    job.begin([], [])
    try:
        spec = jax.ShapeDtypeStruct((), np.int32)
        function = FunctionPlan(arguments=(spec_of(spec),), outputs=(spec_of(spec),))
        number = job.queue.add(function, pack(lambda values: [values[0] + 1], [spec]))
        found = [job.queue.schedule(number, [np.int32(i)]) for i in range(1200)]  # more than make a snapshot due
        job.queue.join(60)
        assert [int(p.wait(0)[0]) for p in found] == list(range(1, 1201))
        assert (len(job.queue.closures.known), job.queue.closures._void) == (0, set())
    finally:
        job.close()


def test_a_step_that_was_cancelled_has_no_effect_and_a_rollback_does_not_bring_it_back():
    with Job(1, 1) as job:
        job.schedule().wait(60)
        job.worker_servers[0].stop()
        pending = [job.schedule() for _ in range(10)]
        assert [job.queue.cancel([p]) for p in pending[7:]] == [True] * 3
        assert not job.queue.cancel(pending[6:8])  # of which one is cancelled: all or none
        job.come_back()
        job.queue.join(60)
        assert count(job) == [8]
        job.forget()
        job.schedule().wait(60)
        job.queue.join(60)
        assert (count(job), job.queue.generation) == ([9], 2)
        assert [type(p.error) for p in pending[7:]] == [ClosureCancelledError] * 3


def test_a_server_lost_between_the_last_closure_and_the_snapshot_costs_the_fetched_state_nothing():
    with Job(2, 2) as job:
        for _ in range(12):
            job.schedule()
        take, losses = job.coordinator.snapshots.take, iter([True])

        def losing():
            if next(losses, False):
                job.forget()
                with job.queue.lock:
                    assert job.queue.lock.wait_for(lambda: job.queue.generation == 2, 60)
            return take()

        job.coordinator.snapshots.take = losing
        assert steps_of(job, job.coordinator.state().kept) == [12, 12]
        assert next(losses, None) is None


def test_it_is_said_once_for_whom_all_wait(caplog):
    hold, release, begun = threading.Event(), threading.Event(), threading.Event()

    def held(method, header):
        if hold.is_set() and method == "say" and any(m["is"] == "Push" for m in header["say"]):
            begun.set()
            release.wait(20)

    with Job(1, 1, fault=held, times=dataclasses.replace(TIMES, standstill_s=0.3, lost_after_s=20)) as job:
        job.schedule().wait(60)
        caplog.clear()  # the first one was compiled for
        hold.set()
        pending = [job.schedule() for _ in range(3)]
        assert begun.wait(20)
        wait_until(lambda: "no closure has finished for" in caplog.text)
        release.set()
        for each in pending:
            each.wait(60)
        job.queue.join(60)
        assert caplog.text.count("no closure has finished for") == 1
        assert "waiting for worker 0 at worker0, which has 3 closures, the first of them 1" in caplog.text


def test_a_silent_server_is_named_and_not_the_workers_that_wait_for_it(caplog):
    times = dataclasses.replace(TIMES, standstill_s=0.3, lost_after_s=0.2, no_worker_timeout_s=0.1, ps_timeout_s=60.0)
    with Job(1, 1, times=times) as job:
        job.schedule().wait(60)
        job.servers["ps0"].stop()
        caplog.clear()
        pending = job.schedule()
        wait_until(lambda: "no closure has finished for" in caplog.text)
        job.servers["ps0"].resume()
        pending.wait(60)
        wait_until(lambda: "parameter server 0 is back" in caplog.text)
    told = [record.message for record in caplog.records]
    assert re.match(
        r"parameter server 0 at ps0 has not answered for \d+ s: unavailable. Calls that need it wait", told[0]
    )
    (waits,) = [line for line in told if line.startswith("no closure has finished for")]
    assert re.search(r"waiting for parameter server 0 at ps0, which has not answered for \d+ s$", waits)


@pytest.mark.parametrize("lost", ["freeze", "keep", "thaw"])
def test_a_shard_that_cannot_be_reached_in_a_snapshot_keeps_nobody_waiting(monkeypatch, caplog, lost):
    """The other shard is thawed, the silent one thaws by itself, and the snapshot is taken when both answer."""
    monkeypatch.setattr(snapshots, "ANSWER_S", 0.05)
    is_cut = threading.Event()

    def cut(method, header):
        if method == "say" and any(m.get("phase") == lost for m in header["say"]):
            is_cut.set()
        return "lose the call" if is_cut.is_set() and method == "say" else None

    with Job(2, 1) as job, ThreadPoolExecutor(1) as pool:
        job.schedule().wait(60)
        for keeper in job.keepers:
            keeper._frozen_s = 0.05
        job.faults["ps1"] = cut
        snapshot = pool.submit(job.coordinator.snapshots.take)
        assert is_cut.wait(60)
        job.schedule().wait(60)
        assert not snapshot.done()
        wait_until(lambda: "no snapshot for now" in caplog.text)
        job.faults.clear()
        assert steps_of(job, snapshot.result(60).kept) == [2, 2]
    assert "ps1 does not answer: deadline, for 0.05 s, as shard 1 is asked for its part. The other" in caplog.text
