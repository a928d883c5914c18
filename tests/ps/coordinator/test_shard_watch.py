"""The watch over a parameter server: what it tells the coordinator, and when."""

import threading

import pytest

from jdist.cluster import exit_status
from jdist.errors import NoWorkersError, ShardLostError
from jdist.ps.coordinator.shard_watch import ShardWatch
from jdist.ps.protocol.times import Times
from jdist.ps.transport.interface import CallFailed


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


class Client:
    """A shard that answers once, and then as `then` says."""

    def __init__(self, then):
        self.channel, self._then, self._asked = self, then, 0
        self.peer, self.is_back = "ps:2222", False

    def status(self, timeout_s=None):
        self._asked += 1
        if self._asked > 1 and isinstance(self._then, str) and not self.is_back:
            raise CallFailed(self.peer, self._then)
        incarnation = "first" if self._asked == 1 or self.is_back else "second"
        return {"incarnation": incarnation, "generation": 1, "begun_by": ""}


@pytest.fixture
def watch():
    """Watches a shard until the coordinator is told of something; the coordinator."""
    ended = []

    def start(then, ps_timeout_s):
        hub = Hub()
        hub.client, hub.times = Client(then), Times(ping_s=0.01, ps_timeout_s=ps_timeout_s)
        watching = ShardWatch(3, hub.client, hub)
        ended.append((hub, watching))
        watching.start()
        assert hub.told.wait(20)
        return hub

    yield start
    for hub, watching in ended:
        hub.closed.set()
        watching.join(20)


@pytest.mark.parametrize("error", [ShardLostError, NoWorkersError])
def test_a_program_that_it_ends_may_be_started_again(error):
    assert exit_status.of(error("gone")) == exit_status.PEER_LOST


def test_another_token_is_told_at_once(watch):
    hub = watch("unauthenticated", 3600)
    assert hub.errors == ["the parameter server ps:2222 refuses the token. Start it again with this job's."]


def test_silence_is_told_after_its_time(watch):
    (error,) = watch("unavailable", 0.02).errors
    assert error.startswith(
        "the parameter server ps:2222 has not answered for 0 s: unavailable. Start it again, or give it"
    )


def test_one_that_answers_again_is_found_and_has_lost_nothing(watch):
    hub = watch("unavailable", 0.02)
    hub.client.is_back = True
    assert hub.back.wait(20)
    assert (hub.found, hub.lost) == ([3], [])


def test_another_incarnation_has_lost_its_memory(watch):
    hub = watch(None, 3600)
    assert (hub.lost, hub.errors) == ([3], [])
