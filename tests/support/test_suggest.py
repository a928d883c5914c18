"""The name that was probably meant."""

import pytest

from jdist.support.suggest import did_you_mean


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("wroker", " Did you mean 'worker'?"), ("WORKER", " Did you mean 'worker'?"), ("zebra", ""), (None, ""), (3, "")],
)
def test_the_nearest_is_named_and_nothing_where_none_is_near(name, sentence):
    assert did_you_mean(name, ["chief", "worker"]) == sentence
