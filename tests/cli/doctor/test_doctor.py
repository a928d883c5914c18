"""`jdist doctor`: each check by itself, and the command alone and in a cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

import jdist
from jdist.cli.doctor import machine, network
from jdist.cli.doctor import report as checks
from jdist.cli.doctor.finding import Finding, failed, passed, warned
from jdist.cli.doctor.report import examine, report
from jdist.cluster import ClusterSpec
from jdist.cluster.watch import client as watch_client
from jdist.support.versions import versions
from tests.cluster.watch.test_watch import Job, in_thread


def spec(*addresses: str | None, index: int = 0) -> ClusterSpec:
    return ClusterSpec(jobs={"worker": addresses}, task_type="worker", task_index=index)


def statuses(found: list[Finding]) -> list[str]:
    return [each.status for each in found]


class TestMachine:
    def test_versions(self):
        python, packages, *rest = machine.versions()
        assert sys.executable in python.text
        assert "jax " in packages.text
        assert f"jdist {jdist.__version__}" in packages.text
        assert rest == []

    def test_a_package_that_is_missing_or_too_old(self, monkeypatch):
        versions = {"jax": "0.4.1"}

        def version(name):
            if name == "optax":
                raise machine.importlib.metadata.PackageNotFoundError(name)
            return versions.get(name, "1.0")

        monkeypatch.setattr(machine.importlib.metadata, "version", version)
        wrong = {(each.status, each.text.partition(" ")[0]): each for each in machine.versions()[2:]}
        assert "pip install 'jax" in wrong["warn", "jax"].remedy
        assert "pip install 'optax" in wrong["fail", "optax"].remedy

    def test_disk(self, tmp_path, monkeypatch):
        assert statuses(machine.disk(tmp_path / "not" / "yet")) == ["pass"]
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("usage", (), {"free": 10**9, "total": 0}))
        assert statuses(machine.disk(tmp_path)) == ["warn"]
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("usage", (), {"free": 10**6, "total": 0}))
        (full,) = machine.disk(tmp_path)
        assert (full.status, "The disk is full" in full.remedy) == ("fail", True)
        monkeypatch.setattr(machine.os, "access", lambda *_: False)
        (found,) = machine.disk(tmp_path)
        assert found.status == "fail"
        assert str(tmp_path) in found.text

    def test_where_compiled_programs_are_kept(self):
        def text(environ):
            (found,) = machine.compiled(environ)
            return found.text

        assert "runs/compiled" in text({})
        assert "kept in /here" in text({"JAX_COMPILATION_CACHE_DIR": "/here"})
        assert "none are kept" in text({"JAX_COMPILATION_CACHE_DIR": "/here", "JAX_ENABLE_COMPILATION_CACHE": "false"})


class TestNetwork:
    def test_a_cluster_with_the_origin_of_each_value(self):
        config = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
        made, found = network.cluster({"TF_CONFIG": json.dumps(config)})
        assert made is not None
        assert made.process_index == 1
        assert any("a:1, b:2" in each.text and "TF_CONFIG" in each.text for each in found)

    def test_a_cluster_that_makes_no_sense(self):
        made, (found,) = network.cluster({"TF_CONFIG": "{"})
        assert made is None
        assert (found.status, "TF_CONFIG" in found.text) == ("fail", True)

    def test_names(self):
        good, bad = network.names(spec("127.0.0.1:1", "no-such-host.invalid:1"))
        assert (good.status, bad.status) == ("pass", "fail")
        assert "no-such-host.invalid" in bad.text

    def test_the_own_name_of_process_0(self, monkeypatch):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))])
        certain, _ = network.names(spec("node1:1", "node2:1"))
        assert (certain.status, "/etc/hosts" in certain.text) == ("fail", True)
        assert statuses(network.names(spec("node1:1", None))) == ["warn"]
        assert statuses(network.names(spec("node1:1", None, index=1))) == ["pass"]

    def test_a_port_that_is_taken(self):
        with socket.create_server(("127.0.0.1", 0)) as held:
            port = held.getsockname()[1]
            coordinator, _ = network.ports(spec(f"127.0.0.1:{port}", None), {})
        assert coordinator.status == "fail"
        assert f"127.0.0.1:{port}" in coordinator.text
        assert network.ports(spec(f"127.0.0.1:{port}", None, index=1), {}) == []  # only process 0 listens

    def test_the_watch_port_must_be_another(self):
        (found,) = network.ports(spec("127.0.0.1:4000", None), {"JDIST_WATCH_PORT": "4000"})
        assert found.status == "fail"
        assert "JDIST_WATCH_PORT" in found.text

    def test_security(self):
        assert statuses(network.security(spec("127.0.0.1:1", "127.0.0.1:2"), {})) == ["pass"]
        assert statuses(network.security(spec("10.0.0.1:1", None), {})) == ["warn", "warn"]
        assert statuses(network.security(spec("10.0.0.1:1", None, index=1), {})) == []
        assert statuses(network.security(spec("10.0.0.1:1", None), {"JDIST_TOKEN": "x"})) == ["warn", "pass"]


class TestTogether:
    def test_an_all_reduce_over_local_devices(self):
        (found,) = checks.all_reduce(jdist.mirrored())
        assert found.status == "pass"
        assert "over 8 replicas" in found.text

    def test_devices(self):
        (found,) = checks.devices(jdist.mirrored(), 1.0)
        assert found.text.startswith("8 x ")

    def test_unequal_devices_fail(self):
        def strategy(*told):
            cluster = types.SimpleNamespace(num_processes=2, exchange=lambda name, value, timeout_s: told)
            return types.SimpleNamespace(cluster=cluster)

        _, wrong = checks.devices(strategy([8, "cpu"], [4, "cpu"]), 1.0)
        assert (wrong.status, "process 0: 8 x cpu; process 1: 4 x cpu" in wrong.text) == ("fail", True)
        _, other = checks.devices(strategy([8, "H100"], [8, "A100"]), 1.0)
        assert other.status == "warn"


def refused_here(made, monkeypatch):
    return in_thread(lambda: made.watch(1, token="other"))()


def of_another_size_here(made, monkeypatch):
    return in_thread(lambda: made.watch(1, addresses=("n0:1", "n1:1", "n2:1")))()


def refused_elsewhere(made, monkeypatch):
    refused_here(made, monkeypatch)
    return in_thread(made.watch, 0)()


def of_other_versions_elsewhere(made, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(watch_client, "versions", lambda: {**versions(), "jaxlib": "0.0.1"})
        in_thread(made.watch, 1)()
    return in_thread(made.watch, 0)()


def another_program(made, monkeypatch):
    with socket.create_server(("127.0.0.1", made.port + 1 if made.port < 65535 else 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400\r\n\r\n")

        in_thread(answer)
        made.other = server.getsockname()[1]
        return in_thread(lambda: made.watch(1, port=made.other))()


def lost(made, monkeypatch):
    made.start()
    made.watches[1].close()
    return made.lost(0)


def absent(made, monkeypatch):
    return in_thread(made.watch, 0)()


@pytest.mark.parametrize(
    ("cause", "at"),
    [
        (refused_here, "this process, 1"),
        (of_another_size_here, "this process, 1"),
        (refused_elsewhere, "the process that was refused, named above"),
        (of_other_versions_elsewhere, "the process named above"),
        (another_program, "the program at 127.0.0.1:{other}"),
        (lost, "process 1 (n1:1)"),
        (absent, None),
    ],
)
def test_the_arrow_points_at_the_process_that_is_at_fault(monkeypatch, cause, at):
    made = Job(2, silence_s=5.0, start_timeout_s=1.0)
    made.other = 0
    try:
        error = cause(made, monkeypatch)
    finally:
        for watch in made.watches.values():
            watch.close()
        made.server.close()

    def fail(*_, **__):
        raise error

    every = "Run `jdist doctor` as every process of the job at the same time (`srun jdist doctor`), or say --alone."
    monkeypatch.setattr(jdist, "multi_worker", fail)
    _, (found,) = checks.join(1.0)
    assert found.text == str(error)
    assert found.remedy.startswith(
        every if at is None else f"The cause is at {at.format(other=made.other)}: mend it there"
    )
    monkeypatch.setattr(machine, "memory", fail)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    raised = next(each for each in examine(alone=True, timeout_s=1.0) if each.check == "shared memory")
    assert raised.remedy == ("See the line above it." if at is None else found.remedy)


class TestReport:
    def test_what_was_found_is_told_although_a_later_check_ends_it(self, capsys):
        def findings():
            yield passed("first", "is well")
            raise SystemExit(75)

        with pytest.raises(SystemExit):
            report(findings(), as_json=False)
        assert "ok    first" in capsys.readouterr().out

    def test_a_check_that_raises_is_a_finding(self, monkeypatch):
        monkeypatch.setattr(machine, "memory", lambda: 1 / 0)
        for name in ("TF_CONFIG", "JDIST_PROCESS_ID"):
            monkeypatch.delenv(name, raising=False)
        (wrong,) = (each for each in examine(alone=True, timeout_s=1.0) if each.status == "fail")
        assert (wrong.check, wrong.text) == ("shared memory", "ZeroDivisionError: division by zero")

    def test_a_failed_check_is_the_exit_code(self, capsys):
        assert report([passed("a", "b"), warned("c", "d", "e")], as_json=False) == 0
        assert report([passed("a", "b"), failed("c", "d", "mend it")], as_json=False) == 1
        assert "-> mend it" in capsys.readouterr().out

    def test_json(self, capsys):
        report([failed("c", "d", "e")], as_json=True)
        assert json.loads(capsys.readouterr().out) == [{"status": "fail", "check": "c", "text": "d", "remedy": "e"}]

    def test_what_cannot_come_is_not_waited_for(self, monkeypatch):
        config = {"cluster": {"worker": ["no-such-host.invalid:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        monkeypatch.setattr(checks, "join", lambda _: pytest.fail("waited"))
        assert "fail" in statuses(examine(alone=False, timeout_s=1.0))

    def test_alone_leaves_the_others_out(self, monkeypatch):
        config = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        monkeypatch.setattr(checks, "join", lambda _: pytest.fail("waited"))
        assert "fail" not in statuses(examine(alone=True, timeout_s=1.0))


def run_doctor(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jdist", "doctor", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environ
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_others_that_do_not_come(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {"cluster": {"worker": [f"127.0.0.1:{port}", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}
    done = run_doctor(tmp_path, "--json", "--timeout-s", "1", TF_CONFIG=json.dumps(config))
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found[-1]["check"] == "together"
    assert "missing: process 1" in found[-1]["text"]
    assert "--alone" in found[-1]["remedy"]


def test_a_silent_stranger_at_the_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        config = {
            "cluster": {"worker": [f"127.0.0.1:{port - 1}", "127.0.0.1:2"]},
            "task": {"type": "worker", "index": 1},
        }
        done = run_doctor(tmp_path, "--json", "--timeout-s", "60", TF_CONFIG=json.dumps(config))
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found[-1]["check"], found[-1]["status"]) == ("together", "fail")
    assert (
        f"127.0.0.1:{port} accepts connections, but has not answered for 10 s: another program has the port"
        in found[-1]["text"]
    )


def test_torchruns_variables(tmp_path):
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    done = run_doctor(tmp_path, "--alone", "--json", MASTER_ADDR="127.0.0.9", MASTER_PORT="29500", **ranks)
    texts = [each["text"] for each in json.loads(done.stdout) if each["check"] == "cluster"]
    assert texts[0] == "cluster from torchrun"
    assert any("process 1 of 2" in text and "[RANK]" in text for text in texts)


def test_a_cluster_of_two(tmp_path):
    launched = jdist.launch(
        [sys.executable, "-m", "jdist", "doctor", "--json"], processes=2, devices_per_process=1, log_dir=tmp_path
    )
    assert launched.exit_code == 0
    log = (tmp_path / "attempt_0" / "process_0.log").read_text()
    found = json.loads(log[log.index("[\n") :])
    assert "fail" not in {each["status"] for each in found}
    texts = " ".join(each["text"] for each in found)
    assert "all 2 processes came" in texts
    assert "all processes see the same" in texts
    assert "16 MiB over 2 replicas" in texts
    assert "clocks are at most" in texts
