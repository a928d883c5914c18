"""A shard with its arrays, asked by a client over the fake transport."""

import itertools
import random
import threading

import jax
import numpy as np
import optax
import pytest

from jdist.errors import ShardLostError, WireError
from jdist.ps.coordinator.snapshots import take_snapshot
from jdist.ps.program.artifact import pack
from jdist.ps.program.layout import make_layout
from jdist.ps.program.partition import fixed_shards
from jdist.ps.protocol.messages import (
    Commit,
    Cut,
    Done,
    Fence,
    Held,
    Parameters,
    Pull,
    Push,
    Refused,
    Restore,
    Snapshot,
)
from jdist.ps.protocol.shard import Rules
from jdist.ps.server.shard_server import ShardServer
from jdist.ps.transport.interface import CallFailed, FailedPrecondition
from jdist.ps.transport.shard_client import ShardClient, ShardClients
from tests.ps.fake_transport import FakeChannel, FakeServer
from tests.ps.hidden_layer import BATCH, create, raw, train_step
from tests.ps.program.test_layout import one_step, shares
from tests.ps.program.test_split_step import apart, computed


def program(layout, shard):
    return pack(layout.program(shard, 0), list(map(struct, shard.program_specs(0))))


class Job:
    """A state over keepers of this process; `layout` are options of `make_layout`."""

    def __init__(
        self, num_ps, tx=None, fault=lambda method, header: None, *, step=train_step, state=None, layout=None, **rules
    ):
        self.state = state or create(tx or optax.adam(0.1))
        self.parts, *given = apart(step, self.state, BATCH)
        self.given, self.leaves = given[1:], raw(self.state)
        options = {"partitioner": fixed_shards(num_ps), "rules": Rules(**rules), **(layout or {})}
        self.layout = make_layout([self.parts], num_ps=num_ps, **options)
        self.snapshots = itertools.count(1)
        self.keepers = [ShardServer() for _ in self.layout.shards]
        self.servers = [FakeServer(f"ps{i}", keeper.methods()) for i, keeper in enumerate(self.keepers)]
        self.clients = [
            ShardClient(FakeChannel(server, fault=fault), shard, give_up_s=2)
            for server, shard in zip(self.servers, self.layout.shards, strict=True)
        ]

    def restore(self, generation=1):
        for client, shard in zip(self.clients, self.layout.shards, strict=True):
            kept = [rows.cut(self.leaves[rows.of]) for rows in shard.rows]
            packed = program(self.layout, shard)
            assert isinstance(client.restore(Restore(generation=generation), kept, [packed]), Done)
        return self

    def computed(self):
        pushed, scalars, _, _ = computed(self.parts, [self.leaves[i] for i in self.parts.read], *self.given)
        return [shares(self.layout, shard, pushed, scalars) for shard in self.layout.shards]

    def whole(self):
        """The state's leaves, as the shards have them."""
        found, number = [np.array(x) for x in self.leaves], next(self.snapshots)
        for client, shard in zip(self.clients, self.layout.shards, strict=True):
            client.say([Snapshot(phase="freeze", generation=1, number=number)])
            (answer,), _ = client.say([Snapshot(phase="keep", generation=1, number=number)])
            assert isinstance(answer, Cut)
            client.say([Snapshot(phase="thaw", generation=1, number=number)])
            for rows, x in zip(shard.rows, client.read(1, answer.version), strict=True):
                rows.put(found[rows.of], x)
        return found

    @property
    def names(self):
        """Of the leaves."""
        return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.state)]

    def kept(self, name):
        """One of the leaves."""
        return self.whole()[self.names.index(name)]


def struct(spec):
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def push(closure=0, **fields):
    return Push(generation=1, worker=0, epoch=1, closure=closure, **fields)


def expected(job):
    return one_step(job.layout, job.parts, job.leaves, *job.given)[0]


