"""Addresses: what is one, and what the message says of what is none."""

import re

import pytest

from jdist.cluster.address import host_problem, join, problem, split


@pytest.mark.parametrize(
    "address", ["a:1", "a.b-c_d.example:65535", "10.0.0.1:2222", "[::1]:8080", "[fe80::1%eth0]:80", "_x.svc.:80"]
)
def test_addresses(address):
    assert problem(address) is None
    assert join(*split(address)) == address


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "both the host and the port"),
        ("host", "both the host and the port"),
        (":2222", "both the host and the port"),
        ("host:", "port from 1 to 65535"),
        ("host:0", "port from 1 to 65535"),
        ("host:65536", "port from 1 to 65535"),
        ("host:-1", "port from 1 to 65535"),
        ("host:2 2", "port from 1 to 65535"),
        ("host:٢٢", "port from 1 to 65535"),
        ("fe80::1:2222", "IPv6 address in brackets"),
        ("[fe80::zz]:2222", "no IPv6 address"),
        ("grpc://host:2222", r"Leave out .* \(grpc://\)"),
        ("host name:2222", "letters, digits, dots and hyphens"),
        ("hôte:2222", "letters, digits, dots and hyphens"),
        ("-host:2222", "letters, digits, dots and hyphens"),
        ("host\n:2222", "letters, digits, dots and hyphens"),
        ("[]:2222", "letters, digits, dots and hyphens"),
    ],
)
def test_what_is_no_address(address, message):
    assert re.search(message, problem(address) or "")


def test_a_host_alone():
    assert host_problem("n1") is None
    assert host_problem("fe80::1") is None
    assert host_problem("a b") is not None
