"""The processes that the tests of a file share."""

import pytest

from tests.ps.real_cluster import Cluster


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture
def cluster(processes):
    """Two workers and two servers, all of which run."""
    processes.ready()
    return processes
