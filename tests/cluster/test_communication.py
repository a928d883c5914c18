import pytest

from jdist import CommunicationOptions
from jdist.errors import StrategyError


def test_what_counts_when_nothing_is_said():
    options = CommunicationOptions()
    assert (options.bytes_per_pack, options.implementation) == (0, "auto")
    assert options.timeout_s + 2 * options.timeout_s / 5 < 20  # a loss is noticed within 20 s


@pytest.mark.parametrize("seconds", [1, 2.5, 3600])
def test_seconds_that_are_allowed(seconds):
    assert CommunicationOptions(timeout_s=seconds, start_timeout_s=seconds).timeout_s == seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bytes_per_pack": -1}, r"`bytes_per_pack` is -1; it must be a whole number of bytes, 0 or more"),
        ({"bytes_per_pack": 1.5}, r"`bytes_per_pack` is 1\.5"),
        ({"bytes_per_pack": True}, r"`bytes_per_pack` is True"),
        ({"timeout_s": 0}, r"`timeout_s` is 0; it must be a number of seconds, 1 or more"),
        ({"timeout_s": 0.5}, r"`timeout_s` is 0\.5"),
        ({"timeout_s": float("nan")}, r"`timeout_s` is nan"),
        ({"timeout_s": "10"}, r"`timeout_s` is '10'"),
        ({"start_timeout_s": float("inf")}, r"`start_timeout_s` is inf"),
        ({"start_timeout_s": True}, r"`start_timeout_s` is True"),
        ({"implementation": "mpi"}, r"`implementation` is 'mpi'; it must be one of 'auto', 'ring', 'nccl'"),
        ({"implementation": "ring", "bytes_per_pack": 1}, r'`implementation` "ring" sends all gradients as one'),
    ],
)
def test_what_is_not_right_is_named(options, message):
    with pytest.raises(StrategyError, match=message):
        CommunicationOptions(**options)
