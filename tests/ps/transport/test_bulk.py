"""Data connections: who gets one, what is refused, what happens where there is none."""

import contextlib
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme

from jdist.errors import WireError
from jdist.ps.protocol.wire import Spec, encode
from jdist.ps.transport import bulk, health
from jdist.ps.transport.bulk import BulkServer
from jdist.ps.transport.grpc_transport import RpcChannel, RpcServer
from jdist.ps.transport.interface import CallFailed, Method
from jdist.ps.transport.security import Security
from jdist.ps.transport.stream import Stream
from tests.ps.transport.test_transport import METHODS, certified, described, specs

X = np.arange(600_000, dtype=np.float32)  # more than goes with a header
SPECS = [Spec((600_000,), "float32")]


def doubled(channel, x=X, timeout_s=20):
    _, (found,) = channel.call("double", {"arrays": described([x])}, [x], timeout_s=timeout_s, expects=specs, bulk=True)
    np.testing.assert_array_equal(found, 2 * x)


@pytest.fixture(params=["unix", "tcp"])
def serving(request):
    """Makes servers and channels to them, as on one machine and on two; ends them."""
    made = []

    def serve(*, methods=METHODS, theirs=None, port=0, **options):
        server = RpcServer(f"127.0.0.1:{port}", methods, **options)
        if request.param == "tcp":
            server._data.name = ""
        channel = RpcChannel(f"127.0.0.1:{server.port}", security=theirs or options.get("security") or Security())
        made.extend([channel.close, server.stop])
        return server, channel

    yield serve
    for end in made:
        end()


def test_large_arrays_go_over_one_connection_again_and_again(serving):
    server, channel = serving()
    for _ in range(3):
        doubled(channel)
    assert len(server._data._streams) == 1


def test_calls_at_the_same_time_have_connections_of_their_own(serving):
    server, channel = serving()
    waits = [
        channel.begin("double", {"arrays": described([X + i])}, [X + i], timeout_s=20, expects=specs) for i in range(3)
    ]
    for i, wait in reversed(list(enumerate(waits))):
        np.testing.assert_array_equal(wait()[1][0], 2 * (X + i))
    assert len(server._data._streams) == 3


@pytest.mark.parametrize("limited", [True, False])
def test_of_a_limited_method_two_large_calls_are_under_way_at_once(serving, limited):
    inside, most, lock, third = [], [], threading.Lock(), threading.Event()

    def run(header, arrays):
        with lock:
            inside.append(header["i"])
            most.append(len(inside))
        third.wait(0.5)  # long enough for a third to come in, if it may
        with lock:
            inside.remove(header["i"])
        return {}, []

    _, channel = serving(methods={"slow": Method(run, specs, limited=limited)})
    with ThreadPoolExecutor(5) as pool:
        called = [
            pool.submit(channel.call, "slow", {"i": i, "arrays": described([X])}, [X], timeout_s=20, bulk=True)
            for i in range(5)
        ]
        for each in called:
            each.result(60)
    assert len(most) == 5
    assert (max(most) <= bulk.MOST_LARGE) is limited


def test_a_port_that_cannot_be_reached_is_said_and_gone_round(serving, caplog):
    server, channel = serving()
    server._data._listener.close()
    server._data.name = ""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()[1]
    server._data.port = closed
    doubled(channel)
    assert f"no data connection to port {closed}" in caplog.text
    assert channel.call("double", {"say": "it"}, timeout_s=20, data=True) == ({"arrays": [], "said": "it"}, [])


def test_a_ticket_that_is_refused_is_said_and_gone_round(serving, caplog):
    server, channel = serving()
    server._methods["data connection"] = Method(lambda header, arrays: 1 / 0)
    for _ in range(2):
        doubled(channel)
    assert caplog.text.count("no data connection, gRPC is slower: ") == 1


_FULL = """
import resource, sys
from tests.ps.transport.test_transport import METHODS
from jdist.ps.transport.grpc_transport import RpcServer

server = RpcServer("127.0.0.1:0", METHODS)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(server.port, server._data.port, flush=True)
for line in sys.stdin:
    full = line == "full\\n"
    resource.setrlimit(resource.RLIMIT_NOFILE, (3 if full else soft, hard))
    print(len(server._data._streams), flush=True)
server.stop()
"""


