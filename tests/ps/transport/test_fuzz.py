"""Whatever bytes come, a server refuses them in one word, takes no memory for them, and serves the next call.

Real servers on loopback, with the methods of a shard and of a worker: frames over gRPC and over data connections, made at
random and by changing right ones. JDIST_SOAK_S makes it look for longer.
"""

import contextlib
import os
import socket
import struct
import threading
import time

import grpc
import msgpack
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdist.ps.program.function_plan import FunctionPlan
from jdist.ps.program.layout import make_layout
from jdist.ps.program.partition import fixed_shards
from jdist.ps.protocol import wire
from jdist.ps.protocol.messages import TRAVELLING, Commit, Done, Fence, Pull, Push, Restore, Snapshot
from jdist.ps.protocol.wire import Spec, encode, to_plain
from jdist.ps.server.shard_server import ShardServer
from jdist.ps.transport.grpc_transport import SERVICE, RpcChannel, RpcServer
from jdist.ps.transport.interface import CallFailed
from jdist.ps.transport.routed import Route
from jdist.ps.transport.shard_client import ShardClient
from jdist.ps.transport.stream import Stream
from jdist.ps.worker.server import WorkerServer
from tests.ps.fake_transport import FakeChannel
from tests.ps.hidden_layer import BATCH, create, raw, train_step
from tests.ps.program.test_split_step import apart
from tests.ps.server.test_shard_server import program

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers

MOST_BYTES = 1 << 20  # of a call to the servers here
WORDS = {"refused", "failed"}
EXAMPLES = 300
SOAK_EXAMPLES = 20 * int(os.environ.get("JDIST_SOAK_S", "60"))
BOTH = [EXAMPLES, pytest.param(SOAK_EXAMPLES, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]


class Servers:
    """A shard with a state, and a worker that is attached to it."""

    def __init__(self):
        self.state = create(optax.sgd(0.1))
        parts, state, *_ = apart(train_step, self.state, BATCH)
        self.layout = make_layout([parts], num_ps=1, partitioner=fixed_shards(1))
        (self.shard,) = self.layout.shards
        self.kept, self.program = self.layout.split_leaves(raw(state))[0], program(self.layout, self.shard)
        self.keeper = ShardServer()
        self.keeper._frozen_s = 0.1
        self.worker = WorkerServer(lambda address: FakeChannel(None), timeout_s=0.1, give_up_s=0.1)
        self.servers = {
            "ps": RpcServer("127.0.0.1:0", self.keeper.methods(), most_bytes=MOST_BYTES, threads=4),
            "worker": RpcServer("127.0.0.1:0", self.worker.methods(), most_bytes=MOST_BYTES, threads=4),
        }
        self.channels = {who: RpcChannel(f"127.0.0.1:{s.port}") for who, s in self.servers.items()}
        self.raw = {who: grpc.insecure_channel(f"127.0.0.1:{s.port}") for who, s in self.servers.items()}
        self.generation = 1

    def check(self):
        """That both serve as if nothing had been."""
        for channel in self.channels.values():
            channel.call("status", {}, timeout_s=20)
        client = ShardClient(self.channels["ps"], self.shard, give_up_s=20)
        self.generation = client.status()["generation"] + 1
        message = Restore(generation=self.generation)
        assert client.restore(message, self.kept, [self.program]) == Done(version=0)
        (pulled,), arrays = client.say([Pull(generation=self.generation)])
        assert pulled.changed
        for place, x in zip([*self.shard.views[0].pulled, *self.shard.views[0].pulled_once], arrays, strict=True):
            np.testing.assert_array_equal(x, self.kept[place])

    def close(self):
        for one in (*self.channels.values(), *self.raw.values()):
            one.close()
        for server in self.servers.values():
            server.stop()
        self.worker.close()


@pytest.fixture(scope="module")
def servers():
    made = Servers()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def threads_do_not_die():
    """A thread of a server that ends by an exception."""
    found, before = [], threading.excepthook
    threading.excepthook = found.append
    yield
    threading.excepthook = before
    assert not found, [(each.thread.name, each.exc_value) for each in found]


def atoms():
    text = st.sampled_from(["", "status", "Push", "float32", "object", "0-abc", "127.0.0.1:1", "\x00", "é" * 50])
    return st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), text, st.binary(max_size=40)
    )


