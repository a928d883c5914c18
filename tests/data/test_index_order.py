"""An order that is computed place by place: a permutation, as even as a drawn one."""

import itertools
import math
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.data import from_arrays, from_rows
from jdist.data.sources.rows import rows_at
from jdist.errors import DatasetError
from tests.data.counting import distributed_dataset, feed


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40))
@settings(deadline=None)
def test_every_row_stands_at_one_place(count, seed, epoch):
    rows = rows_at(np.arange(count), count, seed, epoch)
    assert sorted(rows.tolist()) == list(range(count))


@given(count=st.integers(1, 2**62), data=st.data())
@settings(deadline=None)
def test_a_place_has_its_row_whatever_else_is_asked_for(count, data):
    places = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20, unique=True))
    rows = rows_at(np.array(places), count, 3, 1).tolist()
    assert len(set(rows)) == len(rows)
    assert 0 <= min(rows) <= max(rows) < count
    assert rows == [rows_at(np.array([place]), count, 3, 1).item() for place in places]


def test_the_order_is_the_one_of_saved_positions():
    assert rows_at(np.arange(10), 10, seed=3, epoch=1).tolist() == [5, 7, 9, 8, 1, 0, 6, 2, 3, 4]
    assert rows_at(np.arange(3), 10**12, seed=3, epoch=1).tolist() == [38884126480, 662558815026, 123666616015]


def test_orders_of_few_rows_come_equally_often():
    count, seeds = 5, 6000
    times = Counter(tuple(rows_at(np.arange(count), count, seed, 0).tolist()) for seed in range(seeds))
    expected = seeds / math.factorial(count)
    chi_square = sum((times[order] - expected) ** 2 / expected for order in itertools.permutations(range(count)))
    # 119 degrees of freedom: 1 in a thousand of evenly drawn orders is above 173. Six rounds give 1,000 here.
    assert chi_square < 250


@pytest.mark.parametrize("count", [1000, 2**20])
def test_neighbours_are_as_far_apart_as_in_a_drawn_order(count):
    rows = rows_at(np.arange(1000), count, seed=1, epoch=0) / count
    # The standard errors of the mean of 1,000 uniform values and of 999 uniform differences are 0.009 and 0.0075.
    assert abs(rows.mean() - 1 / 2) < 0.04
    assert abs(np.abs(np.diff(rows)).mean() - 1 / 3) < 0.03
    assert abs(np.corrcoef(np.arange(1000), rows)[0, 1]) < 0.13


@given(rows=st.integers(1, 40), global_batch=st.integers(1, 9), seed=st.integers(0, 9), step=st.integers(0, 10**6))
@settings(deadline=None)
def test_arrays_come_in_it_each_epoch_anew(rows, global_batch, seed, step):
    source = from_arrays(np.arange(rows), global_batch=global_batch, shuffle_seed=seed, shuffle="index", epochs=None)
    epoch, within = divmod(step, source.steps_per_epoch)
    places = np.arange(rows)[within * global_batch : (within + 1) * global_batch]
    np.testing.assert_array_equal(source.batch_at(step), rows_at(places, rows, seed, epoch))


def test_an_epoch_of_a_thousand_million_rows_begins_without_drawing_it():
    rows = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (10**9,), (0,))  # a byte that stands for all of them
    source = from_arrays(rows, global_batch=4, shuffle_seed=0, shuffle="index", epochs=None)
    assert source.batch_at(10**12).shape == (4,)
    assert source._orders == {}


class Numbers:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return {"y": np.int64(number)}


def shuffled_arrays(count):
    arrays = {"y": np.broadcast_to(np.int8(0), (count,))}
    return from_arrays(arrays, global_batch=64, shuffle_seed=0, shuffle="index", epochs=None)


def shuffled_rows(count):
    return from_rows(Numbers(count), global_batch=64, shuffle_seed=0, epochs=None, workers=2)


@pytest.mark.parametrize("make", [shuffled_arrays, shuffled_rows])
def test_memory_does_not_grow_with_the_rows(make):
    def peak(count):
        tracemalloc.start()
        dataset = distributed_dataset(make(count), num_replicas=1)
        for step in (0, 2 * count // 64):  # of the first epoch and of the third
            dataset.go_to(step)
            batches = iter(dataset)
            for _ in range(20):
                next(batches)
            batches.close()
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(1000)  # what is imported and kept once
    assert peak(10**9) < peak(10**5) + 200_000, "a drawn order takes 8 GB"


def test_a_position_of_the_other_order_is_refused_by_name():
    def dataset(**options):
        return feed(from_arrays({"x": np.arange(9)}, global_batch=2, shuffle_seed=1, **options))

    drawn, computed = dataset().state(), dataset(shuffle="index").state()
    assert "shuffle=" not in drawn["fingerprint"]  # as it was when there was one order only
    with pytest.raises(DatasetError, match="shuffle was not there and is index"):
        dataset(shuffle="index").restore(drawn)
    with pytest.raises(DatasetError, match="shuffle was index and is not there"):
        dataset().restore(computed)
    dataset(shuffle="index").restore(computed)


def test_options_that_make_no_sense_are_refused():
    wrong: Any = "indices"
    with pytest.raises(DatasetError, match=r"`shuffle` is 'indices'; it must be 'permutation' or 'index'\. Did you"):
        from_arrays(np.arange(2), global_batch=1, shuffle_seed=0, shuffle=wrong)
    with pytest.raises(DatasetError, match='shuffle="index" needs a `shuffle_seed`'):
        from_arrays(np.arange(2), global_batch=1, shuffle="index")
