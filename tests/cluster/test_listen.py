"""Where process 0 listens, and how others come to it."""

import contextlib
import socket

import pytest

from jdist.cluster import exit_status
from jdist.cluster.listen import check_free, check_reachable, listen
from jdist.cluster.watch.client import connect
from jdist.errors import ClusterError, ClusterTimeoutError, PortInUseError
from tests.cluster.watch.test_watch import of_two


@pytest.fixture
def taken():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("take", [listen, check_free])
def test_a_port_that_is_taken_may_be_free_at_the_next_attempt(take, taken):
    with pytest.raises(PortInUseError, match=f"cannot listen on 127.0.0.1:{taken}") as info:
        take("127.0.0.1", taken)
    assert exit_status.of(info.value) == exit_status.PEER_LOST


@pytest.mark.parametrize("take", [listen, check_free])
def test_an_address_of_another_machine_stays_so(take):
    with pytest.raises(
        ClusterError, match=r"cannot listen on 192\.0\.2\.1:2222.*must be one of its own machine"
    ) as info:
        take("192.0.2.1", 2222)
    assert exit_status.of(info.value) == exit_status.USAGE


@pytest.mark.parametrize(
    ("host", "numeric", "processes"),
    [
        ("node1", "10.0.0.4", ("node1:1", "node2:1")),
        ("node1", "127.0.1.1", ("node1:1", "node1:3")),  # all on this machine
        ("localhost", "127.0.0.1", ("localhost:1", None)),
        ("127.0.0.1", "127.0.0.1", ("127.0.0.1:1", "node2:1")),  # written so
        ("node1", "::2", ("node1:1", None)),
    ],
)
def test_a_name_that_others_reach(host, numeric, processes):
    assert check_reachable(host, numeric, processes) is None


@pytest.mark.parametrize("numeric", ["127.0.1.1", "127.0.0.1", "::1"])
def test_a_name_that_leads_back_to_its_own_machine_is_named(numeric):
    with pytest.raises(ClusterError, match=rf"name 'node1' of process 0 is {numeric}, where no other .* /etc/hosts"):
        check_reachable("node1", numeric, ("node1:1", "node2:1"))
    assert f"is {numeric}" in check_reachable("node1", numeric, ("node1:1", None))


def test_who_waits_for_process_0_says_so(monkeypatch, capsys, taken):
    monkeypatch.setattr("jdist.cluster.watch.client._QUIET_S", 0.1)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        free = server.getsockname()[1]
    with pytest.raises(ClusterTimeoutError, match="did not reach process 0"):
        connect(of_two(free), 1.0)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"jdist: process 1 waits for process 0 at 127.0.0.1:{free}, up to 1 s (")
