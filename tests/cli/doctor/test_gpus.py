"""`jdist doctor` on machines with GPUs, played by files and variables."""

from __future__ import annotations

import importlib.metadata

import pytest

from jdist.cli.doctor import machine
from jdist.strategies import absent_plugins

JAXLIB = importlib.metadata.version("jaxlib")
PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Oct 26 09:12:38 UTC 2022\nGCC version: gcc 12.2.0"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U16)\n"


@pytest.fixture
def root(tmp_path):
    """A machine with a driver and four GPUs."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(PROPRIETARY.format("580.65.06"))
    for name in ("lo", "docker0", "eth0", "ib0"):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def plugin(monkeypatch):
    """Sets the installed CUDA plugin, and its version."""

    def install(name="jax_plugins.xla_cuda12", version=JAXLIB):
        monkeypatch.setattr(absent_plugins, "installed_plugin", lambda: name)
        monkeypatch.setattr(absent_plugins, "plugin_version", lambda _: version)

    install()
    return install


def look(root, environ=(), *, loads=True):
    return machine.gpus(dict(environ), root=root, loads=lambda library: loads)


def wrong(findings):
    return [(each.status, each.text, each.remedy) for each in findings if each.status != "pass"]


def test_a_machine_in_order_says_so(root, plugin):
    findings = look(root)
    assert wrong(findings) == []
    assert [each.text for each in findings[:-1]] == ["NVIDIA's driver 580.65.06", "4 GPUs"]


def test_the_flag_that_changes_how_gradients_are_sent_is_shown(root, plugin):
    assert "sends them earlier" in look(root)[-1].text
    flag = "--xla_gpu_all_reduce_combine_threshold_bytes=25000000"
    assert "up to 25000000 bytes" in look(root, {"XLA_FLAGS": f"--xla_x=1 {flag}"})[-1].text
    twice = flag.replace("25000000", "1")
    assert "up to 25000000 bytes" in look(root, {"XLA_FLAGS": f"{twice} {flag}"})[-1].text  # XLA takes the last
    assert "sends them earlier" in look(root, {"XLA_FLAGS": f"--xla_x={flag}"})[-1].text


def test_neither_gpu_nor_plugin_is_not_worth_a_line(tmp_path, plugin):
    plugin(name=None)
    assert look(tmp_path) == []
    assert machine.nccl({"NCCL_P2P_DISABLE": "1"}, hosts=4, root=tmp_path) == []


def test_a_plugin_without_a_driver_is_a_compiler(tmp_path, plugin):
    (finding,) = look(tmp_path)
    assert finding.status == "pass"
    assert f"CUDA plugin {JAXLIB} without a driver" in finding.text
    assert "jdist plan --topology h100:8" in finding.text


def test_a_gpu_without_the_plugin(root, plugin):
    plugin(name=None)
    ((status, text, remedy),) = wrong(look(root))
    assert (status, remedy) == ("warn", "pip install 'jdist[cuda]'")
    assert "not JAX's CUDA plugin" in text


@pytest.mark.parametrize("where", ["with a driver", "without"])
def test_a_plugin_of_another_version(root, plugin, where, tmp_path_factory):
    plugin(version="0.4.1")
    findings = look(root if where == "with a driver" else tmp_path_factory.mktemp("none"))
    assert not any("compiles for them" in each.text for each in findings)
    ((status, text, remedy),) = wrong(findings)
    assert status == "fail"
    assert f"plugin is 0.4.1, but jaxlib is {JAXLIB}" in text
    assert remedy == f"pip install --upgrade 'jax[cuda12]=={JAXLIB}'"


def test_the_drivers_library_is_missing(root, plugin):
    ((status, text, remedy),) = wrong(look(root, loads=False))
    assert status == "fail"
    assert "libcuda.so.1" in text
    assert "--gpus all" in remedy


@pytest.mark.parametrize("form", [PROPRIETARY, OPEN])
@pytest.mark.parametrize(
    ("name", "version", "least"),
    [
        ("jax_plugins.xla_cuda12", "525.60.13", None),
        ("jax_plugins.xla_cuda12", "470.82.01", "525"),
        ("jax_plugins.xla_cuda13", "580.65.06", None),
        ("jax_plugins.xla_cuda13", "570.86.10", "580"),
    ],
)
def test_a_driver_older_than_the_plugin_needs(root, plugin, form, name, version, least):
    plugin(name=name)
    (root / "proc/driver/nvidia/version").write_text(form.format(version))
    found = wrong(look(root))
    assert [(status, f"driver is {version}, older than {least}" in text) for status, text, _ in found] == (
        [("fail", True)] if least else []
    )
    assert all(("jax[cuda12]" in remedy) == name.endswith("13") for _, _, remedy in found)


NOT_HERE = [("0,4", "4"), ("7", "7"), ("0,x,1", "x"), ("0,,1", ""), ("0,GPU-8f", "GPU-8f")]


@pytest.mark.parametrize(
    ("value", "reason", "fix"),
    [
        *((value, "hides every GPU", "CUDA_VISIBLE_DEVICES=0,1") for value in ("", "-1", " , ", ",0", "NoDevFiles")),
        *((value, f"this machine has no GPU {first!r}", "0 to 3") for value, first in NOT_HERE),
        ("GPU-8f,0", "'0' does not begin with 'GPU-' as the first does", "0 to 3"),
        *((value, "names a GPU twice", "each GPU once (0 to 3)") for value in ("0,0", "1,2,01", "GPU-8f,GPU-8f")),
    ],
)
def test_a_variable_that_is_not_right(root, plugin, value, reason, fix):
    ((status, text, remedy),) = wrong(look(root, {"CUDA_VISIBLE_DEVICES": value}))
    assert (status, reason in text, fix in remedy) == ("fail", True, True), (text, remedy)


@pytest.mark.parametrize("value", ["0,3", "2", "GPU-8f6d,GPU-11aa", "MIG-11", "0", "0,1,"])
def test_a_variable_that_names_what_is_here(root, plugin, value):
    findings = look(root, {"CUDA_VISIBLE_DEVICES": value})
    assert wrong(findings) == []
    assert f"of 4 GPUs, by CUDA_VISIBLE_DEVICES={value}" in findings[-2].text


@pytest.mark.parametrize(
    ("name", "value"), [("NCCL_P2P_DISABLE", "1"), ("NCCL_P2P_LEVEL", "LOC"), ("NCCL_P2P_LEVEL", "0")]
)
def test_peer_access_is_off(root, name, value):
    ((status, text, remedy),) = wrong(machine.nccl({name: value}, hosts=1, root=root))
    assert status == "warn"
    assert "turns peer access off" in text
    assert f"Unset {name}" in remedy


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("enp5s0", "names no network interface"),
        ("lo", "leads to no other host"),
        ("=eth", "names no network interface"),
        ("^eth,ib", "names no network interface"),
        ("docker", "leads to no other host"),
    ],
)
def test_an_interface_that_leads_nowhere(root, value, reason):
    ((status, text, remedy),) = wrong(machine.nccl({"NCCL_SOCKET_IFNAME": value}, hosts=2, root=root))
    assert status == "fail"
    assert reason in text
    assert "there are: docker0, eth0, ib0, lo" in text
    assert "eth0, ib0" in remedy
    assert wrong(machine.nccl({"NCCL_SOCKET_IFNAME": value}, hosts=1, root=root)) == []  # one host needs none


@pytest.mark.parametrize("value", [None, "eth", "=eth0", "^docker,lo", "^=eth0", "ib"])
def test_an_interface_that_leads_to_others(root, value):
    environ = {} if value is None else {"NCCL_SOCKET_IFNAME": value}
    (finding,) = machine.nccl(environ, hosts=2, root=root)
    assert finding.status == "pass"


def test_a_container_without_a_network(root):
    for name in ("eth0", "ib0"):
        (root / "sys/class/net" / name).rmdir()
    ((status, text, remedy),) = wrong(machine.nccl({}, hosts=2, root=root))
    assert status == "fail"
    assert "finds no network interface to other hosts; there are: docker0, lo" in text
    assert "--network=host" in remedy
