"""The data file of chips."""

import pytest

from jdist.support.chips import chip_of, load_chips


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e", "A100-80GB", "H100", "H200"])
def test_each_chip_has_figures_and_a_source(name):
    chip = load_chips()[name]
    assert chip.source.startswith("https://")
    assert 8 * 2**30 <= chip.hbm_bytes <= 300 * 2**30
    assert 1e11 < chip.hbm_bytes_per_s < 1e13
    assert 1e13 < chip.flops_per_s < 1e16
    assert 1e9 < chip.link_bytes_per_s < chip.hbm_bytes_per_s
    assert chip.network_bytes_per_s is None or chip.network_bytes_per_s < chip.link_bytes_per_s
    assert 1e9 < chip.host_bytes_per_s < chip.link_bytes_per_s
    assert chip.domain_chips >= 8


def test_a_chip_is_found_by_what_jax_calls_it():
    for name, chip in load_chips().items():
        assert all(chip_of(kind) == chip for kind in chip.kinds), name
    assert chip_of("TPU v5 lite").name == "v5e"
    assert chip_of("TPU v5").name == "v5p"
    assert chip_of("cpu") is None
