"""Messages as bytes: there and back, and what is refused."""

import contextlib
import dataclasses

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.errors import WireError
from jdist.ps.protocol.messages import TRAVELLING as KINDS
from jdist.ps.protocol.messages import Commit, Fence, Held, Pull, Push, Refused, Restore
from jdist.ps.protocol.wire import ALIGNED, Buffers, Spec, chunks, decode, encode, from_plain, spec_of, to_plain, wide

EXAMPLES = [
    Pull(generation=3, known=None),
    Pull(generation=3, known=4, worker=1, epoch=2, settled=9),
    Push(generation=1, stage=True, closure=5, attempt=1, base=7, gradients=None, finite=False),
    Commit(generation=1, closures=(1, 2, 3), as_one=True),
    Fence(generation=1, fenced=2, below=3),
    Restore(generation=2, version=8, applied=frozenset({4, 5}), settled=3),
    Held(version=1, staged=frozenset({(4, 0), (5, 1)}), applied=frozenset()),
    Refused(reason="stale", generation=2),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_messages_there_and_back(message):
    header, rest = decode(encode({"m": to_plain(message)}) + b"payload")
    assert from_plain(KINDS, header["m"]) == message
    assert bytes(rest) == b"payload"


def test_names_of_the_senders_own_process_stay_there():
    push = Push(generation=1, closure=0, base=0, gradients="ref", result="other", call="call")
    assert {"gradients", "result", "call"}.isdisjoint(to_plain(push))
    received = from_plain(KINDS | {"Push": Local}, {**to_plain(push), "is": "Push"})
    assert (received.gradients, received.result, received.call) == (None, None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(Push):
    gradients: object = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is": "Nobody"}, "unknown message type"),
        ({"generation": "1"}, "Pull.generation is not of type int"),
        ({"generation": True}, "Pull.generation is not of type int"),
        ({"generation": 2**63}, "Pull.generation is out of range"),
        ({"known": 1.5}, "Pull.known is not of type int"),
        ({"other": 1}, "Pull has no field 'other'"),
    ],
)
def test_what_is_no_message_is_refused(change, message):
    with pytest.raises(WireError, match=message):
        from_plain(KINDS, {**to_plain(Pull(generation=1)), **change})


def test_a_field_without_default_must_be_there():
    with pytest.raises(WireError, match="Commit lacks `closures`"):
        from_plain(KINDS, {"is": "Commit", "generation": 1})
    with pytest.raises(WireError, match=r"Commit\.closures is not a list"):
        from_plain(KINDS, {"is": "Commit", "generation": 1, "closures": 3})
    with pytest.raises(WireError, match=r"Held\.staged has 1 entries, not 2"):
        from_plain(KINDS, {"is": "Held", "version": 1, "staged": [[1]], "applied": []})
    with pytest.raises(WireError, match=r"Refused\.reason has an unknown value"):
        from_plain(KINDS, {"is": "Refused", "reason": "because", "generation": 1})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "fewer bytes than its prefix"),
        (b"GET / HTTP/1.1\r\n", "not a message of this protocol"),
        (b"jdp1\xff\xff\xff\xff", "a header of 4,294,967,295 bytes; at most"),
        (b"jdp1\x00\x00\x00\x09x", "cut off"),
        (b"jdp1\x00\x00\x00\x01\xc1", "not msgpack"),
        (b"jdp1\x00\x00\x00\x01\x05", "not a map"),
        (b"jdp1\x00\x00\x00\x05\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"jdp1" + (20000).to_bytes(4, "big") + b"\x91" * 20000, "not m"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(data, message):
    with pytest.raises(WireError, match=message):
        decode(data)


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=500)
def test_any_bytes_give_a_header_or_a_wire_error(data):
    for whole in (data, b"jdp1" + len(data).to_bytes(4, "big") + data):
        try:
            header, _ = decode(whole)
        except WireError:
            continue
        assert isinstance(header, dict)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    fields=st.dictionaries(st.sampled_from(["generation", "closures", "version", "staged"]), JSON),
)
@settings(deadline=None, max_examples=300)
def test_any_fields_give_a_message_or_a_wire_error(kind, fields):
    plain = msgpack.unpackb(msgpack.packb({"is": kind, **fields}))
    with contextlib.suppress(WireError):
        assert isinstance(from_plain(KINDS, plain), KINDS[kind])


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.float64(3.5).reshape(()),
    np.zeros((0, 4), np.int32),
    np.asarray(jnp.arange(5, dtype=jnp.bfloat16)),
    np.array([True, False]),
]


@pytest.mark.parametrize("size", [1, 3, 7, 1 << 20])
def test_arrays_there_and_back_in_chunks_of_any_size(size):
    buffers = Buffers([spec_of(x) for x in ARRAYS], most_bytes=10_000)
    for chunk in chunks(ARRAYS, size):
        assert len(chunk) <= size
        buffers.take(chunk)
    for found, expected in zip(buffers.arrays(), ARRAYS, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found, expected)
        assert found.ctypes.data % ALIGNED == 0


def test_chunks_across_arrays():
    whole = b"".join(bytes(c) for c in chunks(ARRAYS))
    buffers = Buffers([spec_of(x) for x in ARRAYS], most_bytes=10_000)
    for start in range(0, len(whole), 5):
        buffers.take(whole[start : start + 5])
    np.testing.assert_array_equal(buffers.arrays()[0], ARRAYS[0])


def test_means_are_taken_in_32_bits_at_least():
    dtypes = ["bfloat16", "float16", "float32", "float64", "int8", "bool"]
    assert [wide(Spec((2,), d)).dtype for d in dtypes] == ["float32", "float32", "float32", "float64", "int8", "bool"]


def test_too_many_too_few_and_too_large():
    with pytest.raises(WireError, match="more bytes than the 8 that were announced"):
        Buffers([Spec((2,), "float32")], most_bytes=100).take(b"123456789")
    buffers = Buffers([Spec((2,), "float32")], most_bytes=100)
    buffers.take(b"1234")
    with pytest.raises(WireError, match="4 bytes where 8 were announced"):
        buffers.arrays()
    with pytest.raises(WireError, match=r"a message of 4,000,000,000,000 bytes; at most 100 are taken"):
        Buffers([Spec((10**12,), "float32")], most_bytes=100)
    with pytest.raises(WireError, match="a dtype that cannot be sent"):
        Buffers([Spec((1,), "object")], most_bytes=100)
