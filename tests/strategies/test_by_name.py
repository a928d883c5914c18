"""Building strategies, by function and by name."""

import inspect
from typing import get_type_hints

import jax
import numpy as np
import pytest

import jdist
from jdist.errors import DeviceError, StrategyError
from jdist.strategies.by_name import STRATEGIES, StrategyKeywords

CPUS = jax.devices("cpu")
NAMES_OF_CPU_3 = [
    "cpu:3",
    "CPU:3",
    "/device:CPU:3",
    "device:cpu:3",
    "/physical_device:CPU:3",
    "/job:localhost/replica:0/task:0/device:CPU:3",
]


def test_default_is_one_value():
    assert jdist.default() is jdist.default()
    assert jdist.default() is jdist.make_strategy("default")


@pytest.mark.parametrize("device", [*NAMES_OF_CPU_3, CPUS[3]])
def test_one_device_takes_devices_and_names(device):
    strategy = jdist.one_device(device)
    assert strategy.devices == (CPUS[3],)
    assert dict(strategy.mesh.shape) == {"replica": 1}


def test_one_device_names_its_axis():
    assert jdist.one_device("cpu:1", axis="batch").axes == ("batch",)
    assert jdist.one_device().axes == jdist.mirrored().axes
    with pytest.raises(StrategyError, match=r"`axis` is 'my axis'; it must be a name"):
        jdist.one_device(axis="my axis")


def test_without_a_number_the_first_device_is_meant():
    assert jdist.one_device().devices == jdist.one_device("cpu").devices == (CPUS[0],)


def test_mirrored_takes_all_devices_or_those_named_in_that_order():
    assert jdist.mirrored().devices == tuple(CPUS)
    assert jdist.mirrored(["cpu:5", CPUS[2]]).devices == (CPUS[5], CPUS[2])
    assert jdist.mirrored("cpu:1").devices == jdist.mirrored(CPUS[1]).devices == (CPUS[1],)
    assert jdist.mirrored(d for d in CPUS[:2]).num_replicas == 2


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu:8"], r"cpu:8 does not exist; JAX sees 8 device\(s\).*cpu:7.*device_count=9"),
        (["tpu:0"], r"JAX has no platform 'tpu' \(asked for 'tpu:0'\)\. It sees: cpu:0, "),
        (["gpu"], r"JAX has no platform 'gpu'"),
        (["cpu:-1"], r"'cpu:-1' names no device.*\"gpu:0\" or \"cpu:3\".*JAX sees: cpu:0, "),
        (["cpu:one"], r"'cpu:one' names no device"),
        ([""], r"'' names no device"),
        ([3], r"3 names no device"),
        ([None], r"None names no device"),
        ([], r"`devices` is empty; name at least one"),
        (["cpu:1", "cpu:0", CPUS[1]], r"`devices` names cpu:1 twice"),
    ],
)
def test_devices_that_cannot_serve_are_refused(devices, message):
    with pytest.raises(DeviceError, match=message):
        jdist.mirrored(devices)


def test_a_number_of_devices_is_refused_with_what_to_write():
    for number in (2, np.array(2)):
        with pytest.raises(DeviceError, match=r"2\)?; it must be a list of devices"):
            jdist.mirrored(number)


def test_one_device_refuses_as_well():
    with pytest.raises(DeviceError, match="cpu:99 does not exist"):
        jdist.one_device("cpu:99")
    with pytest.raises(DeviceError, match="names no device"):
        jdist.one_device(["cpu:0"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": "shardmap"}, r"`transform` is 'shardmap'; it must be one of 'shard_map', 'pmap', 'jit'"),
        ({"transform": None}, r"`transform` is None"),
        ({"axis": "my axis"}, r"`axis` is 'my axis'; it must be a name"),
        ({"axis": ("a", "b")}, r"`axis` is \('a', 'b'\)"),
        ({"axis": ""}, r"`axis` is ''"),
        ({"all_reduce": "rings"}, r"`all_reduce` is 'rings'. Did you mean 'ring'\? Allowed are"),
    ],
)
def test_mirrored_refuses_options_with_what_is_allowed(options, message):
    with pytest.raises(StrategyError, match=message):
        jdist.mirrored(**options)


def test_multi_worker_refuses_an_all_reduce_for_another_number_of_replicas():
    with pytest.raises(StrategyError, match=r"hierarchical\(3, 2\) is for 6 replicas, but there are 8"):
        jdist.multi_worker(all_reduce={"name": "hierarchical", "inner": 3, "outer": 2})


class TestByName:
    def test_every_strategy_can_be_named(self):
        for name in STRATEGIES.keys() - {"tpu"}:  # which needs a TPU: tests/strategies/test_tpu.py
            assert jdist.make_strategy(name).name == name

    def test_options_are_those_of_the_function(self):
        made = jdist.make_strategy("mirrored", devices=["cpu:0", "cpu:1"], transform="jit", axis="batch")
        assert (made.num_replicas, made.transform, made.axes) == (2, "jit", ("batch",))
        assert jdist.make_strategy("one_device", device="cpu:2").devices == (CPUS[2],)

    def test_the_keywords_for_editors_are_those_of_the_functions(self):
        known = {name for make in STRATEGIES.values() for name in inspect.signature(make).parameters}
        listed = set(get_type_hints(StrategyKeywords))
        assert not known - listed, f"add to StrategyKeywords in jdist/strategies/by_name.py: {sorted(known - listed)}"
        assert not listed - known, f"no strategy has, so take out of StrategyKeywords: {sorted(listed - known)}"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (
                "miror",
                rf"unknown strategy 'miror'\. Did you mean 'mirrored'\? Known: {', '.join(STRATEGIES)}\.",
            ),
            ("onedevice", r"Did you mean 'one_device'\?"),
            ("zzz", rf"unknown strategy 'zzz'\. Known: {', '.join(STRATEGIES)}\."),
            (None, r"unknown strategy None\."),
            (["mirrored"], r"unknown strategy \['mirrored'\]\. Did you mean 'mirrored'\?"),
        ],
    )
    def test_an_unknown_name_lists_the_known_and_the_nearest(self, name, message):
        with pytest.raises(StrategyError, match=message):
            jdist.make_strategy(name)

    def test_an_unknown_option_lists_the_known_and_the_nearest(self):
        message = (
            r"'mirrored' has no option 'device'\. Did you mean 'devices'\? It has: devices, transform, all_reduce, axis"
        )
        with pytest.raises(StrategyError, match=message):
            jdist.make_strategy("mirrored", device="cpu:0")
        with pytest.raises(StrategyError, match=r"'default' has no option 'axis'\. It has none\."):
            jdist.make_strategy("default", axis="batch")