def test_a_server_without_a_file_left_accepts_again_when_there_is_one():
    root = Path(__file__).parents[3]
    child = subprocess.Popen([sys.executable, "-c", _FULL], cwd=root, stdin=-1, stdout=-1, stderr=-1, text=True)
    try:
        port, data_port = map(int, child.stdout.readline().split())
        channel = RpcChannel(f"127.0.0.1:{port}")
        asked = grpc.insecure_channel(f"127.0.0.1:{port}")
        check = asked.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=20) == health.SERVING

        def fails(*, bulk=False):
            with pytest.raises(CallFailed) as info:
                channel.call("fail", {}, timeout_s=20, bulk=bulk)
            return info.value

        assert fails().reason == "refused"

        def tell(word):
            child.stdin.write(f"{word}\n")
            child.stdin.flush()
            return int(child.stdout.readline())

        def waits_for(answer):
            by = time.monotonic() + 30
            while check(b"", timeout=20) != answer:
                assert time.monotonic() < by
                time.sleep(0.05)

        assert tell("full") == 0
        with socket.create_connection(("127.0.0.1", data_port), timeout=20):
            waits_for(health.NOT_SERVING)
            assert "no file descriptor left; raise its limit, `ulimit -n`" in str(fails())
            assert tell("free") == 0
            waits_for(health.SERVING)
        doubled(channel)
        assert tell("free") == 1  # over a data connection
        for full, reason in (("full", "exhausted"), ("free", "refused")):
            tell("free")
            doubled(channel)  # it has a connection
            tell(full)
            assert fails(bulk=True).reason == reason
        channel.close()
        asked.close()
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert said.count("no data connection can be accepted for now, and is tried again: [Errno 24]") == 1


def is_closed(connection):
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


@pytest.mark.parametrize("tls", [False, True])
def test_connections_without_a_ticket_are_few_and_not_for_long(serving, monkeypatch, tls):
    security = Security(name="ps.job", **certified(trustme.CA(), "ps.job")) if tls else Security()
    server, channel = serving(security=security)
    monkeypatch.setattr(bulk, "MOST_STRANGERS", 2)
    with contextlib.ExitStack() as ends:
        silent = [ends.enter_context(socket.create_connection(("127.0.0.1", server._data.port), 20)) for _ in range(4)]
        assert [is_closed(connection) for connection in silent[:2]] == [True, True]
        doubled(channel)  # its connection is not the oldest
        assert len(server._data._streams) == 1
        monkeypatch.setattr(bulk, "TICKET_S", 0.2)
        assert is_closed(ends.enter_context(socket.create_connection(("127.0.0.1", server._data.port), 20)))
        doubled(channel)


def test_a_unix_socket_of_another_machine_is_gone_round(serving):
    server, channel = serving()
    server._data.name += "not here"
    doubled(channel)
    assert [stream._socket.family for stream in server._data._streams] == [socket.AF_INET]


@pytest.mark.parametrize("shown", [bytes(32), b"short", b""])
def test_a_connection_without_a_ticket_is_closed(serving, shown):
    server, channel = serving()
    with socket.create_connection(("127.0.0.1", server._data.port), timeout=20) as connection:
        connection.sendall(shown)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert not server._data._streams
    doubled(channel)


def test_a_ticket_opens_one_connection_and_only_for_a_while(serving, monkeypatch):
    server, _ = serving()
    data = server._data

    def opens(ticket):
        with socket.create_connection(("127.0.0.1", data.port), timeout=20) as connection:
            connection.sendall(ticket)
            stream = Stream(connection)
            try:
                stream.send({"method": "double", "say": "hello"}, [])
                return stream.receive(lambda header: (), most_bytes=0, by=time.monotonic() + 20)[0]["said"]
            except (EOFError, OSError):
                return None

    ticket = data.ticket()
    assert [opens(ticket), opens(ticket)] == ["hello", None]
    monkeypatch.setattr(bulk, "TICKET_S", 0.0)
    late = data.ticket()
    monkeypatch.undo()
    assert opens(late) is None


def test_who_does_not_show_the_token_gets_no_ticket(serving):
    server, channel = serving(security=Security(token="right"), theirs=Security(token="wrong"))
    with pytest.raises(CallFailed) as info:
        doubled(channel)
    assert (info.value.reason, server._data._tickets) == ("unauthenticated", {})


def test_under_tls_both_sides_show_a_certificate_of_one_authority(serving):
    authority, stranger = trustme.CA(), trustme.CA()
    right = Security(token="t", name="ps.job", **certified(authority, "worker.job"))
    server, channel = serving(security=Security(token="t", **certified(authority, "ps.job")), theirs=right)
    doubled(channel)
    assert [type(stream._socket) for stream in server._data._streams] == [ssl.SSLSocket]
    own = {**certified(stranger, "worker.job"), "authority": authority.cert_pem.bytes()}
    for wrong in (Security(), Security(name="ps.job", **own), Security(name="other.job", **certified(authority, "w"))):
        with pytest.raises((OSError, EOFError)):
            said_as(wrong, server._data)


def said_as(security, data):
    """One call of somebody who has got hold of a ticket."""
    channel = bulk.BulkChannel("127.0.0.1:1", security=security, ask=None)
    with contextlib.closing(channel._open(data.port, data.ticket(), 20)) as connection:
        stream = Stream(connection)
        stream.send({"method": "double"}, [])
        stream.receive(lambda header: (), most_bytes=0, by=time.monotonic() + 20)


def test_what_is_wrong_with_a_call_is_refused_and_the_next_one_served(serving, caplog):
    _, channel = serving(most_bytes=10_000_000)
    for method, header, arrays in (
        ("nothing", {}, []),
        ("double", {"arrays": described([X])}, [X, X]),
        ("double", {"arrays": [[[10**12], "float32"]]}, [X]),
        ("fail", {}, []),
    ):
        with pytest.raises(CallFailed) as info:
            channel.call(method, header, arrays, timeout_s=20, data=True)
        assert (info.value.reason, "secret" in str(info.value)) == ("refused", False)
    assert "a secret of this process" in caplog.text
    doubled(channel)


