"""Which leaves make one pack."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdist.errors import StrategyError
from jdist.reduction import bucketed
from jdist.reduction.bucketed import packs


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([40, 80, 20, 160], 50, [[40, 80], [20, 160]]),
        ([40, 80, 20, 160], 0, [[40, 80, 20, 160]]),
        ([40, 80, 20, 160], 40, [[40], [80], [20, 160]]),
        ([40, 80, 20, 160], 1000, [[40, 80, 20, 160]]),
        ([0, 5, 0], 5, [[0, 5], [0]]),
        ([], 50, []),
        ([], 0, []),
    ],
)
def test_closed_once_full(sizes, limit, expected):
    assert [[sizes[i] for i in pack] for pack in packs(sizes, limit)] == expected


@given(st.lists(st.integers(0, 300)), st.integers(1, 500))
def test_in_order_and_full_but_not_fuller_than_need_be(sizes, limit):
    made = packs(sizes, limit)
    assert [i for pack in made for i in pack] == list(range(len(sizes)))
    filled = [[sizes[i] for i in pack] for pack in made]
    assert all(sum(pack[:-1]) < limit for pack in filled)  # it was still open when its last leaf came
    assert all(sum(pack) >= limit for pack in filled[:-1])


@pytest.mark.parametrize("value", [-1, 1.5, "50", None, True])
def test_a_limit_that_is_none_is_refused(value):
    with pytest.raises(StrategyError, match=r"`bytes_per_pack` is .* whole number of bytes, 0 or more"):
        bucketed(value)