def test_a_push_updates_and_the_next_pull_is_one_call():
    calls = []
    job = Job(1, fault=lambda method, header: calls.append(method)).restore()
    calls.clear()
    (done, pulled), arrays = job.clients[0].say(
        [push(base=0), Pull(generation=1, known=0)], job.computed()[0], b"result"
    )
    assert (done, pulled, calls) == (Done(version=1), Parameters(version=1, changed=True), ["say"])
    new = expected(job)
    shard = job.layout.shards[0]
    for k, x in zip(shard.views[0].pulled, arrays, strict=True):
        np.testing.assert_allclose(x, shard.rows[k].cut(new[shard.rows[k].of]), rtol=1e-5)


def fail_at(keeper, call):
    """Has one call of a keeper's program fail, as for lack of memory."""
    run, calls = keeper._programs[0], itertools.count()

    def program(values):
        if next(calls) == call:
            raise RuntimeError("out of memory")
        return run(values)

    keeper._programs = [program]


def test_an_update_that_fails_half_way_leaves_an_empty_shard_under_another_name():
    job = Job(2).restore()
    (share, _), client, keeper = job.computed(), job.clients[0], job.keepers[0]
    before = client.status()["incarnation"]
    for closure in (0, 1):
        client.say([push(closure, stage=True, base=0)], share)
    fail_at(keeper, 1)
    commit = Commit(generation=1, worker=0, epoch=1, closures=(0, 1))
    with pytest.raises(ShardLostError):
        client.say([commit])
    found = client.status()
    assert (found["incarnation"] != before, found["generation"], found["version"]) == (True, 0, 0)
    (answer,), _ = client.say([commit])
    assert (type(answer), answer.reason) == (Refused, "empty")
    assert not keeper._kept
    assert not keeper._held


def test_a_shard_that_nobody_thaws_thaws_by_itself_and_that_snapshot_is_void(caplog):
    job = Job(1)
    keeper = job.keepers[0]
    keeper._frozen_s = 0.01
    job.restore()
    client, share = job.clients[0], job.computed()[0]
    client.say([Snapshot(phase="freeze", generation=1, number=3)])
    (cut,), _ = client.say([Snapshot(phase="keep", generation=1, number=3)])
    (answer,), _ = client.say([push(base=0)], share, b"result")
    assert answer == Done(version=1)
    assert client.read(1, cut.version) is None
    for late in (Snapshot(phase="freeze", generation=1, number=3), Snapshot(phase="freeze", generation=1, number=2)):
        client.say([late])
        (refused,), _ = client.say([Snapshot(phase="keep", generation=1, number=late.number)])
        assert (refused.reason, keeper.shard.frozen) == ("unknown", 0)
    assert (keeper._answers, keeper._abandoned) == ({}, set())
    assert "no thaw for snapshot 3 within 0.01 s" in caplog.text