def test_a_server_that_ends_in_the_middle_and_one_in_its_place(serving):
    server, channel = serving()
    doubled(channel)
    server.stop()
    with pytest.raises(CallFailed):
        doubled(channel, timeout_s=5)
    serving(port=server.port)
    deadline = time.monotonic() + 30
    while True:
        try:
            return doubled(channel)
        except CallFailed:
            assert time.monotonic() < deadline


def test_a_server_that_does_not_answer_in_time():
    def silent(stream, make_room):
        stream.receive(lambda header: (), most_bytes=0)
        forever.wait(30)
        return {}, []

    forever = threading.Event()
    server = BulkServer("127.0.0.1", silent, security=Security())
    channel = bulk.BulkChannel(
        "127.0.0.1:1", security=Security(), ask=lambda timeout_s: (server.port, "", server.ticket())
    )
    with pytest.raises(CallFailed) as info:
        channel.begin({}, [], lambda header: (), timeout_s=0.2)()
    assert (info.value.reason, channel._busy) == ("deadline", set())
    forever.set()
    channel.close()
    with pytest.raises(CallFailed, match="closed"):
        channel.begin({}, [], lambda header: (), timeout_s=0.2)
    server.stop()


@pytest.fixture
def streams():
    pair = socket.socketpair()
    yield Stream(pair[0]), Stream(pair[1]), pair[0]
    for end in pair:
        end.close()


def receive(stream, expected=SPECS, most_bytes=1 << 22):
    return stream.receive(lambda header: expected, most_bytes=most_bytes, by=time.monotonic() + 20)


@pytest.mark.parametrize("arrays", [[], [np.zeros((0, 3), np.int8), np.int16(3).reshape(())], [X], [X, X[:5]]])
def test_messages_one_after_the_other(streams, arrays):
    here, there, _ = streams
    sending = threading.Thread(target=lambda: [here.send({"n": n}, arrays) for n in range(3)])
    sending.start()
    for n in range(3):
        header, found = receive(there, [Spec(x.shape, x.dtype.name) for x in arrays])
        assert header == {"n": n}
        for a, b in zip(found, arrays, strict=True):
            np.testing.assert_array_equal(a, b)
    sending.join(20)


def test_sizes_that_are_wrong_are_found_before_memory_is_taken(streams):
    here, there, _ = streams
    here.send({"n": 0}, [np.zeros(5, np.float32)])
    with pytest.raises(WireError, match=r"20 bytes where 2,400,000 are expected"):
        receive(there)
    here.send({"n": 1}, [])
    with pytest.raises(WireError, match=r"a message of 4,000,000,000,000 bytes; at most 4,194,304 are taken"):
        receive(there, [Spec((10**12,), "float32")])
    here.send({"n": 2}, [])
    assert receive(there, [])[0] == {"n": 2}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes(8) + b"GET / HTTP/1.1", "not a message of this protocol"),
        (bytes(8) + b"jdp1\xff\xff\xff\xff", "at most"),
        (bytes(8) + b"jdp1\x00\x00\x00\x01\xc1", "not msgpack"),
        (struct.pack(">Q", 1 << 62) + encode({}), "4,611,686,018,427,387,904 bytes where 0"),
    ],
)
def test_bytes_that_are_no_message(streams, data, message):
    _, there, raw = streams
    raw.sendall(data)
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises((WireError, EOFError), match=message if "where" not in message else None):
        receive(there, [])


def test_an_end_in_the_middle_and_a_deadline(streams):
    here, there, raw = streams
    with pytest.raises(TimeoutError):
        there.receive(lambda header: (), most_bytes=0, by=time.monotonic() + 0.05)
    here.send({}, [])
    with pytest.raises(TimeoutError):
        there.receive(lambda header: (), most_bytes=0, by=time.monotonic() - 1)
    raw.sendall(b"half")
    raw.shutdown(socket.SHUT_WR)
    assert receive(there, [])[0] == {}
    with pytest.raises(EOFError):
        receive(there, [])


@pytest.mark.parametrize("ends", [True, False])
def test_the_end_waits_for_calls_under_way_and_says_whether_they_have_ended(serving, monkeypatch, ends):
    """A thread that comes back from XLA while the interpreter ends aborts the process."""
    monkeypatch.setattr(bulk, "_STOP_S", 20.0 if ends else 0.0)
    inside, left, over = threading.Event(), threading.Event(), []

    def run(header, arrays):
        inside.set()
        left.wait(20)
        over.append(True)
        return {}, []

    server, channel = serving(methods={"slow": Method(run)})
    channel.begin("slow", {}, timeout_s=20, data=True)
    assert inside.wait(20)
    channel.close()
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(server.stop)
        if not ends:
            assert stopping.result(20) is False
        left.set()
        assert stopping.result(20) is ends
        assert over or not ends
