"""`jdist plan` for GPUs that are not here."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jdist
from jdist.errors import ConfigError, JDistError
from jdist.plan.collectives import Collective, collectives
from jdist.plan.compile import Memory
from jdist.plan.hlo import bytes_accessed, overlap, parse, recomputed
from jdist.plan.roofline import estimate
from jdist.plan.table import Plan, show
from jdist.strategies.gpu_topology import GPUS
from jdist.support.chips import load_chips
from tests.plan.plan_toy import config_file
from tests.strategies.gpu_steps import needs_compiler

CONFIG = "configs/digits.yaml"


def plan(topology, *overrides):
    return jdist.plan.plan_config(CONFIG, "task.options.width=4", *overrides, topology=topology)


def test_every_described_chip_has_public_figures():
    kinds = {kind: chip for chip in load_chips().values() for kind in chip.kinds}
    for gpu in GPUS.values():
        assert abs(kinds[gpu.kind].hbm_bytes / gpu.memory_bytes - 1) < 0.08
        assert abs(kinds[gpu.kind].hbm_bytes_per_s / gpu.memory_bytes_per_s - 1) < 0.05


class TestTheModel:
    H100 = load_chips()["H100"]

    def seconds(self, chips=32, **fields):
        collective = dict(
            kind="all-reduce", axes="replica", groups=1, group_size=32, count=1, bytes=10**9, certain=True
        )
        exchanged = [Collective(**(collective | fields))]
        return estimate(
            self.H100, products={}, memory_bytes=0, exchanged=exchanged, chips=chips, domain_chips=8
        ).exchange_s

    def test_what_stays_within_a_host_never_crosses(self):
        within = 2 * 7 / 8 * 1e9 / self.H100.link_bytes_per_s
        assert self.seconds(groups=4, group_size=8, per_domain=8) == pytest.approx(within)
        assert self.seconds(groups=4, group_size=8, per_domain=8, chips=512) == pytest.approx(within)

    def test_what_has_one_gpu_a_host_crosses_whole(self):
        across = 2 * 3 / 4 * 1e9 / self.H100.network_bytes_per_s
        assert self.seconds(groups=8, group_size=4, per_domain=1) == pytest.approx(across)

    def test_what_goes_over_all_crosses_by_a_share_of_each_gpu(self):
        within = 2 * 7 / 8 * 1e9 / self.H100.link_bytes_per_s
        across = 2 * 3 / 4 * 1e9 / 8 / self.H100.network_bytes_per_s
        assert self.seconds(per_domain=8) == pytest.approx(within + across)
        assert self.seconds(per_domain=None) == pytest.approx(within + across)


def test_bytes_accessed_are_near_the_compilers_own_count():
    def step(x, w):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    shapes = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2
    compiled = jax.jit(jax.grad(step, argnums=1)).lower(*shapes).compile()
    counted = bytes_accessed(parse(compiled.as_text()))
    assert 0.5 < counted / compiled.cost_analysis()["bytes accessed"] < 2


def test_of_an_array_that_a_loop_slices_the_slices_count():
    def step(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x * w), None), x, ws)[0]

    trips = 50
    shapes = [jax.ShapeDtypeStruct((1000,), jnp.float32), jax.ShapeDtypeStruct((trips, 1000), jnp.float32)]
    counted = bytes_accessed(parse(jax.jit(step).lower(*shapes).compile().as_text()))
    assert trips * 4000 <= counted <= 12 * trips * 4000  # not trips * trips


MEMORY = Memory(arguments=1, outputs=1, aliased=1, temporaries=1, code=0, host=0)
FUSIONS = """HloModule m, is_scheduled=true, num_partitions=8
%fused_slice (p: f32[1000]) -> f32[10] {
  %p = f32[1000]{0} parameter(0)
  %flat = f32[1000,1]{1,0} bitcast(%p)
  ROOT %s = f32[10,1]{1,0} slice(%flat), slice={[0:10], [0:1]}
}
%fused_rows (table: f32[1000], rows: s32[5]) -> f32[5] {
  %table = f32[1000]{0} parameter(0)
  %rows = s32[5]{0} parameter(1)
  ROOT %g = f32[5]{0} gather(%table, %rows), offset_dims={}
}
%fused_put (old: f32[1000], new: f32[10], at: s32[]) -> f32[1000] {
  %old = f32[1000]{0} parameter(0)
  %new = f32[10]{0} parameter(1)
  %at = s32[] parameter(2)
  %there = f32[10]{0} dynamic-slice(%old, %at), dynamic_slice_sizes={10}
  %sum = f32[10]{0} add(%there, %new)
  ROOT %u = f32[1000]{0} dynamic-update-slice(%old, %sum, %at)
}
ENTRY %main (a: f32[1000], b: f32[10], i: s32[], r: s32[5]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  %r = s32[5]{0} parameter(3)
  LINE
}
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%x = f32[10]{0} fusion(%a), kind=kLoop, calls=%fused_slice", 40 + 40),
        ("%x = f32[5]{0} fusion(%a, %r), kind=kLoop, calls=%fused_rows", 20 + 20 + 20),
        ("%x = f32[1000]{0} fusion(%a, %b, %i), kind=kLoop, calls=%fused_put", 40 + 40 + 4 + 40),
        ("%x = f32[10]{0} slice(%a), slice={[0:10]}", 40 + 40),
        ("%x = f32[1000]{0} dynamic-update-slice(%a, %b, %i)", 40 + 40),
        ("%x = f32[1000]{0} all-reduce-start(%a), replica_groups={}", 4000 + 4000),
        ("%x = ((f32[1000]{0}), f32[125]{0}) reduce-scatter-start(%a), replica_groups={}", 4000 + 500),
        ("%x = (f32[10]{0}, f32[80]{0}) all-gather-start(%b), replica_groups={}", 40 + 320),
    ],
)
def test_what_an_instruction_reads_and_writes(line, expected):
    assert bytes_accessed(parse(FUSIONS.replace("LINE", line))) == expected


