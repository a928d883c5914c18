"""What tests of replicas share."""

import pytest

from tests.toys import TRANSFORMS


@pytest.fixture(params=["shard_map", "pmap"])
def two(request):
    return TRANSFORMS[request.param]
