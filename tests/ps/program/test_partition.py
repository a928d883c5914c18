"""Into how many pieces a leaf is cut, and where they go."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdist.errors import StrategyError
from jdist.ps import fixed_shards, max_size, min_size
from jdist.ps.program.partition import place, row_sizes

F32 = np.dtype("float32")


@pytest.mark.parametrize(
    ("partitioner", "shape", "pieces"),
    [
        (fixed_shards(2), (10, 3), 2),
        (fixed_shards(5), (3,), 3),
        (min_size(4, max_shards=2), (6, 1), 2),
        (min_size(4, max_shards=10), (6, 1), 6),
        (min_size(256 << 10, max_shards=100), (1024, 1024), 16),
        (min_size(256 << 10), (1024, 1024), 7),
        (min_size(1000), (10,), 1),
        (min_size(8, max_shards=10), (3,), 1),
        (min_size(4), (0, 3), 1),
        (max_size(4), (6, 1), 6),
        (max_size(4, max_shards=2), (6, 1), 2),
        (max_size(1024), (6, 1), 1),
        (max_size(1), (2, 100), 2),
        (max_size(4), (3, 0), 1),
    ],
)
def test_the_number_of_pieces(partitioner, shape, pieces):
    assert partitioner(shape, F32, 7) == pieces


@given(rows=st.integers(1, 300), columns=st.integers(1, 9), size=st.integers(1, 5000), most=st.integers(1, 40))
def test_no_piece_is_smaller_than_the_least_or_larger_than_the_largest(rows, columns, size, most):
    shape, row = (rows, columns), columns * 4
    least = min_size(size, most)(shape, F32, 1)
    assert least == 1 or min(row_sizes(rows, least)) * row >= size
    largest = max_size(size)(shape, F32, 1)
    assert max(row_sizes(rows, largest)) * row <= max(size, row)


def test_sizes_differ_by_one_at_most_the_larger_first():
    assert row_sizes(13, 5) == [3, 3, 3, 2, 2]


def test_four_variables_on_three_ps():
    assert [ps for ps, _ in place([((2,), F32)] * 4, num_ps=3, partitioner=fixed_shards(1))] == [0, 1, 2, 0]


def test_pieces_cover_each_leaf_and_go_on_round_the_servers():
    leaves = [((5, 2), F32), ((), F32), ((3,), F32)]
    pieces = place(leaves, num_ps=2, partitioner=fixed_shards(3), whole=[False, False, True])
    assert [(rows.of, rows.start, rows.stop, ps) for ps, rows in pieces] == [
        (0, 0, 2, 0),
        (0, 2, 4, 1),
        (0, 4, 5, 0),
        (1, 0, None, 1),
        (2, 0, None, 0),
    ]


def test_by_bytes_each_goes_where_least_is():
    leaves = [((100,), F32), ((10,), F32), ((20,), F32), ((100,), F32)]
    assert [ps for ps, _ in place(leaves, num_ps=2, partitioner=fixed_shards(1), placement="bytes")] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fixed_shards(0), r"jdist\.ps\.fixed_shards: `n` is 0; it must be a whole number, 1 or more"),
        (lambda: min_size(0), r"jdist\.ps\.min_size: `size_bytes` is 0"),
        (lambda: max_size(1, max_shards=0), r"jdist\.ps\.max_size: `max_shards` is 0"),
        (lambda: max_size(None), r"`size_bytes` is None"),
        (
            lambda: place([((2,), F32)], num_ps=1, partitioner=lambda *_: 3),
            r"`partitioner\(...\)` is 3; it must be a whole number from 1 to 2. The leaf has the shape \(2,\)",
        ),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(StrategyError, match=message):
        make()