def test_in_flight_of_a_gather_is_its_result():
    lines = """%x = (f32[10]{0}, f32[80]{0}) all-gather-start(%b), replica_groups={}
  %y = f32[80]{0} all-gather-done(%x)"""
    module = parse(FUSIONS.replace("LINE", lines))
    (gather,) = collectives(module, {"replica": 8})
    assert overlap(module) == (gather.bytes, 0) == (320, 0)


def test_results_computed_twice_are_counted_and_said():
    lines = "%x.remat = f32[1000]{0} negate(%a)\n  %y.remat2 = f32[1000]{0} abs(%a)\n  %z = f32[1000]{0} abs(%a)"
    assert recomputed(parse(FUSIONS.replace("LINE", lines))) == 2
    found = Plan(target="h100:8", device_kind="H100", num_devices=8, global_batch=8, summary="", capacity=None)
    assert "computed twice" not in show(dataclasses.replace(found, memory=MEMORY))
    assert "has 2 results computed twice" in show(dataclasses.replace(found, memory=MEMORY, recomputed=2))


class TestThePeak:
    @pytest.fixture
    def made(self, tmp_path):
        """A plan for the CPUs that are here, with a chip's figures put in."""

        def make(chip, *overrides, chips=(8,)):
            found = jdist.plan.plan_config(config_file(tmp_path), *overrides, topology="cpu:2")
            times = [
                estimate(load_chips()[chip], products=found.products, memory_bytes=0, exchanged=[], chips=n)
                for n in chips
            ]
            found = dataclasses.replace(
                found,
                chip=load_chips()[chip],
                estimates=tuple(times),
                domain_chips=8,
                device_kind=load_chips()[chip].kinds[0],
            )
            return found, jdist.plan.show(found)

        return make

    def test_it_follows_the_precision_of_the_config(self, made):
        found, text = made("H100")
        assert set(found.products) == {"float32"}
        assert (
            "H100: 494.5 TFLOP/s TF32 (float32 is multiplied in TF32 by JAX's default matmul precision), memory" in text
        )
        half, text = made("H100", "train.precision=bf16")
        assert set(half.products) == {"16 bits"}
        assert half.flops == found.flops
        assert "H100: 989 TFLOP/s bfloat16, memory" in text
        assert half.estimates[0].device_s == pytest.approx(found.estimates[0].device_s / 2)

    def test_a_mixture_says_what_each_is_for(self, made):
        found, _ = made("H100")
        mixed = dataclasses.replace(found, products={"16 bits": 30.0, "float32": 10.0})
        text = jdist.plan.show(mixed)
        assert "989 TFLOP/s bfloat16 for 75.0% of the FLOPs and 494.5 TFLOP/s TF32 for 25.0% of the FLOPs (" in text

    def test_of_a_tpu_float32_is_multiplied_in_bfloat16_and_said_to_be(self, made):
        _, text = made("v5p")
        assert "v5p: 459 TFLOP/s bfloat16 (float32 is multiplied in bfloat16 by JAX's default matmul precision)" in text
        assert "a TPU keeps small ones on the chip" in text

    def test_the_network_is_there_where_a_row_crosses_it(self, made):
        assert "network 50 GB/s each way of a chip" in made("H100", chips=(8, 64))[1]
        _, text = made("H100")
        assert "network 50" not in text
        assert "a TPU" not in text


