"""The model of a step's time."""

import dataclasses

import pytest

from jdist.plan.collectives import BETWEEN_SLICES, Collective
from jdist.plan.roofline import OF_BANDWIDTH, OF_PEAK, estimate
from jdist.support.chips import Chip, load_chips

CHIP = Chip(
    name="x",
    kinds=("X",),
    hbm_bytes=2**30,
    hbm_bytes_per_s=1e9,
    flops_per_s=1e12,
    link_bytes_per_s=1e8,
    domain_chips=8,
    network_bytes_per_s=1e7,
    host_bytes_per_s=1e6,
    source="https://example.org",
)
GRADIENTS = Collective(kind="all-reduce", axes="replica", groups=1, group_size=8, count=1, bytes=10**8, certain=True)


def model(chips, collectives=(GRADIENTS,), chip=CHIP, flops=2e12, memory_bytes=1e9, **more):
    return estimate(
        chip, products={"16 bits": flops}, memory_bytes=memory_bytes, exchanged=collectives, chips=chips, **more
    )


def of_kind(kind, size=10**8):
    return dataclasses.replace(GRADIENTS, kind=kind, bytes=size)


DEVICE_S = 2 / OF_PEAK + 1 / OF_BANDWIDTH  # of `model(8)`


def test_compute_and_memory_add_up_and_the_larger_bounds():
    assert (model(8).device_s, model(8).bound) == (pytest.approx(DEVICE_S), "compute")
    few = model(8, flops=1e11)
    assert (few.device_s, few.bound) == (pytest.approx(0.1 / OF_PEAK + 1 / OF_BANDWIDTH), "memory")


# From `jdist plan`, JAX 0.10.2, and a run each on one H100 (benchmarks/RESULTS.md).
@pytest.mark.parametrize(
    ("products", "memory_bytes", "measured_s"),
    [
        ({"16 bits": 15.69e12, "float32": 0.41e12}, 129.4e9, 0.0679),  # a transformer of 150 million parameters
        ({"16 bits": 23.78e12, "float32": 0.93e12}, 327.8e9, 0.185),  # GPT-2
        ({"16 bits": 6.01e12}, 102.2e9, 0.044),  # ResNet-50
    ],
)
def test_the_model_is_near_what_an_h100_took(products, memory_bytes, measured_s):
    chip = load_chips()["H100"]
    found = estimate(chip, products=products, memory_bytes=memory_bytes, exchanged=[], chips=1)
    assert 1 / 1.3 < found.device_s / measured_s < 1.3


def test_the_peak_is_that_of_the_products():
    chips = load_chips()
    rates = {
        name: [
            f"{rate / 1e12:g} {peak}" for rate, peak in map(chips[name].peak, ("16 bits", "float32", "float32 in full"))
        ]
        for name in ("H100", "A100-80GB", "V100", "v5p")
    }
    assert rates == {
        "H100": ["989 bfloat16", "494.5 TF32", "67 float32"],
        "A100-80GB": ["312 bfloat16", "156 TF32", "19.5 float32"],
        "V100": ["125 bfloat16", "15.7 float32", "15.7 float32"],
        "v5p": ["459 bfloat16"] * 3,
    }
    found = estimate(
        chips["H100"], products={"16 bits": 989e12, "float32": 989e12}, memory_bytes=0, exchanged=[], chips=1
    )
    assert found.device_s == pytest.approx((1 + 2) / OF_PEAK)


def test_an_all_reduce_sends_twice_all_but_a_share():
    assert model(8).exchange_s == pytest.approx(2 * 7 / 8)
    assert model(2).exchange_s == pytest.approx(1.0)
    assert model(8).step_s == pytest.approx(DEVICE_S + 1.75)
    assert model(8).exchange_share == pytest.approx(1.75 / (DEVICE_S + 1.75))


@pytest.mark.parametrize(
    ("kind", "seconds"), [("all-gather", 7 / 8), ("reduce-scatter", 7 / 8), ("collective-permute", 1.0)]
)
def test_other_kinds_send_less(kind, seconds):
    assert model(8, [of_kind(kind)]).exchange_s == pytest.approx(seconds)
    assert model(1, [of_kind(kind)]).exchange_s == 0


def test_beyond_the_links_comes_the_network():
    across = 2 * 3 / 4 * 1e8 / 8 / 1e7  # four domains of eight, each chip with an eighth of the bytes
    assert model(32).exchange_s == pytest.approx(2 * 7 / 8 + across)
    unknown = model(32, chip=dataclasses.replace(CHIP, network_bytes_per_s=None))
    assert (unknown.exchange_s, unknown.step_s, unknown.exchange_share) == (None, None, None)


@pytest.mark.parametrize("chips", [8, 16, 32, 4096])
def test_an_all_reduce_takes_as_long_in_its_two_halves(chips):
    halves = [of_kind("reduce-scatter"), of_kind("all-gather")]
    assert model(chips, halves).exchange_s == pytest.approx(model(chips).exchange_s)


@pytest.mark.parametrize(("kind", "bytes_across"), [("collective-permute", 1e8), ("all-to-all", 3 / 4 * 1e8)])
def test_what_is_not_put_together_crosses_as_it_is(kind, bytes_across):
    inside = model(8, [of_kind(kind)]).exchange_s
    assert model(32, [of_kind(kind)]).exchange_s == pytest.approx(inside + bytes_across / 1e7)


def test_the_links_of_several_slices_end_at_the_slice():
    def slices_of_four(chips, *between):
        return model(chips, [GRADIENTS, *between], domain_chips=4).exchange_s

    assert slices_of_four(4) == pytest.approx(2 * 3 / 4)
    assert slices_of_four(8) == pytest.approx(2 * 3 / 4 + 2 * 1 / 2 * 1e8 / 4 / 1e7)


@pytest.mark.parametrize(("kind", "factor"), [("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1)])
def test_messages_between_slices_are_what_crosses_the_network(kind, factor):
    """And nothing that the compiler put beside them within the slice."""
    inside = [GRADIENTS, of_kind("all-gather")]
    message = of_kind(kind + BETWEEN_SLICES, size=10**6)
    within = 2 * 3 / 4 + 3 / 4
    assert model(4, [*inside, message], domain_chips=4).exchange_s == pytest.approx(within)
    many = model(16, [*inside, message], domain_chips=4)
    assert many.exchange_s == pytest.approx(within + factor * 3 / 4 * 1e6 / 1e7)


def test_copies_to_the_host_take_their_time():
    assert model(8).host_s == 0
    # 8 MB of all chips together: with twice the chips each copies half of it.
    assert [model(chips, host_bytes=8e6).host_s for chips in (8, 16)] == [1.0, 0.5]
    assert model(8, host_bytes=8e6).step_s == pytest.approx(model(8).step_s + 1)
    unknown = model(8, host_bytes=8e6, chip=dataclasses.replace(CHIP, host_bytes_per_s=None))
    assert (unknown.host_s, unknown.step_s, unknown.exchange_share) == (None, None, None)


def test_without_exchange_the_share_is_nothing():
    assert model(512, ()).exchange_share == 0.0
    assert model(512, (), chip=dataclasses.replace(CHIP, network_bytes_per_s=None)).exchange_s == 0.0
