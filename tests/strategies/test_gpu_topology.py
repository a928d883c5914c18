"""GPUs that are not here: their names, what is refused, and JAX's CUDA plugin with and without a driver."""

from __future__ import annotations

import os
import subprocess
import sys
from math import prod

import jax
import jaxlib
import pytest

import jdist
from jdist.errors import DeviceError, StrategyError
from jdist.strategies import absent_plugins, gpu_topology
from jdist.strategies.gpu_topology import GPUS
from jdist.strategies.topology import parse_topology, topology_devices
from tests.strategies.gpu_steps import needs_compiler


@pytest.mark.parametrize(
    ("name", "shape", "domain"), [("h100:8", (1, 8), 8), ("h100:4x8", (4, 8), 8), ("a100-80gb:2x16", (2, 16), 16)]
)
def test_the_parts_of_a_name(name, shape, domain):
    topology = parse_topology(name)
    assert (topology.platform, topology.shape, topology.domain_chips) == ("gpu", shape, domain)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", r"'h100' names no topology; .*Did you mean 'h100:8'\? Chips: .* GPUs: v100, a100-40gb, "),
        ("H100:4x8", r"Did you mean 'h100:4x8'\?"),
        ("H100:8", r"names no topology; .*\"h100:8\" for eight GPUs of one host.*Did you mean 'h100:8'\?"),
        ("h100:0", r"names no topology; .*Did you mean 'h100:8'\?"),
        ("h100:0x8", r"names no topology; .*Did you mean 'h100:8'\?"),
        ("h100:4x0", r"names no topology; .*Did you mean 'h100:8'\?"),
        ("h100:2x4x8", r"'h100:2x4x8': GPUs are counted by host, as \"h100:8\" .*Did you mean 'h100:8'\?$"),
        ("h100-80gb:4x8", r"Did you mean 'h100:4x8'\?"),
        ("a100:8", r"Did you mean 'a100-40gb:8'\?"),
        ("l4:4", r"names no topology; .* XLA publishes no description of l4 that its compiler takes\.$"),
        ("t4:4x8", r"unknown TPU 't4'\..* XLA publishes no description of t4 that its compiler takes\.$"),
    ],
)
@pytest.mark.parametrize("strategy", [jdist.mirrored, jdist.multi_worker, jdist.central_storage])
def test_a_name_that_is_none(strategy, name, message):
    with pytest.raises(DeviceError, match=message):
        strategy(topology=name)


def test_a_gpu_is_no_tpu():
    with pytest.raises(DeviceError, match=r"'h100:8', not a TPU; write jdist\.mirrored\(topology='h100:8'\)\."):
        jdist.tpu(topology="h100:8")


def test_two_places_are_refused():
    with pytest.raises(StrategyError, match="`devices` and `topology` both say where"):
        jdist.mirrored(jax.devices(), topology="h100:8")
    with pytest.raises(StrategyError, match="`cluster` and `topology` both say where"):
        jdist.multi_worker(
            jdist.cluster.ClusterSpec(jobs={"worker": ["a:1"]}, task_type="worker", task_index=0), topology="h100:8"
        )


def test_pmap_is_refused():
    with pytest.raises(StrategyError, match="`transform` is 'pmap'; it must be 'shard_map' or 'jit'"):
        jdist.mirrored(topology="h100:8", transform="pmap")


class TestThePlugin:
    def test_missing_one_sentence_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(absent_plugins, "installed_plugin", lambda: None)
        with pytest.raises(DeviceError, match=r"^compiling for h100 GPUs.* pip install 'jdist\[plan-gpu\]'\.$"):
            jdist.mirrored(topology="h100:8")

    def test_of_another_version(self, monkeypatch):
        monkeypatch.setattr(absent_plugins, "installed_plugin", lambda: "jax_plugins.xla_cuda12")
        monkeypatch.setattr(absent_plugins, "plugin_version", lambda _: "0.4.1")
        with pytest.raises(
            DeviceError, match=rf"plugin is 0\.4\.1 and jaxlib {jaxlib.__version__}; they must be of one version"
        ):
            jdist.mirrored(topology="h100:8")

    @needs_compiler
    def test_that_cannot_be_loaded_is_another_error(self, monkeypatch):
        def fail(*_, **__):
            raise jax.errors.JaxRuntimeError("INTERNAL: xla_cuda_plugin.so: file too short")

        monkeypatch.setattr(gpu_topology.topologies, "get_topology_desc", fail)
        with pytest.raises(
            DeviceError, match=r"^JAX's CUDA plugin, .* cannot be loaded: .*file too short.*--force-reinstall"
        ):
            jdist.mirrored(topology="h100:8")

    def test_a_driver_is_told_by_its_device_files(self, tmp_path):
        assert not absent_plugins.has_driver(tmp_path)
        (tmp_path / "nvidiactl").touch()
        assert absent_plugins.has_driver(tmp_path)

    def test_it_is_passed_over_only_without_a_driver(self, tmp_path, monkeypatch):
        name = "jax_plugins.xla_cuda12"
        monkeypatch.setattr(absent_plugins, "installed_plugin", lambda: name)
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev" / "nvidiactl").touch()
        absent_plugins.pass_over_plugin(dev=tmp_path / "dev")
        assert name not in sys.modules
        absent_plugins.pass_over_plugin(dev=tmp_path)
        assert sys.modules[name].initialize() is None
        monkeypatch.delitem(sys.modules, name)