@pytest.mark.parametrize("fault", ["lose the answer", "twice", "lose the call"])
@pytest.mark.parametrize("num_ps", [1, 2])
def test_faults_on_the_way_change_nothing(num_ps, fault):
    faults = iter([])
    job = Job(num_ps, fault=lambda method, header: next(faults, None)).restore()
    shares = job.computed()
    for client, share in zip(job.clients, shares, strict=True):
        faults = iter([fault])
        client.say([push(stage=num_ps > 1, base=0)], share)
    for client in job.clients if num_ps > 1 else ():
        faults = iter([fault])
        client.say([Commit(generation=1, worker=0, epoch=1, closures=(0,))])
    faults = iter([])
    for a, b in zip(job.whole(), expected(job), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_fence_gives_back_what_a_closure_returned():
    job = Job(2).restore()
    job.clients[0].say([push(stage=True, base=0)], job.computed()[0], b"what it returned")
    (held,), _ = job.clients[0].say([Fence(generation=1, fenced=0, below=2)])
    results = ((0, b"what it returned"),)
    assert held == Held(version=0, staged=frozenset({(0, 0)}), applied=frozenset(), results=results)
    (answer,), _ = job.clients[0].say([push(stage=True, closure=1, base=0)], job.computed()[0])
    assert isinstance(answer, Refused)


def test_arrays_of_refused_and_settled_closures_are_let_go():
    job = Job(1, max_staleness=0).restore()
    share = job.computed()[0]
    for closure in range(5):
        job.clients[0].say([push(closure=closure, base=0)], share, b"r")
    assert len(job.keepers[0]._held) == 1  # the result of the one that was applied
    job.clients[0].say([Pull(generation=1, settled=5)])
    assert job.keepers[0]._held == {}


def test_a_pull_brings_what_never_changes_only_once():
    job = Job(1).restore()
    (first,), arrays = job.clients[0].say([Pull(generation=1)])
    shard = job.layout.shards[0]
    assert (first.changed, len(arrays)) == (True, len(shard.views[0].pulled) + len(shard.views[0].pulled_once))
    assert shard.views[0].pulled_once
    (again,), arrays = job.clients[0].say([Pull(generation=1, known=0)])
    assert (again.changed, arrays) == (False, [])


def test_a_frozen_shard_answers_after_its_thaw():
    job = Job(1).restore()
    client = job.clients[0]
    client.say([Snapshot(phase="freeze", generation=1)])
    share, answers = job.computed()[0], []
    thread = threading.Thread(target=lambda: answers.extend(client.say([push(base=0)], share)[0]))
    thread.start()
    client.say([Pull(generation=1, known=0)])
    assert not answers
    client.say([Snapshot(phase="thaw", generation=1)])
    thread.join(30)
    assert answers == [Done(version=1)]


def test_a_snapshot_contains_what_was_settled_since_it_was_asked_for():
    job = Job(2).restore()
    for client, share in zip(job.clients, job.computed(), strict=True):
        client.say([push(stage=True, closure=0, base=0)], share)
        client.say([Commit(generation=1, closures=(0,))])
    job.clients[0].say([Pull(generation=1, settled=1)])  # one shard has heard of it, and one has not
    together = ShardClients(job.clients)
    found, _ = take_snapshot(together, number=1, generation=1, settled=0, is_wanted=lambda: True)
    together.close()
    assert (found.settled, found.applied, found.version) == (1, frozenset(), 1)


def test_stale_gradients_may_count_less():
    plain, less = (Job(1, optax.sgd(0.1), **rules) for rules in ({}, {"max_staleness": 0, "on_stale": "down_weight"}))
    for job in (plain, less):
        job.restore()
        share = job.computed()[0]
        for closure in range(2):
            job.clients[0].say([push(closure=closure, base=0)], share)
    moved = [[a - b for a, b in zip(job.whole(), job.leaves, strict=True)] for job in (plain, less)]
    i = plain.names.index(".params['a']")
    np.testing.assert_allclose(moved[1][i], moved[0][i] * (1 + 1 / 2) / 2, rtol=1e-4)


def test_a_push_to_an_empty_shard_comes_too_early_and_two_at_once_make_no_sense():
    job = Job(1)
    said = {"result": 0, "say": [{"is": "Push", "view": 0}]}
    with pytest.raises(FailedPrecondition, match="empty shard"):
        job.keepers[0].methods()["say"].expects(said)
    job.restore()
    assert job.keepers[0].methods()["say"].expects(said)
    with pytest.raises(WireError, match="of several") as info:
        job.keepers[0].methods()["say"].expects({**said, "say": 2 * said["say"]})
    assert not isinstance(info.value, FailedPrecondition)


def test_a_server_that_is_gone_is_named_and_the_programs_random_numbers_stay():
    job = Job(1).restore()
    job.servers[0].stop()
    drawn = random.getstate()
    with pytest.raises(ShardLostError, match="the parameter server ps0 does not answer: unavailable"):
        job.clients[0].say([Pull(generation=1)])
    assert random.getstate() == drawn  # after some pauses


def test_whoever_has_closed_the_connection_does_not_try_again():
    job = Job(1).restore()

    def closed(*given, **options):
        calls.append(1)
        raise CallFailed("ps0", "closed")

    calls, job.clients[0].channel.begin = [], closed
    with pytest.raises(ShardLostError, match="closed"):
        job.clients[0].say([push(base=0)], job.computed()[0])
    assert calls == [1]


def test_all_shards_are_asked_at_the_same_time():
    job = Job(2).restore()
    together = ShardClients(job.clients)
    barrier = threading.Barrier(2, timeout=30)
    assert together.each(lambda i, client: (barrier.wait(), i)[1]) == [0, 1]
    with pytest.raises(ZeroDivisionError):
        together.each(lambda i, client: 1 // i)
    together.close()