@needs_compiler
class TestAPlan:
    def test_of_one_host(self):
        found = plan("h100:8")
        assert (found.num_devices, found.device_kind, found.domain_chips) == (8, "NVIDIA H100 80GB HBM3", 8)
        assert found.fits
        assert found.capacity == int(0.75 * GPUS["h100"].memory_bytes)
        text = jdist.plan.show(found)
        assert "the 75% of a GPU that JAX takes when it starts (XLA_CLIENT_MEM_FRACTION)" in text
        assert "1 of 8 within a host" in text
        assert ("asynchronous: " in text) == (found.in_flight_bytes > 0)  # JAX 0.12 has such small ones wait
        assert found.flops > 0
        assert found.bytes_moved > 0

    def test_of_several_hosts(self):
        found = plan("h100:4x8")
        assert {(c.kind, c.group_size, c.per_domain) for c in found.collectives} == {("all-reduce", 32, 8)}
        assert "1 of 32 between 4 hosts" in jdist.plan.show(found)
        seconds = {e.chips: e.exchange_s for e in found.estimates}
        assert seconds[8] < seconds[32] < seconds[4096]  # beyond a host it crosses the network

    def test_what_does_not_fit_is_refused(self, monkeypatch):
        found = plan("h100:8")
        small = dataclasses.replace(found, capacity=found.memory.total - 1)
        assert (small.fits, small.verdict) == (False, "does not fit")

    @pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
    def test_the_share_is_by_either_of_jaxs_variables(self, monkeypatch, name):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
        monkeypatch.setenv(name, "0.925")
        found = plan("h100:8")
        assert found.capacity == int(0.925 * GPUS["h100"].memory_bytes)
        assert f"the 92.5% of a GPU that JAX takes when it starts ({name})" in jdist.plan.show(found)

    def test_both_variables_are_refused_as_jax_does(self, monkeypatch):
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
        with pytest.raises(ConfigError, match=r"both limit JAX's memory.*unset XLA_PYTHON_CLIENT_MEM_FRACTION"):
            plan("h100:1")

    def test_an_empty_share_is_none(self, monkeypatch):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
        assert plan("h100:1").capacity == int(0.75 * GPUS["h100"].memory_bytes)

    @pytest.mark.parametrize("value", ["much", "0", "1.5", "nan"])
    def test_a_share_that_is_none(self, monkeypatch, value):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", value)
        with pytest.raises(ConfigError, match=r"XLA_PYTHON_CLIENT_MEM_FRACTION is '.*'; it must be a number above 0"):
            plan("h100:1")

    def test_a_sweep_finds_the_largest_batch(self, capsys, monkeypatch):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.00005")  # 4 MB
        from jdist.cli.main import main

        code = main(["plan", CONFIG, "--topology", "h100:2", "--sweep", "global_batch=64..16384"])
        printed = capsys.readouterr().out
        assert code == 0
        assert "largest that fits: " in printed
        assert "all that were tried fit" not in printed

    @pytest.mark.parametrize(
        ("strategy", "message"),
        [("parameter_server", "takes no devices"), ("central_storage", "which JAX does not describe for NVIDIA H100 ")],
    )
    def test_strategies_that_cannot_be_compiled_for(self, strategy, message):
        with pytest.raises(JDistError, match=message):
            plan("h100:8", f"strategy.name={strategy}")

    def test_pmap_is_refused(self):
        with pytest.raises(JDistError, match="JAX compiles only for devices that are here"):
            plan("h100:8", "strategy.transform=pmap")
