"""What tests of steps share."""

import pytest

from tests.toys import EVERY


@pytest.fixture(params=EVERY)
def strategy(request):
    return EVERY[request.param]
