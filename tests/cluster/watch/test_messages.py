import json
import select
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdist.cluster.watch.messages import MOST_BYTES, BadMessage, Connection, decode, encode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(st.dictionaries(st.text(), JSON, max_size=3).map(lambda m: m | {"type": "value"}), max_size=5)


def cut(data, places):
    places = sorted(place % (len(data) + 1) for place in places)
    return [data[i:j] for i, j in zip([0, *places], [*places, len(data)], strict=True)]


@given(MESSAGES, st.lists(st.integers(min_value=0), max_size=8))
def test_messages_arrive_whole_however_they_are_cut(messages, places):
    rest, found = b"", []
    for piece in cut(b"".join(map(encode, messages)), places):
        whole, rest = decode(rest + piece, MOST_BYTES)
        found += whole
    assert found == messages


@given(st.binary(max_size=300), st.lists(st.integers(min_value=0), max_size=4))
def test_any_bytes_are_messages_or_refused(data, places):
    rest = b""
    try:
        for piece in cut(data, places):
            whole, rest = decode(rest + piece, 200)
            for message in whole:
                assert isinstance(message["type"], str)
    except BadMessage:
        pass


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"x",
        b"[]",
        b"null",
        b"{}",
        b'{"type": 1}',
        b'{"type": "beat"',
        b"\xff",
        b"[" * 100_000,
        b'{"a": 1' + b"0" * 9999,
    ],
)
def test_what_is_no_message_is_refused(line):
    with pytest.raises(BadMessage):
        decode(line + b"\n", MOST_BYTES)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_is_refused_before_it_ends(end):
    assert decode(b"x" * 100, 100) == ([], b"x" * 100)
    with pytest.raises(BadMessage, match="longer than 100 bytes"):
        decode(b"x" * 101 + end, 100)


def test_a_message_is_one_line():
    assert encode({"type": "wish", "reason": "a\nb\ud800"}).count(b"\n") == 1


@pytest.fixture
def pair():
    """A line and the socket at its other end, over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    line = Connection(ours, most_bytes=1000, most_unsent_bytes=1 << 20)
    with theirs:
        yield line, theirs
    line.close()


def test_a_line_that_nobody_reads_keeps_what_is_said_and_never_waits(pair):
    line, theirs = pair
    message, said = {"type": "value", "value": "x" * 10_000}, 0
    while not line.has_unsent:
        line.send(message)
        said += 1
    got = b""
    while got.count(b"\n") < said:
        got += theirs.recv(1 << 16)
        line.flush()
    assert not line.has_unsent
    assert [json.loads(each) for each in got.splitlines()] == [message] * said


def test_who_never_reads_is_given_up(pair):
    line, _ = pair
    with pytest.raises(ConnectionError, match="does not read its messages"):
        line.send({"type": "value", "value": "x" * (1 << 26)})  # more than any system keeps on the way


def test_nothing_to_take_is_no_error(pair):
    line, theirs = pair
    assert line.receive() == []
    theirs.sendall(b'{"type": "beat"}\n{"type"')
    select.select([line.connection], [], [], 30.0)
    assert line.receive() == [{"type": "beat"}]


def test_last_words_are_heard_although_nothing_can_be_said_any_more(pair):
    line, theirs = pair
    theirs.sendall(b'{"type": "lost"}\n')
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it is reset
    theirs.close()
    select.select([line.connection], [], [], 30.0)
    for _ in range(3):
        line.send({"type": "beat"})
    assert line.receive() == [{"type": "lost"}]
    with pytest.raises(OSError, match=r"reset|closed|pipe"):
        line.receive()
