"""Sweeps over the global batch."""

from types import SimpleNamespace

import pytest

from jdist.errors import ConfigError
from jdist.plan.command import parse_sweep, sweep


@pytest.mark.parametrize(
    ("text", "batches"),
    [
        ("global_batch=256,128,128", [128, 256]),
        ("train.global_batch=64", [64]),
        ("global_batch=128..4096", [128, 256, 512, 1024, 2048, 4096]),
        ("global_batch=100..399", [100, 200]),
        ("global_batch=7..7", [7]),
    ],
)
def test_what_a_sweep_names(text, batches):
    assert parse_sweep(text) == batches


@pytest.mark.parametrize(
    "text", ["global_batch", "batch=1", "global_batch=0", "global_batch=8..4", "global_batch=0..4", ""]
)
def test_what_is_no_sweep(text):
    with pytest.raises(ConfigError, match=r"--sweep is .*global_batch=128,256,384 or global_batch=128\.\.4096"):
        parse_sweep(text)


@pytest.mark.parametrize("text", ["global_batch=64,99999999999999999999", "global_batch=1..9000000000000000000"])
def test_a_batch_beyond_all_limits_is_refused_before_anything_is_compiled(text):
    with pytest.raises(ConfigError, match=r"--sweep: global_batch is \d.*; a plan takes .* at most 2,147,483,647 rows"):
        parse_sweep(text)


def test_it_ends_where_a_batch_does_not_fit():
    plans = list(sweep([1, 2, 4, 8], lambda batch: SimpleNamespace(batch=batch, fits=batch < 4)))
    assert [plan.batch for plan in plans] == [1, 2, 4]


def test_a_memory_that_nobody_knows_does_not_end_it():
    assert len(list(sweep([1, 2, 4], lambda batch: SimpleNamespace(fits=None)))) == 3
