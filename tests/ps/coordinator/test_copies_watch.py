"""The watch over a shard's two copies: what it tells the coordinator, and when."""

import logging
import threading
import time

import pytest

from jdist.errors import ShardLostError
from jdist.ps.coordinator.shard_watch import CopiesWatch
from jdist.ps.protocol.times import Times
from jdist.ps.transport.interface import CallFailed, Method
from jdist.ps.transport.routed import two_copies
from tests.ps.coordinator.test_shard_watch import Hub
from tests.ps.fake_transport import FakeChannel, FakeServer
from tests.ps.real_cluster import wait_until


class Server:
    """Two copies that say of themselves what a coordinator wants to hear; `syncs` is whether a backup comes into step."""

    def __init__(self, address, *, syncs=True):
        self.syncs = syncs
        self.copies = [
            {
                "incarnation": f"{address}-{slot}",
                "term": 0,
                "leads": False,
                "in_sync": None,
                "generation": 0,
                "waiting_s": 0.0,
                "begun_by": "",
            }
            for slot in (0, 1)
        ]
        methods = {
            "status": self._status,
            "lead": self._lead,
            "reaches backup": lambda *_: ({"reached": self.reaches}, []),
        }
        self.reaches = True  # the other server
        self.fake = FakeServer(address, {name: Method(run) for name, run in methods.items()})

    def _status(self, header, arrays):
        return dict(self.copies[header["slot"]]), []

    def _lead(self, header, arrays):
        copy = self.copies[header["slot"]]
        if header["incarnation"] == copy["incarnation"] and header["term"] > copy["term"]:
            backup = header["backup"]
            in_sync = backup[2] if backup is not None and self.syncs else None
            copy.update(term=header["term"], leads=True, in_sync=in_sync)
        return dict(copy), []


@pytest.fixture
def watched():
    """Watches a shard of two servers; `(watch, hub, servers)`."""
    ended = []

    def start(*, syncs=True, ps_timeout_s=3600.0):
        hub, servers = Hub(), {a: Server(a, syncs=syncs) for a in ("a", "b")}
        (copies,) = two_copies(lambda address: FakeChannel(servers[address].fake), ["a"], ["a", "b"])
        hub.times = Times(ping_s=0.01, lost_after_s=0.2, ps_timeout_s=ps_timeout_s)
        watch = CopiesWatch(3, copies, hub)
        ended.append((hub, watch))
        watch.start()
        return watch, hub, servers, copies

    yield start
    for hub, watch in ended:
        hub.closed.set()
        watch.join(20)


def test_the_backup_of_a_lost_leader_leads(watched):
    watch, hub, servers, copies = watched()
    wait_until(lambda: watch._leadership.holds == ("a-0", "b-1"))
    servers["a"].fake.stop()
    wait_until(lambda: watch._leadership.confirmed and watch._leadership.leader == 1)
    assert (copies.channel.route.address, copies.channel.route.slot) == ("b", 1)
    assert (hub.lost, hub.errors) == ([], [])


def test_a_leader_that_does_not_reach_its_backup_goes_on_without_it_until_it_does(watched, caplog):
    watch, hub, servers, _ = watched()
    both = ("a-0", "b-1")
    wait_until(lambda: watch._leadership.holds == both)
    servers["a"].copies[0]["waiting_s"] = 60.0
    time.sleep(0.2)
    assert watch._leadership.holds == both  # the way is there: it computes
    servers["a"].reaches = servers["a"].syncs = False
    wait_until(lambda: watch._leadership.holds == ("a-0", None) and watch._leadership.confirmed)
    servers["a"].copies[0]["waiting_s"] = 0.0
    assert "the parameter servers a and b both answer, and the one does not reach the other: shard 3" in caplog.text
    assert "in step" not in caplog.text
    servers["a"].reaches = servers["a"].syncs = True
    servers["a"].copies[0]["in_sync"] = "b-1"
    wait_until(lambda: watch._leadership.holds == both)
    assert (hub.lost, hub.errors, watch._leadership.leader) == ([], [], 0)
    assert caplog.text.count("shard 3 has two copies in step again") == 1


def test_another_process_in_the_leaders_place_without_a_backup_has_lost_the_state(watched):
    watch, hub, servers, _ = watched(syncs=False)
    wait_until(lambda: watch._leadership.confirmed)
    servers["a"].copies[0] = {**servers["b"].copies[0], "incarnation": "new"}
    assert hub.told.wait(20)
    assert (hub.lost, hub.errors) == ([3], [])
    wait_until(lambda: watch._leadership.confirmed and watch._leadership.holds[0] == "new")


def test_silence_of_both_is_told_after_its_time(watched):
    watch, hub, servers, _ = watched(ps_timeout_s=0.3)
    wait_until(lambda: watch._leadership.confirmed)
    for server in servers.values():
        server.fake.stop()
    assert hub.told.wait(20)
    assert "and shard 3 has no other copy. Start it again, or give it more time" in hub.errors[0]


def test_a_shard_that_gets_no_backup_is_told_of_once(watched, caplog):
    with caplog.at_level(logging.WARNING):
        watch, hub, *_ = watched(syncs=False, ps_timeout_s=0.1)
        wait_until(lambda: watch._in_step_at is None)
    assert [r.getMessage() for r in caplog.records] == [
        "shard 3 has had no backup for 0 s: is one of a and b gone, or does one not reach the other?"
    ]
    assert hub.errors == []


@pytest.fixture
def copies():
    """A shard's copies on two servers: `(copies, servers)`."""
    servers = {address: Server(address).fake for address in ("a", "b")}
    (made,) = two_copies(lambda address: FakeChannel(servers[address]), ["a"], ["a", "b"])
    return made, servers


def test_both_copies_are_waited_for_at_the_start(copies):
    made, servers = copies
    for server in servers.values():
        server.stop()
    with pytest.raises(ShardLostError, match=r"neither a nor b answers, .*: unavailable"):
        made.statuses(0.2, give_up_s=0.3)
    timer = threading.Timer(0.3, servers["b"].resume)
    timer.start()
    assert [status and status["incarnation"] for status in made.statuses(0.2, give_up_s=20)] == [None, "b-1"]
    timer.join()


def test_copies_that_refuse_are_not_waited_for(copies, monkeypatch):
    made, _ = copies

    def refuse(*_, **__):
        raise CallFailed("a", "unauthenticated")

    monkeypatch.setattr(FakeChannel, "call", refuse)
    with pytest.raises(ShardLostError, match="unauthenticated"):
        made.statuses(0.2, give_up_s=3600)
