"""The model of a step's time."""

import dataclasses

import pytest

from jdist.plan.collectives import BETWEEN_SLICES, Collective
from jdist.plan.hardware import Chip
from jdist.plan.roofline import estimate

CHIP = Chip(
    name="x",
    kinds=("X",),
    hbm_bytes=2**30,
    hbm_bytes_per_s=1e9,
    flops_per_s=1e12,
    link_bytes_per_s=1e8,
    domain_chips=8,
    network_bytes_per_s=1e7,
    source="https://example.org",
)
GRADIENTS = Collective(kind="all-reduce", axes="replica", groups=1, group_size=8, count=1, bytes=10**8, certain=True)


def model(chips, collectives=(GRADIENTS,), chip=CHIP, flops=2e12, memory_bytes=1e9):
    return estimate(chip, flops=flops, memory_bytes=memory_bytes, exchanged=collectives, chips=chips)


def test_the_slower_of_compute_and_memory_bounds():
    assert (model(8).compute_s, model(8).bound) == (2.0, "compute")
    assert (model(8, flops=1e11).compute_s, model(8, flops=1e11).bound) == (1.0, "memory")


def test_an_all_reduce_sends_twice_all_but_a_share():
    assert model(8).exchange_s == pytest.approx(2 * 7 / 8)
    assert model(2).exchange_s == pytest.approx(1.0)
    assert model(8).step_s == pytest.approx(2 + 2 * 7 / 8)
    assert model(8).exchange_share == pytest.approx(1.75 / 3.75)


@pytest.mark.parametrize(
    ("kind", "seconds"), [("all-gather", 7 / 8), ("reduce-scatter", 7 / 8), ("collective-permute", 1.0)]
)
def test_other_kinds_send_less(kind, seconds):
    assert model(8, [dataclasses.replace(GRADIENTS, kind=kind)]).exchange_s == pytest.approx(seconds)


def test_beyond_the_links_comes_the_network():
    across = 2 * 3 / 4 * 1e8 / 8 / 1e7  # four domains of eight, each chip with an eighth of the bytes
    assert model(32).exchange_s == pytest.approx(2 * 7 / 8 + across)
    unknown = model(32, chip=dataclasses.replace(CHIP, network_bytes_per_s=None))
    assert (unknown.exchange_s, unknown.step_s, unknown.exchange_share) == (None, None, None)


def test_messages_between_slices_are_not_counted_twice():
    between = dataclasses.replace(GRADIENTS, kind=BETWEEN_SLICES)
    assert model(16, [GRADIENTS, between]) == model(16)


def test_without_exchange_the_share_is_nothing():
    assert model(512, ()).exchange_share == 0.0
