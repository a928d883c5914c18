"""The baselines of the text task, against slow references."""

import math
import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.tasks import byte_model

pytestmark = pytest.mark.xdist_group(__name__)  # they share the model


def as_bytes(data):
    return np.frombuffer(bytes(data), np.uint8)


def slow_bits_per_byte(train, test):
    """The definition, one byte at a time."""
    triples, pairs = Counter(), Counter()
    padded = b"\0\0" + train
    for i in range(2, len(padded)):
        triples[padded[i - 2 : i + 1]] += 1
        pairs[padded[i - 2 : i]] += 1
    padded = b"\0\0" + test
    bits = 0.0
    for i in range(2, len(padded)):
        seen, of = triples[padded[i - 2 : i + 1]], pairs[padded[i - 2 : i]]
        bits -= math.log2((seen + 1) / (of + 256))
    return bits / len(test)


@pytest.fixture(scope="module")
def model():
    return byte_model.fit_order2(as_bytes(b"the cat sat on the mat; the cat ran."))


@settings(max_examples=5, deadline=None)
@given(test=st.binary(min_size=1, max_size=50))
def test_order_2_equals_the_definition(model, test):
    train = b"the cat sat on the mat; the cat ran."
    assert model.bits_per_byte(as_bytes(test)) == pytest.approx(slow_bits_per_byte(train, test), rel=1e-12)


def test_order_2_probabilities_sum_to_one_seen_or_not(model):
    for a, b in (b"th", b"e ", b"qq", b"\xff\x00"):
        assert model.probabilities(a, b).sum() == pytest.approx(1.0, rel=1e-12)
    assert model.probabilities(*b"th")[ord("e")] == 4 / 259


def test_order_2_counts_across_chunks(monkeypatch):
    data = as_bytes(b"abcabdabcxyz" * 3)
    whole = byte_model.fit_order2(data)
    monkeypatch.setattr(byte_model, "_CHUNK_BYTES", 5)
    parts = byte_model.fit_order2(data)
    np.testing.assert_array_equal(parts.counts, whole.counts)
    assert parts.counts.sum() == data.size
    assert parts.bits_per_byte(data) == pytest.approx(whole.bits_per_byte(data), rel=1e-12)


def test_order_2_knows_nothing_of_unseen_bytes(model):
    np.testing.assert_array_equal(model.probabilities(0xF0, 0xF1), 1 / 256)


def test_zlib_counts_compressed_bits():
    data = b"abc" * 100
    assert byte_model.zlib_bits_per_byte(as_bytes(data)) == 8 * len(zlib.compress(data, 9)) / 300


def test_no_bytes_have_no_rate(model):
    assert math.isnan(model.bits_per_byte(as_bytes(b"")))
    assert math.isnan(byte_model.zlib_bits_per_byte(as_bytes(b"")))