def anything():
    return st.recursive(
        atoms(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    )


def right_headers(servers):
    """Headers that a server takes, by `(server, method)`."""
    said = {"generation": servers.generation, "worker": 0, "epoch": 1}
    push = to_plain(Push(**said, stage=True, closure=1, base=0))
    says = [
        to_plain(m)
        for m in (
            Pull(**said, known=0),
            Commit(**said, closures=(1,)),
            Commit(**said, closures=(1, 2), as_one=True),
            Fence(generation=servers.generation, fenced=0, below=2),
            Snapshot(phase="freeze", generation=servers.generation),
            Snapshot(phase="keep", generation=servers.generation),
            Snapshot(phase="thaw", generation=servers.generation),
            Done(version=1),
        )
    ]
    plan = to_plain(servers.shard)
    restore = {"say": to_plain(Restore(generation=servers.generation + 1)), "plan": plan, "programs": [10]}
    execute = {"worker": 0, "epoch": 1, "generation": 1, "settled": 0, "closures": [0], "functions": ["0-abc"]}
    function = to_plain(FunctionPlan(arguments=(Spec((2,), "float32"),), outputs=()))
    return [
        ("ps", "status", {}),
        ("ps", "say", {"say": says}),
        ("ps", "say", {"say": [push], "result": 0}),
        ("ps", "say", {"say": [to_plain(Commit(**said, closures=(1,), as_one=True))], "result": 3}),
        ("ps", "restore", restore),
        ("ps", "read", {"generation": servers.generation, "version": 0}),
        ("worker", "attach", {"routes": [to_plain(Route(address="127.0.0.1:1", slot=0, term=1))], "plans": [plan]}),
        ("worker", "install", {"function": function, "program": 5, "number": 0}),
        ("worker", "execute", execute),
    ]


def places(value, path=()):
    """Every place in a tree of plain values."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def put(value, path, new):
    """The tree with another value in a place."""
    if not path:
        return new
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = put(value[key], rest, new)
    return copy


@st.composite
def changed(draw, headers):
    """A server, and a frame for it that was right before something was done to it."""
    who, method, header = draw(st.sampled_from(headers))
    header = {**header, "method": method}
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(places(header)))
        if path:
            header = put(header, path, draw(anything()))
    frame = encode(header) + draw(st.binary(max_size=64) | st.just(bytes(200)))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(frame) - 1))
        frame = frame[:at] + draw(st.binary(max_size=3)) + frame[at + draw(st.integers(0, 3)) :]
    return who, frame


def frames(servers):
    """A server, and a frame for it."""
    some = st.tuples(st.sampled_from(["ps", "worker"]), st.binary(max_size=200) | anything().map(as_frame))
    return some | changed(right_headers(servers))


def as_frame(value):
    body = msgpack.packb(value)
    return b"jdp1" + struct.pack(">I", len(body)) + body


def looked_for(number):
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=number == EXAMPLES,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """The memory that was taken for arrays: never more than the cap."""
    sizes, aligned = [0], wire.aligned

    def noting(size_bytes):
        sizes.append(size_bytes)
        return aligned(size_bytes)

    monkeypatch.setattr(wire, "aligned", noting)
    yield
    assert 0 <= min(sizes) <= max(sizes) <= MOST_BYTES


def over_grpc(servers, who, parts, *, small):
    """What comes back for frames: None for an answer, else one word."""
    name = "unary_unary" if small else "stream_stream"
    call = getattr(servers.raw[who], name)(f"/{SERVICE}/{'Call' if small else 'Bulk'}")
    try:
        if small:
            call(parts[0], timeout=20)
        else:
            list(call(iter(parts), timeout=20))
    except grpc.RpcError as exc:
        said = exc.details()
    else:
        return None
    assert said in WORDS, said
    return said


@pytest.mark.parametrize("number", BOTH)
def test_frames_over_grpc(servers, number, caplog):
    caplog.set_level("CRITICAL")
    answered = []

    @looked_for(number)
    @given(st.data(), st.booleans())
    def run(data, small):
        who, frame = data.draw(frames(servers))
        more = data.draw(st.lists(st.binary(max_size=100), max_size=3))
        answered.append(over_grpc(servers, who, [frame, *more], small=small))

    run()
    assert set(answered) == {None, *WORDS} or number == EXAMPLES
    servers.check()


def over_data(servers, who, data):
    """Sends bytes over a data connection that a ticket has opened, and then no more; what the server has said of them."""
    server = servers.servers[who]._data
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(server.ticket() + data)
        connection.shutdown(socket.SHUT_WR)
        stream = Stream(connection)
        try:
            header, _ = stream.receive(lambda header: (), most_bytes=1 << 30, by=time.monotonic() + 20)
        except (EOFError, ConnectionError):
            return "ended"
        except ValueError:
            return "answered with arrays"
        if "failed" in header:
            assert set(header) == {"failed"}
            assert header["failed"] in WORDS, header
        return header.get("failed", "answered")


@pytest.mark.parametrize("number", BOTH)
def test_messages_over_a_data_connection(servers, number, caplog):
    caplog.set_level("CRITICAL")
    sizes = st.sampled_from([0, 1, 64, 200, MOST_BYTES, MOST_BYTES + 1, 1 << 40, 2**64 - 1])

    @looked_for(number)
    @given(st.data(), sizes, st.binary(max_size=300))
    def run(data, size, payload):
        who, frame = data.draw(frames(servers))
        over_data(servers, who, struct.pack(">Q", size) + frame + payload)

    run()
    servers.check()


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(31), bytes(32), bytes(5000)])
def test_bytes_where_a_ticket_is_expected(servers, data):
    for server in servers.servers.values():
        with socket.create_connection(("127.0.0.1", server._data.port), timeout=20) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
    servers.check()


NONSENSE = [
    ("ps", {"method": ["status"]}),
    ("ps", {"method": {"is": "status"}}),
    ("ps", {"method": "say", "say": 5, "result": 1}),
    ("ps", {"method": "say", "say": [{"is": "Push", "view": -1}], "result": 1}),
    ("ps", {"method": "restore", "plan": None, "programs": []}),
    ("worker", {"method": "execute", "closures": [[]], "functions": [{}]}),
    ("worker", {"method": "attach", "routes": [None] * 5000, "plans": [None] * 5000}),
]


@pytest.mark.parametrize(("who", "header"), NONSENSE, ids=range(len(NONSENSE)))
def test_a_header_that_makes_no_sense_is_refused_in_one_word(servers, who, header, caplog):
    assert over_grpc(servers, who, [encode(header)], small=True) in WORDS
    assert over_data(servers, who, struct.pack(">Q", 0) + encode(header)) in WORDS
    assert "5000" not in caplog.text
    servers.check()


@pytest.mark.parametrize("shape", [(-1,), (-1, -1), (2**31, 2**31), (0, 2**61), (1 << 20,)])
def test_arrays_of_a_size_that_cannot_be_are_refused_before_memory_is_taken(servers, shape):
    plan = to_plain(servers.shard)
    plan["kept"] = [{"is": "Spec", "shape": list(shape), "dtype": "float32"}, *plan["kept"][1:]]
    header = {"method": "restore", "say": to_plain(Restore(generation=9)), "plan": plan, "programs": [0]}
    assert over_grpc(servers, "ps", [encode(header)], small=False) in WORDS
    assert over_data(servers, "ps", struct.pack(">Q", 0) + encode(header)) in WORDS
    servers.check()


def stalled(servers, over):
    """A push of which nothing comes but the header."""
    push = to_plain(Push(stage=True, generation=servers.generation, worker=0, epoch=1, closure=1, base=0))
    yield encode({"method": "say", "say": [push], "result": 10})
    over.wait(60)


@pytest.mark.parametrize("timeout_s", [None, 0.5])
def test_a_call_that_stalls_ends_by_its_deadline_and_must_have_one(servers, timeout_s):
    bulk, over = servers.raw["ps"].stream_stream(f"/{SERVICE}/Bulk"), threading.Event()
    calls = [bulk(stalled(servers, over), timeout=timeout_s) for _ in range(8)]  # as many as there are threads
    for call in calls:
        with pytest.raises(grpc.RpcError) as info:
            list(call)
        assert info.value.code() is (
            grpc.StatusCode.INVALID_ARGUMENT if timeout_s is None else grpc.StatusCode.DEADLINE_EXCEEDED
        )
    servers.check()
    over.set()


@pytest.mark.parametrize("plain", [{"is": name} for name in TRAVELLING], ids=lambda plain: plain["is"])
def test_a_message_without_its_fields_changes_nothing(servers, plain):
    with pytest.raises(CallFailed, match="refused"):
        servers.channels["ps"].call("say", {"say": [plain]}, timeout_s=20)
    servers.check()
