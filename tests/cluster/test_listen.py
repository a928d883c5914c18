"""Where process 0 listens, and how others come to it."""

import contextlib
import socket

import pytest

from jdist.cluster import exit_codes
from jdist.cluster.listen import check_free, listen
from jdist.cluster.watch.place import Place, connect
from jdist.errors import ClusterError, ClusterTimeoutError, PortInUseError


@pytest.fixture
def taken():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("take", [listen, check_free])
def test_a_port_that_is_taken_may_be_free_at_the_next_attempt(take, taken):
    with pytest.raises(PortInUseError, match=f"cannot listen on 127.0.0.1:{taken}") as info:
        take("127.0.0.1", taken)
    assert exit_codes.of(info.value) == exit_codes.PEER_LOST


@pytest.mark.parametrize("take", [listen, check_free])
def test_an_address_of_another_machine_stays_so(take):
    with pytest.raises(ClusterError, match=r"cannot listen on 192\.0\.2\.1:2222") as info:
        take("192.0.2.1", 2222)
    assert exit_codes.of(info.value) == exit_codes.USAGE


def test_who_waits_for_process_0_says_so(monkeypatch, capsys, taken):
    monkeypatch.setattr("jdist.cluster.watch.place._QUIET_S", 0.1)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        free = server.getsockname()[1]
    place = Place(process=1, addresses=(None, None), host="127.0.0.1", port=free, token="")
    with pytest.raises(ClusterTimeoutError, match="did not reach process 0"):
        connect(place, 1.0)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"jdist: process 1 waits for process 0 at 127.0.0.1:{free}, up to 1 s (")
