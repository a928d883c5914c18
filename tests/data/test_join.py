"""The rows of several batches as one."""

import numpy as np
import pytest

from jdist.data.leaves import join
from jdist.errors import BatchError


def test_rows_follow_each_other_in_new_memory():
    first, second = {"x": np.zeros((2, 3)), "y": np.arange(2)}, {"x": np.ones((1, 3)), "y": np.arange(1)}
    joined = join([first, second])
    assert joined["x"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert joined["y"].tolist() == [0, 1, 0]
    assert not np.shares_memory(join([first])["x"], first["x"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": np.zeros(2, np.float32)}, r"differ: in batch 1 \(from 0\) .*\['x'\] was"),
        ({"x": np.zeros((2, 1), int)}, r"differ: in batch 1 \(from 0\) .*\['x'\] was"),
        ({"y": np.arange(2)}, r"differ: in batch 1 \(from 0\) .*\['x'\] is missing"),
        (np.arange(2), r"differ: in batch 1 \(from 0\) .*\['x'\] is missing"),
        ({"x": np.arange(2), "y": np.arange(3)}, "must agree on their leading"),
    ],
)
def test_batches_that_differ_in_more_than_their_rows_are_refused(other, message):
    with pytest.raises(BatchError, match=message):
        join([{"x": np.arange(2)}, other])
