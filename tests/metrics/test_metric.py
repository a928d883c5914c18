"""A metric's total is the same however a data set is cut up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jdist

ROWS = 12
METRIC = jdist.metrics.collect(
    {
        "mean": jdist.metrics.mean(),
        "accuracy": jdist.metrics.accuracy(),
        "top_2": jdist.metrics.top_k(2),
        "confusion": jdist.metrics.confusion_matrix(3),
        "recall": jdist.metrics.recall(3, average=None),
        "auc": jdist.metrics.auc(),
    }
)


@jax.jit
def update(values, logits, labels, mask):
    both = (logits, labels)
    inputs = dict.fromkeys(("accuracy", "top_2", "confusion", "recall"), both)
    return METRIC.update(inputs | {"mean": values, "auc": (values, labels == 1)}, mask)


def contribution(rows, chosen):
    """What some of the rows add, filled up to a batch of one size with others that do not count."""
    order = np.concatenate([chosen, np.setdiff1d(np.arange(ROWS), chosen)])
    return update(*(x[order] for x in rows), np.arange(ROWS) < len(chosen))


# Few values, so that scores are often equal; eighths, whose sums are exact in any order.
values = st.lists(st.integers(-8, 8).map(lambda x: x / 8), min_size=ROWS, max_size=ROWS)
logits = st.lists(st.lists(st.integers(-1, 1), min_size=3, max_size=3), min_size=ROWS, max_size=ROWS)
labels = st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS).filter(lambda x: 0 < x.count(1) < ROWS)


@settings(max_examples=60, deadline=None)
@given(values, logits, labels, st.permutations(range(ROWS)), st.lists(st.integers(0, ROWS), max_size=5), st.data())
def test_any_split_into_batches_gives_the_same(values, logits, labels, order, cuts, data):
    rows = (np.float32(values), np.float32(logits), np.int32(labels))
    whole = METRIC.compute(update(*rows, np.ones(ROWS, bool)))
    parts = [contribution(rows, part) for part in np.split(np.array(order), sorted(cuts))]
    assert_same(METRIC.compute(METRIC.total(parts)), whole)
    # Added in any order of additions too, as several evaluators would.
    totals = [METRIC.add(METRIC.zero, part) for part in parts]
    while len(totals) > 1:
        i = data.draw(st.integers(0, len(totals) - 2))
        totals[i : i + 2] = [METRIC.add(totals[i], totals[i + 1])]
    assert_same(METRIC.compute(totals[0]), whole)


def assert_same(found, expected):
    assert list(found) == list(METRIC.zero)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_the_total_of_nothing_is_zero():
    rows = (np.float32(range(ROWS)), np.float32(np.eye(3)[np.arange(ROWS) % 3]), np.arange(ROWS) % 3)
    one = METRIC.add(METRIC.zero, update(*rows, np.arange(ROWS) < 7))
    nothing = update(*rows, np.zeros(ROWS, bool))
    for total in (METRIC.add(one, METRIC.zero), METRIC.add(one, nothing), METRIC.add(METRIC.zero, one)):
        assert_same(METRIC.compute(total), METRIC.compute(one))
    assert METRIC.total([]) is METRIC.zero


def test_counts_are_exact_where_float32_and_int32_are_not():
    metric = jdist.metrics.mean()
    big = 2**31 - 1
    part = metric.update(jnp.array([True, False]), jnp.array([big - 1, 1]))
    total = metric.total([part, part, part])
    assert (int(total["total"]), int(total["weight"])) == (3 * (big - 1), 3 * big)
    assert metric.compute(total) == (big - 1) / big


def test_contributions_are_read_only_after_others_were_asked_for():
    """So that steps run ahead; and in bounded number."""
    log = []

    class Value:
        def __init__(self, number):
            self.number = number

        def __array__(self, dtype=None, copy=None):
            log.append(f"read {self.number}")
            return np.asarray(1, dtype)

    def steps():
        for i in range(40):
            log.append(f"step {i}")
            yield {"total": Value(i), "weight": Value(i)}

    metric = jdist.metrics.mean()
    assert metric.compute(metric.total(steps())) == 1.0
    assert log.index("read 0") == log.index("step 32") + 1
    assert log.index("step 39") > log.index("read 6")
    assert [x for x in log if x.startswith("read")] == [f"read {i}" for i in range(40) for _ in range(2)]


def test_a_repr_tells_the_name():
    assert repr(METRIC) == "<metric collect(mean, accuracy, top_2, confusion, recall, auc)>"


@pytest.mark.parametrize("name", ["mean", "accuracy", "confusion"])
def test_totals_are_of_64_bits(name):
    rows = (np.float32(range(ROWS)), np.float32(np.eye(3)[np.arange(ROWS) % 3]), np.arange(ROWS) % 3)
    total = METRIC.total([update(*rows, np.ones(ROWS, bool))])[name]
    assert {x.dtype for x in jax.tree.leaves(total)} <= {np.dtype(np.int64), np.dtype(np.float64)}
