"""The connections of a collective are found by their ports, and only these are shut down."""

import os
import socket

import pytest

from jdist.cluster.worlds import rebuild


def pair(host="127.0.0.1"):
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        port = server.getsockname()[1]
        assert port in rebuild.listening_ports()
        client = socket.create_connection((host, port))
        accepted, _ = server.accept()
    return port, client, accepted


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_connections_of_these_ports_are_shut_down(host):
    port, client, accepted = pair(host)
    other_port, other, other_accepted = pair(host)
    before = len(os.listdir("/proc/self/fd"))
    with client, accepted, other, other_accepted:
        assert port not in rebuild.listening_ports()
        assert rebuild.break_connections(frozenset({port})) == 2
        assert client.recv(1) == accepted.recv(1) == b""
        other.sendall(b"x")
        assert other_accepted.recv(1) == b"x"
        assert rebuild.break_connections(frozenset()) == 0
        assert len(os.listdir("/proc/self/fd")) == before
    assert port != other_port