@needs_compiler
class TestDevices:
    @pytest.mark.parametrize("chip", GPUS)
    def test_every_chip_can_be_described(self, chip):
        devices = topology_devices(f"{chip}:2x4")
        assert [d.process_index for d in devices] == [0] * 4 + [1] * 4
        assert {(d.platform, d.device_kind) for d in devices} == {("gpu", GPUS[chip].kind)}
        assert len(set(devices)) == 8

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("h100:16", r"h100:16 is one host with 16 GPUs, but .* at most 8; .* write h100:2x8\."),
            ("h100:12", r"write h100:2x6\."),
            ("h100:4x16", r"h100:4x16 is 4 hosts with 16 GPUs each, but .* write h100:8x8\."),
        ],
    )
    def test_more_than_a_host_holds_is_a_warning(self, name, message):
        with pytest.warns(UserWarning, match=message):
            assert jdist.mirrored(topology=name).num_replicas == prod(map(int, name[5:].split("x")))

    def test_more_than_can_be_described(self):
        with pytest.raises(DeviceError, match=r"^h100:9999999999 is 9,999,999,999 GPUs; jdist describes at most"):
            jdist.mirrored(topology="h100:9999999999")

    def test_state_in_host_memory_cannot_be_compiled_for(self):
        with pytest.raises(
            DeviceError,
            match=r"JAX does not describe for NVIDIA H100 .* compile for a TPU topology, or use jdist\.mirrored",
        ):
            jdist.central_storage(topology="h100:8")

    def test_jax_describes_them_without_their_hosts_memory(self):
        """Why `central_storage` is refused: what is asked to be there is compiled to be on the device, without a word."""
        mesh = jdist.mirrored(topology="h100:2").mesh
        assert mesh.devices[0].addressable_memories() == []
        pinned = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind="pinned_host")
        shape = jax.ShapeDtypeStruct((1024,), "float32")
        memory = jax.jit(lambda x: x + 1, in_shardings=pinned).lower(shape).compile().memory_analysis()
        assert (memory.host_argument_size_in_bytes, memory.argument_size_in_bytes) == (0, 4096)

    def test_what_needs_the_devices_is_refused(self):
        strategy = jdist.mirrored(topology="h100:8")
        for use in (lambda: strategy.init(lambda: 1), lambda: strategy.fetch(1), lambda: strategy.run(lambda: 1)):
            with pytest.raises(DeviceError, match=r"these devices are not here: .*'h100:8'"):
                use()

    def test_hierarchical_is_by_host(self):
        assert jdist.multi_worker(topology="h100:4x8", all_reduce="hierarchical").reduction.name == "hierarchical(8, 4)"

    @pytest.mark.skipif(not jdist.strategies.absent_plugins.has_libtpu(), reason="pip install 'jdist[plan-tpu]'")
    def test_both_compilers_in_one_process(self):
        names = ("h100:8", "v5e:2x4", "h100:2x8")
        assert [jdist.mirrored(topology=name).num_replicas for name in names] == [8, 8, 16]


@needs_compiler
@pytest.mark.parametrize("platforms", [None, "cpu"])
@pytest.mark.parametrize("first", ["import jax; jax.devices()", "import jdist; jdist.mirrored()"])
def test_the_plugin_serves_whoever_started_jax(platforms, first):
    """Whether JAX has loaded the plugin, has failed to, or has passed over it."""
    program = (
        f"{first}\nimport jdist\nprint(jdist.mirrored(topology='h100:8').num_replicas, jdist.mirrored().num_replicas)"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environ |= {"TPU_SKIP_MDS_QUERY": "1"} | ({} if platforms is None else {"JAX_PLATFORMS": platforms})
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.stdout.split() == ["8", "1"], ran.stderr


@needs_compiler
def test_commands_are_silent_without_a_driver(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    config = os.path.join(os.path.dirname(os.path.dirname(jdist.__file__)), "configs", "digits.yaml")
    for arguments in (["plan", config, "--topology", "cpu:2", "--no-check"], ["plan", config, "--topology", "h100:2"]):
        command = [sys.executable, "-m", "jdist", *arguments]
        ran = subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, "")


def test_a_plan_needs_no_standard_error(tmp_path):
    config = os.path.join(os.path.dirname(os.path.dirname(jdist.__file__)), "configs", "digits.yaml")
    command = f'exec "{sys.executable}" -m jdist plan "{config}" --topology cpu:2 --no-check 2>&-'
    ran = subprocess.run(command, shell=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=200, check=False)
    assert (ran.returncode, ran.stdout.partition("(")[0]) == (0, "Strategy")
