"""Arrays as a source of batches."""

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.data import RandomAccessSource, from_arrays
from jdist.errors import BatchError, DatasetError


def rows_of(source):
    return [batch.tolist() for batch in source]


def test_in_order_without_a_seed_and_short_at_the_end_of_each_epoch():
    source = from_arrays(np.arange(5), global_batch=2, epochs=2)
    assert source.num_steps == 6
    assert rows_of(source) == [[0, 1], [2, 3], [4]] * 2


def test_the_order_is_the_documented_one():
    source = from_arrays(np.arange(7), global_batch=7, shuffle_seed=3, epochs=2)
    for epoch, batch in enumerate(source):
        bits = np.random.PCG64(np.random.SeedSequence([3, epoch]))
        np.testing.assert_array_equal(batch, np.random.Generator(bits).permutation(7))


@given(
    rows=st.integers(1, 50),
    global_batch=st.integers(1, 60),
    seed=st.none() | st.integers(0, 2**40),
    epochs=st.integers(1, 3),
)
@settings(deadline=None)
def test_every_row_comes_once_an_epoch_and_batches_never_straddle_epochs(rows, global_batch, seed, epochs):
    source = from_arrays(np.arange(rows), global_batch=global_batch, shuffle_seed=seed, epochs=epochs)
    batches = rows_of(source)
    assert len(batches) == source.num_steps == epochs * source.steps_per_epoch
    orders = []
    for epoch in range(epochs):
        mine = batches[epoch * source.steps_per_epoch : (epoch + 1) * source.steps_per_epoch]
        assert {len(batch) for batch in mine[:-1]} <= {global_batch}
        orders.append([row for batch in mine for row in batch])
        assert sorted(orders[-1]) == list(range(rows))
    if seed is None:
        assert all(order == list(range(rows)) for order in orders)


@given(steps=st.lists(st.integers(0, 10**9), min_size=1, max_size=20), seed=st.none() | st.integers(0, 99))
@settings(deadline=None)
def test_batch_at_is_a_function_of_the_step_whatever_was_asked_before(steps, seed):
    def make():
        return from_arrays(np.arange(11), global_batch=4, shuffle_seed=seed, epochs=None)

    used = make()
    for step in steps:
        np.testing.assert_array_equal(used.batch_at(step), make().batch_at(step))


def test_leaves_are_shuffled_alike():
    source = from_arrays({"x": np.arange(20).reshape(10, 2), "y": np.arange(10)}, global_batch=4, shuffle_seed=1)
    for batch in source:
        np.testing.assert_array_equal(batch["x"][:, 0], 2 * batch["y"])


def test_threads_at_different_epochs_get_what_one_thread_gets():
    source = from_arrays(np.arange(100), global_batch=10, shuffle_seed=5, epochs=None)
    expected = {step: source.batch_at(step).tolist() for step in range(0, 400, 7)}
    wrong: list[int] = []
    start = threading.Barrier(4)

    def check(steps):
        start.wait(timeout=10)
        wrong.extend(step for step in steps if source.batch_at(step).tolist() != expected[step])

    orders = (sorted(expected), sorted(expected, reverse=True)) * 2
    threads = [threading.Thread(target=check, args=(steps,)) for steps in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert wrong == []


@pytest.mark.parametrize("seed", [None, 0])
def test_a_batch_does_not_change_with_the_array(seed):
    array = np.arange(4)
    batch = from_arrays(array, global_batch=4, shuffle_seed=seed).batch_at(0)
    before = batch.tolist()
    array[:] = 9
    assert batch.tolist() == before


def test_endless():
    source = from_arrays(np.arange(5), global_batch=2, epochs=None)
    assert source.num_steps is None
    assert source.batch_at(3 * 10**12 + 2).tolist() == [4]


@pytest.mark.parametrize("step", [-1, 3])
def test_steps_out_of_range_are_refused(step):
    with pytest.raises(DatasetError, match=f"batch {step} does not exist: the source has 3 steps"):
        from_arrays(np.arange(5), global_batch=2).batch_at(step)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        (np.arange(5), {"global_batch": 0}, DatasetError, "`global_batch` is 0; it must be a whole number, 1 or more"),
        (np.arange(5), {"global_batch": 2.0}, DatasetError, "`global_batch` is 2.0; it must be"),
        (np.arange(5), {"global_batch": True}, DatasetError, "`global_batch` is True; it must be"),
        (np.arange(5), {"epochs": 0}, DatasetError, "`epochs` is 0; it must be"),
        (np.arange(5), {"shuffle_seed": -1}, DatasetError, "`shuffle_seed` is -1; .* 0 or more"),
        (np.arange(5), {"shuffle_seed": True}, DatasetError, "`shuffle_seed` is True; it must be"),
        ({"x": np.zeros((0, 3))}, {}, DatasetError, "the dataset is empty: the ArraySource has 0 rows"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, {}, BatchError, r"\['x'\]: 3, \['y'\]: 4"),
        ({"x": [1, 2, 3]}, {}, BatchError, r"leaf \['x'\]\[0\] is a single value.*numpy.asarray"),
    ],
)
def test_what_is_refused(arrays, options, error, message):
    with pytest.raises(error, match=message):
        from_arrays(arrays, **{"global_batch": 2, **options})


def test_numpy_integers_are_taken():
    two: Any = np.int64(2)
    assert from_arrays(np.arange(5), global_batch=two).global_batch == 2


def test_it_is_a_random_access_source():
    assert isinstance(from_arrays(np.arange(5), global_batch=2), RandomAccessSource)


def test_fingerprint_is_the_same_for_equal_data_and_does_not_count_epochs():
    first = from_arrays({"x": np.arange(5)}, global_batch=2, shuffle_seed=1)
    second = from_arrays({"x": np.arange(5)}, global_batch=2, shuffle_seed=1, epochs=7)
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        ({"x": np.arange(6)}, {}),
        ({"y": np.arange(5)}, {}),
        ({"x": np.arange(5, dtype=np.int32)}, {}),
        ({"x": np.arange(5)[::-1]}, {}),
        ({"x": np.arange(5)[:, None]}, {}),
        ({"x": np.arange(5)}, {"global_batch": 3}),
        ({"x": np.arange(5)}, {"shuffle_seed": 2}),
        ({"x": np.arange(5)}, {"shuffle_seed": None}),
    ],
)
def test_fingerprint_tells_data_and_order_apart(arrays, options):
    base = {"global_batch": 2, "shuffle_seed": 1}
    reference = from_arrays({"x": np.arange(5)}, **base)
    assert from_arrays(arrays, **{**base, **options}).fingerprint != reference.fingerprint


def test_fingerprint_reads_only_the_ends_of_large_arrays():
    def fingerprint(changed_row):
        array = np.zeros((4096, 16), np.int64)
        array[changed_row] = 1
        return from_arrays(array, global_batch=2).fingerprint

    assert fingerprint(2000) == fingerprint(2001)
    assert len({fingerprint(0), fingerprint(2000), fingerprint(4095)}) == 3


def test_without_short_batches():
    source = dataclasses.replace(from_arrays(np.arange(5), global_batch=2, epochs=2), drop_short=True)
    assert source.num_steps == 4
    assert rows_of(source) == [[0, 1], [2, 3]] * 2
