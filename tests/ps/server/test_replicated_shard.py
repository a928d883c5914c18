"""Two copies of a shard over the fake transport: both have the same state, whatever happens on the way."""

import errno
import random
import threading

import numpy as np
import pytest

from jdist.errors import ShardLostError, WireError
from jdist.ps.protocol.messages import Commit, Done, Fence, Parameters, Pull, Snapshot
from jdist.ps.protocol.replica_role import Role
from jdist.ps.protocol.wire import to_plain
from jdist.ps.server import replicated_shard, shard_server
from jdist.ps.server.replicated_shard import ReplicatedShard, slots
from jdist.ps.server.shard_transfer import ShardState, expected, pack_shard, unpack_shard
from jdist.ps.transport.interface import OutOfFilesError
from jdist.ps.transport.routed import Route, place_copies
from jdist.ps.transport.shard_client import ShardClient
from tests.ps.fake_transport import FakeChannel, FakeServer
from tests.ps.server.test_shard_server import Job, push


class Pair(Job):
    """A state of one shard, with a copy on each of two servers; calls between them meet `fault`."""

    def __init__(self, fault=lambda method, header: None, **rules):
        super().__init__(1, **rules)
        self.fault = fault
        self.copies = [[ReplicatedShard(self.connect) for _ in range(2)] for _ in range(2)]
        self.servers = {f"ps{i}": FakeServer(f"ps{i}", slots(c)) for i, c in enumerate(self.copies)}
        (self.found,) = place_copies(lambda a: FakeChannel(self.servers[a]), ["ps0"], ["ps0", "ps1"], replicas=2)
        (self.plan,) = self.layout.shards
        self.clients = [ShardClient(self.found.channel, self.plan, give_up_s=5)]

    def connect(self, address):
        return FakeChannel(self.servers[address], fault=lambda method, header: self.fault(method, header))

    @property
    def both(self):
        """The first server's shard, and its backup on the second."""
        return self.copies[0][0], self.copies[1][1]

    def lead(self, copy, term, *, backup):
        """Has a copy lead; what it says of itself."""
        address, slot = self.found.places[1 - copy]
        told = [address, slot, self.both[1 - copy].incarnation] if backup else None
        said = {"term": term, "incarnation": self.both[copy].incarnation, "backup": told}
        header, _ = self.found.connected(copy).call("lead", said, timeout_s=5)
        if header["leads"]:
            self.found.channel.move(self.found.route(copy, term))
        return header

    def until_in_sync(self, copy):
        leader = self.both[copy]
        with leader.lock:
            assert leader.lock.wait_for(lambda: leader._role.backup == "in_sync", 20)

    def begun(self):
        """The first copy leads, the second is its backup, and both have the state."""
        self.lead(0, 1, backup=True)
        self.restore()
        self.until_in_sync(0)
        return self

    def close(self):
        for copies in self.copies:
            for copy in copies:
                copy.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def same(a, b, *, but=()):
    """Whether two copies have the same state, down to the bit."""
    for name in ("generation", "version", "fences", "settled", "frozen"):
        if name not in but:
            assert getattr(a.shard, name) == getattr(b.shard, name), name
    assert [*a.shard.staged] == [*b.shard.staged]
    assert [*a.shard.applied] == [*b.shard.applied]
    for x, y in zip(a._kept, b._kept, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    assert sorted(map(str, a._held.values())) == sorted(map(str, b._held.values()))


def test_what_is_acknowledged_the_backup_holds():
    with Pair().begun() as pair:
        share = pair.computed()[0]
        for closure in range(3):
            (done, pulled), _ = pair.clients[0].say(
                [push(closure=closure, base=closure), Pull(generation=1, known=closure)], share, b"result"
            )
            assert (done, pulled) == (Done(version=closure + 1), Parameters(version=closure + 1, changed=True))
            same(*pair.both)
        header, _ = pair.found.connected(0).call("status", {}, timeout_s=5)
        assert (header["leads"], header["in_sync"]) == (True, pair.both[1].incarnation)


@pytest.mark.parametrize("then", ["begun anew", "led by another", "led by another for a while"])
def test_what_the_backup_does_not_hold_is_not_acknowledged_by_a_leader_that_lost_it(then):
    """As one does whose update fails half-way, for lack of files, while another's answer waits for the backup."""
    held = threading.Event()

    def fault(method, header):
        if method == "forward":
            held.wait(20)
            return "lose the call"
        return None

    with Pair(fault).begun() as pair:
        leader, backup = pair.both
        share, answers = pair.computed()[0], []

        def say():
            header = {"say": [to_plain(push(closure=0, base=0))], "result": 0}
            answers.append(leader.methods()["say"].run(header, [*share, np.zeros(0, np.uint8)])[0])

        caller = threading.Thread(target=say)
        caller.start()
        with leader.lock:
            assert leader.lock.wait_for(lambda: leader.shard.version == 1, 20)
            term = leader._role.term
            if then == "begun anew":
                leader._reset()
            else:
                leader._depose(term + 1)
            if then == "led by another for a while":
                leader._role = Role(term=term + 2, name="leads")
        caller.join(20)
        held.set()
        assert [list(answer) for answer in answers] == [["moved"]]
        assert backup.shard.version == 0


def push_twelve(pair, *, wait=False):
    """Pushes closures, stages others and commits some; both copies have all that, at once unless `wait` is true."""
    share = pair.computed()[0]
    for closure in range(12):
        pair.clients[0].say([push(closure=closure, stage=bool(closure % 2), base=0)], share, b"r")
    pair.clients[0].say([Commit(generation=1, worker=0, epoch=1, closures=(1, 3, 5), settled=1)])
    pair.clients[0].say([Fence(generation=1, fenced=1, below=7)])
    if wait:
        pair.until_in_sync(0)
    same(*pair.both)
    assert (pair.both[1].shard.version, len(pair.both[1].shard.staged)) == (9, 3)


def test_faults_between_the_copies_change_nothing():
    randomness, lock = random.Random(3), threading.Lock()

    def fault(method, header):
        with lock:
            return randomness.choice(["lose the call", "lose the answer", "twice", None, None])

    with Pair(fault).begun() as pair:
        push_twelve(pair)


@pytest.mark.parametrize("seed", range(4))
def test_copies_without_file_descriptors_for_a_while_miss_nothing_and_do_nothing_twice(monkeypatch, seed):
    """Neither the leader, nor its backup while it is sent the state or an entry."""
    randomness, lock = random.Random(seed), threading.Lock()
    exhausted = []

    def check_files():
        with lock:
            if randomness.random() < 0.3:
                exhausted.append(None)
                raise OutOfFilesError(errno.EMFILE, "no file descriptor left")

    with Pair() as pair:
        pair.lead(0, 1, backup=True)
        pair.restore()
        pair.clients = [ShardClient(pair.found.channel, pair.plan, give_up_s=120)]
        for module in (shard_server, replicated_shard):
            monkeypatch.setattr(module, "check_files", check_files)
        push_twelve(pair, wait=True)
    assert len(exhausted) > 3


def test_a_copy_that_cannot_be_taken_over_whole_is_not_one(monkeypatch):
    """What was there before is gone by then, so that no entry may go on from it."""
    with Pair().begun() as pair:
        share = pair.computed()[0]
        leader, backup = pair.both
        put, tried = shard_server.ShardServer._put, threading.Event()

        def half(self, *state):
            if self is backup:
                tried.set()
                raise RuntimeError("out of memory")
            put(self, *state)

        monkeypatch.setattr(shard_server.ShardServer, "_put", half)
        pair.lead(0, 2, backup=True)
        pair.clients[0].say([push(closure=0, base=0)], share)
        assert tried.wait(20)
        assert not backup._role.complete
        monkeypatch.setattr(shard_server.ShardServer, "_put", put)
        pair.until_in_sync(0)
        same(leader, backup)


def test_a_backup_takes_the_place_and_the_old_leader_acknowledges_nothing():
    with Pair().begun() as pair:
        share = pair.computed()[0]
        pair.clients[0].say([push(closure=0, base=0)], share)
        old = ShardClient(pair.found.channel, pair.plan, give_up_s=0.3)  # asks whoever leads
        slept = pair.found.connected(0)
        assert pair.lead(1, 2, backup=False)["leads"]
        (answer,), _ = pair.clients[0].say([push(closure=0, base=0)], share)  # acknowledged again
        assert answer == Done(version=1)
        told = pair.both[0].methods()["say"]
        header = {"say": [to_plain(push(closure=1, base=1))], "result": 0}
        answer, _ = told.run(header, [*share, np.zeros(0, np.uint8)])  # it has not heard of it
        assert answer == {"moved": 2}
        assert pair.both[0]._role.name == "follows"
        assert pair.both[1].shard.version == 1
        assert slept.call("read", {}, timeout_s=5) == ({"moved": 2}, [])
        old.say([push(closure=1, base=1)], share)
        assert pair.lead(1, 3, backup=True)["leads"]
        pair.until_in_sync(1)
        same(*pair.both)
        old.say([push(closure=2, base=2)], share)
        same(*pair.both)


def test_a_copy_that_comes_back_gets_what_is_staged_applied_and_returned():
    with Pair().begun() as pair:
        pair.lead(0, 2, backup=False)
        share = pair.computed()[0]
        pair.clients[0].say([push(closure=0, base=0)], share, b"zero")
        pair.clients[0].say([push(stage=True, closure=1, base=0)], share, b"one")
        pair.copies[1][1] = ReplicatedShard(pair.connect)
        pair.servers["ps1"]._methods = slots(pair.copies[1])
        pair.lead(0, 3, backup=True)
        pair.until_in_sync(0)
        same(*pair.both)
        pair.lead(1, 4, backup=False)
        (held,), _ = pair.clients[0].say([Fence(generation=1, fenced=0, below=2)])
        assert sorted(held.results) == [(0, b"zero"), (1, b"one")]
        pair.clients[0].say([Commit(generation=1, closures=(1,))])
        assert pair.both[1].shard.version == 2


def test_a_frozen_shard_and_what_waits_there_move_along():
    with Pair().begun() as pair:
        client, share, answers = pair.clients[0], pair.computed()[0], []
        client.say([Snapshot(phase="freeze", generation=1)])
        waiting = threading.Thread(target=lambda: answers.extend(client.say([push(base=0)], share)[0]))
        waiting.start()
        leader, backup = pair.both
        with backup.lock:
            assert backup.lock.wait_for(lambda: len(backup.shard.waiting) == 1, 20)
        pair.lead(1, 2, backup=False)
        with leader.lock:
            leader._depose(2)
        client.say([Snapshot(phase="thaw", generation=1)])
        waiting.join(20)
        assert answers == [Done(version=1)]
        assert backup.shard.version == 1


def test_a_restore_goes_to_the_backup():
    with Pair().begun() as pair:
        pair.clients[0].say([push(closure=0, base=0)], pair.computed()[0])
        pair.leaves = [x + np.ones_like(x) for x in pair.leaves]
        pair.restore(generation=2)
        pair.clients[0].say([Pull(generation=2)])
        same(*pair.both)
        assert (pair.both[1].shard.generation, pair.both[1].shard.version) == (2, 0)


def test_another_process_in_a_place_takes_nothing_that_was_meant_for_the_first():
    with Pair().begun() as pair:
        header, _ = pair.found.connected(1).call(
            "lead", {"term": 9, "incarnation": "another", "backup": None}, timeout_s=5
        )
        assert (header["leads"], header["term"]) == (False, 1)
        sent, arrays = pack_shard(ShardState(shard=pair.both[0].shard))
        said = {**sent, "term": 9, "number": 1, "to": "another"}
        header, _ = pair.found.connected(1).call("install", said, arrays, timeout_s=5)
        assert header == {"took": "stranger", "term": 1}


def test_before_a_copy_leads_it_answers_nobody_and_it_may_lead_without_a_backup():
    with Pair() as pair:
        with pytest.raises(ShardLostError, match="moved"):
            ShardClient(pair.found.channel, pair.plan, give_up_s=0.2).say([Pull(generation=1)])
        assert pair.lead(0, 1, backup=False)["leads"]
        pair.restore()
        (answer,), _ = pair.clients[0].say([push(base=0)], pair.computed()[0])
        assert answer == Done(version=1)


def test_a_state_that_travels_is_checked():
    with Pair().begun() as pair:
        pair.clients[0].say([push(stage=True, closure=0, base=0)], pair.computed()[0], b"r")
        with pair.both[0].lock:
            _, state = pair.both[0]._state()
        header, arrays = pack_shard(state)
        assert [(s.shape, s.dtype) for s in expected(header)] == [
            (x.shape, str(x.dtype)) for x in map(np.asarray, arrays)
        ]
        again = unpack_shard(header, arrays)
        assert pack_shard(again)[0] == header
        with pytest.raises(WireError):
            expected({"whole": None})
        plain = header["whole"]
        waiting = {**plain["shard"], "waiting": [to_plain(push(closure=1, base=0))]}
        for name, value in (
            ("plan", None),
            ("plan", {"is": "PackedShard"}),
            ("programs", [-1]),
            ("held", [[1, 0, 1]]),  # a closure that is not there
            ("held", [[0, 5, 1]]),
            ("held", [[0, -1, 1 << 40]]),
            ("shard", waiting),
            ("shard", {**plain["shard"], "staged": [[0]]}),
        ):
            with pytest.raises(WireError):
                expected({"whole": {**plain, name: value}})


def test_a_route_only_moves_forward():
    with Pair() as pair:
        channel = pair.found.channel
        assert not channel.move(Route(address="ps0", slot=0, term=3))  # the same place
        assert channel.move(Route(address="ps1", slot=1, term=4))
        assert not channel.move(Route(address="ps0", slot=0, term=4))
        assert (channel.peer, channel.route.term) == ("ps1", 4)
