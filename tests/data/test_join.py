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
    "other", [{"x": np.zeros(2, np.float32)}, {"y": np.arange(2)}, {"x": np.zeros((2, 1), int)}, np.arange(2)]
)
def test_batches_that_differ_in_more_than_their_rows_are_refused(other):
    with pytest.raises(BatchError, match=r"differ: in number 1 \(from 0\) .*\['x'\] (was|is missing)"):
        join([{"x": np.arange(2)}, other])


def test_leaves_that_disagree_on_the_rows_are_refused():
    with pytest.raises(BatchError, match="must agree on their leading"):
        join([{"x": np.arange(2)}, {"x": np.arange(2), "y": np.arange(3)}])
