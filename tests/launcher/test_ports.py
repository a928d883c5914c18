import socket

import pytest

from jdist.launcher import environment as launch_ports
from jdist.launcher.environment import free_ports


def test_each_port_and_the_next_can_be_taken_by_all_at_once():
    ports = free_ports(10)
    taken = []
    try:
        for port in [*ports, *(port + 1 for port in ports)]:
            taken.append(socket.create_server(("127.0.0.1", port)))
    finally:
        for server in taken:
            server.close()
    assert len(taken) == 20


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_that_is_taken_or_whose_next_is(offset, monkeypatch):
    pair = free_ports(1)[0]
    monkeypatch.setattr(launch_ports, "_RANGE", range(pair, pair + 2, 2))
    assert free_ports(1) == [pair]
    with (
        socket.create_server(("127.0.0.1", pair + offset)),
        pytest.raises(OSError, match="only 0 of 1"),
    ):
        free_ports(1)
