"""What `--topology` may say, and a config's strategy on those devices."""

import jax
import pytest

from jdist.errors import DeviceError, StrategyError
from jdist.experiment.config import PlatformSection
from jdist.plan.target import Target, configure_platform, find_target_devices, parse_target, strategy_on


@pytest.mark.parametrize(
    ("name", "platform", "count"),
    [
        ("cpu:8", "cpu", 8),
        ("cpu", "cpu", None),
        ("gpu", "gpu", None),
        ("gpu:4", "gpu", 4),
        ("v5p:8x8x8", "tpu", None),
        ("v5e-16", "tpu", None),
    ],
)
def test_targets(name, platform, count):
    target = parse_target(name)
    assert (target.name, target.platform, target.count) == (name, platform, count)
    assert target.is_here == (platform != "tpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cpu:0", r"--topology is 'cpu:0'; it must be a TPU such as \"v5e:2x4\".*\"cpu:8\"; \"gpu\""),
        (
            "v5e-12",
            r"'v5e-12': no slice of v5e has that size, which counts chips\. Sizes: 1, 4, 8, 16, 32, 64, 128, 256; or",
        ),
        ("v4-4", r"'v4-4': no slice of v4 has that size, which counts TensorCores, two a chip\. Sizes: 8, 16, 32, "),
        ("gpus", r"Did you mean 'gpu'\?"),
        ("v5p", r"--topology is 'v5p'; it must be .* Did you mean 'v5p:8x8x8'\?"),
        ("V5E:2x4", r"unknown TPU 'V5E'\. Did you mean 'v5e:2x4'\?"),
        ("CPU:8", r"--topology is 'CPU:8'; it must be .* Did you mean 'cpu:8'\?"),
        ("v5q:2x4", r"unknown TPU 'v5q'\. Did you mean 'v5p:2x4'\?"),
        ("v5e:eight", r"'v5e:eight' names no topology.*Did you mean 'v5e:2x4'\?"),
        ("cpu:99999", r"--topology is 'cpu:99999'; a process has at most 2,048 virtual CPU devices.*cpu:2048 or less"),
    ],
)
def test_what_is_no_target(name, message):
    with pytest.raises(DeviceError, match=message):
        parse_target(name)


def test_devices_that_are_here():
    assert find_target_devices(parse_target("cpu:3")) == tuple(jax.devices("cpu")[:3])
    with pytest.raises(DeviceError, match=r"--topology cpu:9: there are only 8 cpu devices here"):
        find_target_devices(parse_target("cpu:9"))
    with pytest.raises(DeviceError, match=r"--topology gpu: JAX finds no gpu here"):
        find_target_devices(parse_target("gpu"))


def test_a_process_that_has_enough_devices_is_left_alone():
    before = jax.device_count()
    configure_platform(parse_target("cpu:4"), PlatformSection(cpu_devices=2))
    configure_platform(parse_target("v5e:2x4"), PlatformSection())
    assert jax.device_count() == before


class TestStrategies:
    target = parse_target("cpu:4")
    devices = tuple(jax.devices("cpu")[:4])

    def test_the_configs_strategy_takes_the_targets_devices(self):
        made = strategy_on(self.target, self.devices, "mirrored", devices=["gpu:0"], transform="jit", axis="batch")
        assert (made.devices, made.transform, made.axes, made.topology) == (self.devices, "jit", ("batch",), None)
        assert strategy_on(self.target, self.devices, "one_device", device="gpu:0").devices == self.devices[:1]
        assert strategy_on(self.target, self.devices, "tpu", topology="v5e:2x4").devices == self.devices
        assert strategy_on(self.target, self.devices, "default").mesh is None

    @pytest.mark.parametrize(
        ("options", "reduction"),
        [
            ({}, "psum"),
            ({"communication": {"bytes_per_pack": 1000}}, "bucketed(1000)"),
            ({"communication": {"implementation": "ring"}}, "ring"),
            ({"all_reduce": "hierarchical"}, "hierarchical(4, 1)"),
        ],
    )
    def test_multi_worker_sums_as_it_would_in_a_run(self, options, reduction):
        made = strategy_on(self.target, self.devices, "multi_worker", axis="batch", **options)
        assert (made.name, made.devices, made.axes) == ("multi_worker", self.devices, ("batch",))
        assert made.reduction.name == reduction

    def test_what_cannot_be_compiled_for_devices_that_are_not_here(self):
        away = Target(name="v5e:2x4", platform="tpu")
        assert strategy_on(away, self.devices, "mirrored").topology == "v5e:2x4"
        with pytest.raises(StrategyError, match=r"'default' takes no devices.*strategy\.name=mirrored"):
            strategy_on(away, self.devices, "default")
        with pytest.raises(StrategyError, match=r'"pmap".*say "shard_map"'):
            strategy_on(away, self.devices, "mirrored", transform="pmap")
