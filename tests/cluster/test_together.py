"""An error of one process is raised on all."""

import pytest

from jdist.cluster.runtime import alone, together
from jdist.errors import CheckpointError, PeerFailedError


class Cluster:
    """A cluster of which this is process 0, and the others say `others`."""

    def __init__(self, *others):
        self.others, self.said = list(others), []

    def exchange(self, what, value, timeout_s):
        self.said.append(value)
        return [value, *self.others]


def test_nothing_is_raised_where_all_went_well():
    cluster = Cluster(None)
    with together("a save", 1.0, cluster):
        pass
    assert cluster.said == [None]


def test_ones_own_error_is_told_and_raised():
    cluster = Cluster(["another error", 1])
    with pytest.raises(CheckpointError, match="the disk is full"), together("a save", 1.0, cluster):
        raise CheckpointError("the disk is full")
    assert cluster.said == [["the disk is full", 1]]


def test_anothers_error_is_raised_with_its_name():
    with (
        pytest.raises(PeerFailedError, match=r"^process 2: no such key$") as met,
        together("a run", 1.0, Cluster(None, ["no such key", 2])),
    ):
        pass
    assert met.value.exit_code == 2


def test_alone_there_is_nobody_to_tell():
    with pytest.raises(ZeroDivisionError), together("a save", 1.0, alone()):
        _ = 1 / 0
