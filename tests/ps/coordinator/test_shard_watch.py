"""The watch over a shard's copies: what it tells the coordinator, and when."""

import logging
import re
import threading
import time

import pytest

from jdist.cluster import exit_status
from jdist.errors import NoWorkersError, ShardLostError
from jdist.ps.coordinator.shard_watch import ShardWatch
from jdist.ps.protocol.times import Times
from jdist.ps.transport.interface import CallFailed, Method
from jdist.ps.transport.routed import place_copies
from tests.ps.fake_transport import FakeChannel, FakeServer
from tests.ps.real_cluster import wait_until


class Hub:
    """What a watch needs of the coordinator; `told` is set once it hears of an error or of a loss."""

    def __init__(self):
        self.closed = threading.Event()
        self.errors, self.lost, self.told = [], [], threading.Event()
        self.found, self.back, self.silent = [], threading.Event(), {}

    def shard_lost(self, shard, error):
        self.errors.append(str(error))
        self.told.set()

    def shard_found(self, shard):
        self.found.append(shard)
        self.back.set()

    def heard_of(self, generation, begun_by):
        pass

    def memory_lost(self, shard):
        self.lost.append(shard)
        self.told.set()


class Server:
    """Two copies that say of themselves what a coordinator wants to hear; `syncs` is whether a backup comes into step."""

    def __init__(self, address, *, syncs=True):
        self.address, self.syncs = address, syncs
        self.fails = None  # the reason for which calls do
        self.copies = [
            {
                "incarnation": f"{address}-{slot}",
                "term": 0,
                "leads": False,
                "backup": None,
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
        if self.fails is not None:
            raise CallFailed(self.address, self.fails)
        return dict(self.copies[header["slot"]]), []

    def _lead(self, header, arrays):
        copy = self.copies[header["slot"]]
        if header["incarnation"] == copy["incarnation"] and header["term"] > copy["term"]:
            backup = header["backup"]
            backup = None if backup is None else backup[2]
            copy.update(term=header["term"], leads=True, backup=backup, in_sync=backup if self.syncs else None)
        return dict(copy), []


def of_servers(servers, replicas):
    """The shard's copies, of which the first is on server a."""
    return place_copies(lambda address: FakeChannel(servers[address].fake), ["a"], ["a", "b"], replicas=replicas)[0]


@pytest.fixture
def watched():
    """Watches a shard of one or two servers; `(watch, hub, servers, copies)`."""
    ended = []

    def start(*, replicas=2, syncs=True, ps_timeout_s=3600.0):
        hub, servers = Hub(), {a: Server(a, syncs=syncs) for a in ("a", "b")}
        copies = of_servers(servers, replicas)
        hub.times = Times(ping_s=0.01, lost_after_s=0.2, ps_timeout_s=ps_timeout_s)
        watch = ShardWatch(3, copies, hub)
        ended.append((hub, watch))
        watch.start(copies.statuses(hub.times.lost_after_s, give_up_s=ps_timeout_s))
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
    assert "the parameter servers a and b both answer, but the first does not reach the second: shard 3" in caplog.text
    assert "in step" not in caplog.text
    servers["a"].reaches = servers["a"].syncs = True
    servers["a"].copies[0]["in_sync"] = "b-1"
    wait_until(lambda: watch._leadership.holds == both)
    assert (hub.lost, hub.errors, watch._leadership.leader) == ([], [], 0)
    assert caplog.text.count("shard 3 has two copies in step again") == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_another_process_in_the_leaders_place_without_a_backup_has_lost_the_state(watched, replicas):
    watch, hub, servers, _ = watched(replicas=replicas, syncs=False)
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
        wait_until(lambda: watch._in_step_at is None and caplog.records)
    assert [r.getMessage() for r in caplog.records] == [
        "shard 3 has had no backup for 0 s: is one of a and b gone, or does one not reach the other?"
    ]
    assert hub.errors == []


@pytest.mark.parametrize(
    ("fails", "ps_timeout_s", "told"),
    [
        ("unauthenticated", 3600.0, r"refuses the token\. Start it again with this job's\."),
        ("unavailable", 0.02, r"has not answered for 0 s: unavailable\. Start it again, or give it more time: .*"),
    ],
)
def test_one_without_another_copy_is_told_of_and_has_lost_nothing_when_it_answers_again(
    watched, fails, ps_timeout_s, told
):
    _, hub, servers, _ = watched(replicas=1, ps_timeout_s=ps_timeout_s)
    servers["a"].fails = fails
    assert hub.told.wait(20)
    assert re.fullmatch(rf"the parameter server a {told}", hub.errors[0])
    servers["a"].fails = None
    assert hub.back.wait(20)
    assert (hub.found, hub.lost) == ([3], [])


def test_the_end_cuts_short_a_question_under_way(caplog):
    hub, server, cut, is_watching, asked = Hub(), Server("a"), [], threading.Event(), threading.Event()
    hub.times = Times(ping_s=0.01, lost_after_s=0.2)

    class Silent(FakeChannel):
        """Once there is a watch, a question ends with its channel only."""

        def __init__(self):
            super().__init__(server.fake)
            self.ended = threading.Event()

        def begin(self, method, *given, **options):
            def wait():
                asked.set()
                cut.append(self.ended.wait(10))
                raise CallFailed("a", "closed")

            return wait if is_watching.is_set() and method == "status" else super().begin(method, *given, **options)

        def close(self):
            self.ended.set()

    copies = place_copies(lambda address: Silent(), ["a"], ["a"], replicas=1)[0]
    watch, statuses = ShardWatch(3, copies, hub), copies.statuses(20, give_up_s=20)
    is_watching.set()
    watch.start(statuses)
    assert asked.wait(20)
    hub.closed.set()
    watch.join(20)
    assert (cut, caplog.text) == ([True], "")


@pytest.mark.parametrize("error", [ShardLostError, NoWorkersError])
def test_a_program_that_it_ends_may_be_started_again(error):
    assert exit_status.of(error("gone")) == exit_status.PEER_LOST


def test_copies_are_waited_for_at_the_start_unless_they_refuse():
    servers = {a: Server(a) for a in ("a", "b")}
    copies = of_servers(servers, 2)
    for server in servers.values():
        server.fake.stop()
    with pytest.raises(ShardLostError, match="no answer from the parameter server a or b: unavailable"):
        copies.statuses(0.2, give_up_s=0.3)
    timer = threading.Timer(0.3, servers["b"].fake.resume)
    timer.start()
    assert [status and status["incarnation"] for status in copies.statuses(0.2, give_up_s=20)] == [None, "b-1"]
    timer.join()
    servers["a"].fake.resume()
    servers["a"].fails = servers["b"].fails = "unauthenticated"
    with pytest.raises(ShardLostError, match="no answer from the parameter server a or b: unauthenticated"):
        copies.statuses(0.2, give_up_s=3600)
