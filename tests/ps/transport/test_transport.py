"""Calls from one process to another, by the fake transport and over gRPC on loopback."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import trustme

from jdist.ps.protocol.wire import Spec, spec_of
from jdist.ps.transport import grpc_transport
from jdist.ps.transport.grpc_transport import RpcChannel, RpcServer, Security
from jdist.ps.transport.interface import CallFailed, FailedPrecondition, Method
from tests.ps.fake_transport import FakeChannel, FakeServer


def specs(header):
    return [Spec(tuple(shape), dtype) for shape, dtype in header.get("arrays", [])]


def described(arrays):
    return [[list(s.shape), s.dtype] for s in map(spec_of, arrays)]


def double(header, arrays):
    results = [2 * x for x in arrays]
    return {"arrays": described(results), "said": header.get("say")}, results


def fail(header, arrays):
    raise RuntimeError("a secret of this process")


def too_early(header):
    raise FailedPrecondition("a push to an empty shard")


METHODS = {"double": Method(double, specs), "fail": Method(fail), "push": Method(double, too_early)}


@pytest.fixture(params=["fake", "grpc"])
def connected(request):
    """`(make a channel to a server of METHODS, stop it)`."""
    if request.param == "fake":
        server = FakeServer("fake", METHODS)
        yield (lambda **_: FakeChannel(server)), server.stop
        return
    server = RpcServer("127.0.0.1:0", METHODS)
    channels = []

    def connect(**options):
        channels.append(RpcChannel(f"127.0.0.1:{server.port}", **options))
        return channels[-1]

    yield connect, server.stop
    for channel in channels:
        channel.close()
    server.stop()


@pytest.mark.parametrize("size", [0, 3, 1000, 3_000_000])
def test_arrays_go_there_and_come_back(connected, size):
    arrays = [np.arange(size, dtype=np.float32), np.int32(4).reshape(())]
    header, found = connected[0]().call(
        "double", {"arrays": described(arrays), "say": "hello"}, arrays, timeout_s=30, expects=specs
    )
    assert header["said"] == "hello"
    for a, b in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(a, 2 * b)


def test_many_calls_at_the_same_time(connected):
    channel, results = connected[0](), {}

    def one(i):
        _, (found,) = channel.call(
            "double", {"arrays": described([np.full(10, i)])}, [np.full(10, i)], timeout_s=30, expects=specs
        )
        results[i] = int(found[0])

    threads = [threading.Thread(target=one, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {i: 2 * i for i in range(20)}


def test_a_server_that_is_gone(connected):
    connect, stop = connected
    channel = connect()
    channel.call("double", {}, timeout_s=30)
    stop()
    with pytest.raises(CallFailed) as info:
        channel.call("double", {}, timeout_s=5)
    assert info.value.reason in ("unavailable", "deadline")


def test_a_channel_that_was_closed_says_so():
    server = RpcServer("127.0.0.1:0", METHODS)
    channel = RpcChannel(f"127.0.0.1:{server.port}")
    channel.close()
    for data in (False, True):
        with pytest.raises(CallFailed) as info:
            channel.call("double", {}, timeout_s=20, data=data)
        assert info.value.reason == "closed"
    server.stop()


@pytest.fixture
def server():
    server = RpcServer("127.0.0.1:0", METHODS, most_bytes=10_000)
    yield server
    server.stop()


def call(server, method, header, arrays=(), **options):
    channel = RpcChannel(f"127.0.0.1:{server.port}", **options)
    try:
        return channel.call(method, header, arrays, timeout_s=20, expects=specs)
    finally:
        channel.close()


def refused(server, method, header, arrays=(), **options):
    with pytest.raises(CallFailed) as info:
        call(server, method, header, arrays, **options)
    call(server, "double", {})  # it is still there
    return info.value


def test_what_is_wrong_with_a_call_is_refused_and_the_server_stays(server):
    assert refused(server, "nothing", {}).reason == "refused"
    x = np.zeros(4, np.float32)
    assert refused(server, "double", {"arrays": described([x])}, [x, x]).reason == "refused"
    assert refused(server, "double", {"arrays": described([x, x])}, [x]).reason == "refused"
    assert refused(server, "double", {"arrays": [[[10**12], "float32"]]}).reason == "refused"
    assert refused(server, "double", {"arrays": [[[1], "object"]]}).reason == "refused"


@pytest.mark.parametrize("data", [False, True])
def test_what_only_comes_too_early_is_refused_without_a_warning(server, caplog, data):
    caplog.set_level(logging.INFO)
    channel = RpcChannel(f"127.0.0.1:{server.port}")
    x = np.zeros(1000, np.float32)
    with pytest.raises(CallFailed, match="refused"):
        channel.call("push", {"arrays": described([x])}, [x], timeout_s=20, data=data)
    channel.close()
    (told,) = [r for r in caplog.records if "refused a call" in r.message]
    assert (told.levelname, told.message) == ("INFO", "refused a call: a push to an empty shard")


def test_an_error_of_the_server_tells_the_caller_nothing(server, caplog):
    error = refused(server, "fail", {})
    assert (error.reason, "secret" in str(error)) == ("refused", False)
    assert "a secret of this process" in caplog.text


def test_garbage_does_not_end_a_server(server):
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            connection.sendall(garbage)
    call(server, "double", {})


CALLER = """
import sys
from jdist.ps.transport.grpc_transport import RpcChannel
channel = RpcChannel(sys.argv[1])
channel.call("double", {}, timeout_s=20)
print("called", flush=True)
sys.stdin.read()
"""


def test_a_caller_that_has_gone_without_a_word_keeps_no_connection(monkeypatch):
    quick = {"grpc.keepalive_time_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    monkeypatch.setattr(grpc_transport, "_SERVER_OPTIONS", list((dict(grpc_transport._SERVER_OPTIONS) | quick).items()))
    server = RpcServer("127.0.0.1:0", METHODS)
    command = [sys.executable, "-c", CALLER, f"127.0.0.1:{server.port}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as caller:
        try:
            assert caller.stdout.readline() == "called\n"
            time.sleep(2)
            assert callers_of(server.port) == 1  # it has nothing to say, and answers
            caller.send_signal(signal.SIGSTOP)
            end = time.monotonic() + 20
            while callers_of(server.port) and time.monotonic() < end:
                time.sleep(0.1)
            assert callers_of(server.port) == 0
        finally:
            caller.kill()
            server.stop()


def callers_of(port):
    """How many connections this process has accepted at a port of loopback."""
    mine = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            mine.add(os.readlink(fd))
    found = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            found += local.endswith(f":{port:04X}") and state == "01" and f"socket:[{inode}]" in mine
    return found


def test_a_taken_port_is_an_error(server):
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.port}: the port is taken"):
        RpcServer(f"127.0.0.1:{server.port}", METHODS)


@pytest.mark.parametrize("token", [None, "wrong", ""])
def test_a_call_without_the_token_is_refused(token):
    server = RpcServer("127.0.0.1:0", METHODS, security=Security(token="right"))
    try:
        with pytest.raises(CallFailed) as info:
            call(server, "double", {}, security=Security(token=token))
        assert info.value.reason == "unauthenticated"
        call(server, "double", {}, security=Security(token="right"))
    finally:
        server.stop()


def certified(authority, name):
    issued = authority.issue_cert(name)
    return {
        "certificate": b"".join(blob.bytes() for blob in issued.cert_chain_pems),
        "key": issued.private_key_pem.bytes(),
        "authority": authority.cert_pem.bytes(),
    }


def test_both_sides_show_a_certificate_of_one_authority():
    authority, stranger = trustme.CA(), trustme.CA()
    server = RpcServer("127.0.0.1:0", METHODS, security=Security(token="t", **certified(authority, "ps.job")))
    try:
        right = Security(token="t", name="ps.job", **certified(authority, "worker.job"))
        x = np.ones(10, np.float32)
        assert call(server, "double", {"arrays": described([x])}, [x], security=right)[1][0].sum() == 20
        own = certified(stranger, "worker.job")
        for wrong in (
            Security(token="t"),
            Security(token="t", name="ps.job", **own),
            Security(token="t", name="ps.job", **{**own, "authority": authority.cert_pem.bytes()}),
        ):
            with pytest.raises(CallFailed) as info:
                call(server, "double", {}, security=wrong)
            assert info.value.reason in ("unavailable", "deadline")
    finally:
        server.stop()


class TestFaults:
    def test_a_call_or_its_answer_is_lost_or_it_comes_twice(self):
        done = []
        server = FakeServer("fake", {"count": Method(lambda header, arrays: (done.append(1) or {}, []))})
        for fault, times in (("lose the call", 0), ("lose the answer", 1), ("twice", 2), (None, 1)):
            done.clear()
            channel = FakeChannel(server, fault=lambda method, header, fault=fault: fault)
            if fault in ("twice", None):
                channel.call("count", {}, timeout_s=1)
            else:
                with pytest.raises(CallFailed):
                    channel.call("count", {}, timeout_s=1)
            assert len(done) == times
