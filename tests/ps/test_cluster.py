"""A parameter server on a cluster: real servers on loopback, found by TF_CONFIG, with and without TLS."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import trustme

from jdist.cli.main import main
from jdist.cluster import ClusterSpec, exit_status
from jdist.errors import ClusterError, ClusterTimeoutError, StrategyError
from jdist.ps.coordinator import servers as ps_servers
from jdist.ps.coordinator.api import worker_index
from jdist.ps.transport.diagnose import reach
from jdist.ps.transport.grpc_transport import RpcChannel
from jdist.ps.transport.security import AUTHORITY, CERTIFICATE, KEY, Security, read_security
from jdist.strategies.parameter_server import parameter_server
from tests.ps.servers import configs, environment, serving, written

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers

PROGRAM = Path(__file__).with_name("line_program.py")


def chief(environ, *arguments):
    """Runs the program as a chief: its exit code, and what it said."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env=environment(environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def spec(task="chief", **jobs):
    jobs = {"chief": ("127.0.0.1:1",), "worker": ("127.0.0.1:2",), "ps": ("127.0.0.1:3",)} | jobs
    return ClusterSpec(jobs={k: v for k, v in jobs.items() if v}, task_type=task, task_index=0)


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    return {"JDIST_TOKEN": "secret", **written(tmp_path_factory.mktemp("certified"), trustme.CA())}


@pytest.fixture(scope="module")
def cluster(certified):
    """A ps and two workers with TLS and a token, and a third worker whose token is another: the jobs and the processes."""
    jobs, config = configs(3, 1)
    wrong = {**certified, "JDIST_TOKEN": "another"}
    tasks = [("ps", 0), ("worker", 0), ("worker", 1), ("worker", 2)]
    with serving(
        *(([], {"TF_CONFIG": config[t], **(wrong if t == ("worker", 2) else certified)}) for t in tasks)
    ) as found:
        yield jobs, [process for process, _ in found]


@pytest.fixture
def here(monkeypatch, certified):
    """This process has the token and a certificate, and no cluster."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in certified.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def of(jobs, workers):
    return ClusterSpec(jobs={**jobs, "worker": tuple(workers)}, task_type="chief", task_index=0)


class TestWhoIsLetIn:
    def test_another_token_is_heard_of_at_once_with_the_server_s_name(self, cluster, here):
        jobs, _ = cluster
        with pytest.raises(
            ClusterError, match=rf"^worker 2 \({jobs['worker'][2]}\): it refuses this process's token\."
        ):
            parameter_server(of(jobs, jobs["worker"]))
        here.delenv("JDIST_TOKEN")
        with pytest.raises(ClusterError, match=r"^ps 0 .*JDIST_TOKEN is not set here.* \(3 more\)"):
            parameter_server(of(jobs, jobs["worker"]))

    def test_a_worker_that_is_refused_by_a_ps(self, cluster, here):
        jobs, _ = cluster
        here.setenv("JDIST_TOKEN", "another")
        (trouble,) = ps_servers.seen_from(jobs["worker"][2], jobs["ps"], read_security(os.environ))
        assert (trouble.lasts, "JDIST_TOKEN is another there" in trouble.text) == (True, True)
        (trouble,) = ps_servers.seen_from(jobs["worker"][0], jobs["ps"], read_security(os.environ))
        assert (trouble.lasts, trouble.text) == (False, "asking it for that failed: unauthenticated")

    def test_a_server_that_does_not_come(self, cluster, here, capfd):
        jobs, _ = cluster
        missing = {**jobs, "ps": ("127.0.0.1:1",)}
        here.setattr(ps_servers, "_QUIET_S", 0.0)
        with pytest.raises(ClusterTimeoutError, match=r"after 0\.6 s .*ps 0 \(127\.0\.0\.1:1\): nothing answers there"):
            parameter_server(of(missing, jobs["worker"][:2]), start_timeout_s=0.6)
        assert "jdist: waiting for the servers of the cluster: ps 0 (127.0.0.1:1)" in capfd.readouterr().err


def of_two(jobs):
    """The chief's environment, of the two workers that have the token."""
    cluster = {**jobs, "worker": jobs["worker"][:2]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})}


class TestKeeping:
    def test_servers_that_are_kept_hear_of_no_end(self, cluster, here):
        jobs, processes = cluster
        strategy = parameter_server(of(jobs, jobs["worker"][:2]), keep_servers=True)
        strategy.init(lambda: np.zeros(3)).job.close()
        for address in (*jobs["ps"], *jobs["worker"][:2]):
            assert reach(address, read_security(os.environ), 20) is None
        assert [process.poll() for process in processes] == [None] * 4


class TestTraining:
    def test_a_program_that_fails_leaves_the_servers_to_the_next(self, cluster, certified):
        jobs, processes = cluster
        code, out, err = chief(of_two(jobs) | certified, "fail")
        assert (code, out, "RuntimeError: as asked" in err) == (1, "w 3.0, b 1.0 after 160 steps\n", True), err
        assert [process.poll() for process in processes] == [None] * 4

    def test_a_program_that_is_done_ends_them(self, cluster, certified):
        jobs, processes = cluster
        code, out, err = chief(of_two(jobs) | certified)
        assert (code, out) == (0, "w 3.0, b 1.0 after 160 steps\n"), err
        assert [process.wait(20) for process in processes[:3]] == [0, 0, 0]
        assert processes[3].poll() is None


def test_one_worker_is_enough_to_begin_and_others_are_used_once_they_are_there(monkeypatch, capfd):
    for name in ("TF_CONFIG", "JDIST_TOKEN", CERTIFICATE, KEY, AUTHORITY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ps_servers, "_QUIET_S", 0.5)
    jobs, config = configs(2, 1)
    with serving(*(([], {"TF_CONFIG": config[task]}) for task in [("ps", 0), ("worker", 1)])):
        strategy = parameter_server(of(jobs, jobs["worker"]), start_timeout_s=60)
        try:
            coordinator = strategy.coordinator
            places = lambda: {int(coordinator.schedule(number).result()) for _ in range(8)}  # noqa: E731
            assert places() == {1}
            said = capfd.readouterr().err
            assert (
                f"beginning without some of the workers, which may come later: worker 0 ({jobs['worker'][0]})" in said
            )
            with serving(([], {"TF_CONFIG": config["worker", 0]})):
                by = time.monotonic() + 60
                while 0 not in places():
                    assert time.monotonic() < by
        finally:
            strategy.coordinator.close()


def number():
    return worker_index()


class TestArguments:
    def test_a_cluster_must_have_all_it_takes(self):
        with pytest.raises(StrategyError, match="has no parameter servers: it has chief, worker"):
            parameter_server(spec(ps=()))
        with pytest.raises(StrategyError, match="has no workers: it has chief, ps"):
            parameter_server(spec(worker=()))
        with pytest.raises(StrategyError, match="the address of worker 0 is not known"):
            parameter_server(spec(worker=(None,)))

    @pytest.mark.parametrize("task", ["worker", "ps"])
    def test_a_server_runs_no_program(self, task):
        with pytest.raises(StrategyError, match=f"this process is {task} 0 .*run `jdist serve` here"):
            parameter_server(spec(task))

    def test_tf_config_counts_if_nothing_else_is_said(self, monkeypatch):
        monkeypatch.setenv("TF_CONFIG", configs(1, 1)[1]["ps", 0])
        with pytest.raises(StrategyError, match=r"this process is ps 0 of the cluster \(from tf_config\)"):
            parameter_server()
        monkeypatch.delenv("TF_CONFIG")
        assert ps_servers.cluster_of_environment() is None

    def test_the_evaluator_has_its_own_devices(self):
        assert parameter_server(dataclasses.replace(spec(), task_type="evaluator")).name == "mirrored"

    def test_other_machines_need_tls_and_token(self, monkeypatch):
        for name in ("JDIST_TOKEN", CERTIFICATE, KEY, AUTHORITY):
            monkeypatch.delenv(name, raising=False)
        far = spec(ps=("ps0.invalid:2222",))
        with pytest.raises(
            StrategyError, match=r"ps0.invalid:2222 can be reached.* Set JDIST_TOKEN, .*`insecure=True`"
        ):
            parameter_server(far)
        with pytest.raises(ClusterTimeoutError, match=r"the host 'ps0\.invalid' has no address"):
            parameter_server(far, insecure=True, start_timeout_s=0.1)


class TestEnding:
    def test_a_note_or_an_exception_says_that_the_program_is_not_finished(self, monkeypatch):
        monkeypatch.setattr(exit_status, "_notes", [])
        monkeypatch.delattr(sys, "last_value", raising=False)
        assert exit_status.is_finished()
        exit_status.unfinished("exit code 1")
        assert not exit_status.is_finished()
        monkeypatch.setattr(exit_status, "_notes", [])
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
        assert not exit_status.is_finished()

    def test_the_command_notes_its_exit_code(self, monkeypatch, capsys):
        monkeypatch.setattr(exit_status, "_notes", [])
        assert main(["serve", "--role", "ps", "--address", "nonsense"]) == 2
        assert exit_status._notes == ["exit code 2"]
        assert "must be host:port" in capsys.readouterr().err

    def test_a_server_that_does_not_hear_that_it_is_over_is_named(self, monkeypatch, capsys):
        monkeypatch.setattr(ps_servers, "_TELLING_S", 1.0)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            ps_servers._end_servers([RpcChannel(to, security=Security()) for to in (address, "127.0.0.1:1")])
        assert f"jdist: {address} did not hear that the job is over; each ends by itself" in capsys.readouterr().err

    def test_servers_that_are_gone_keep_nobody(self):
        channels = [RpcChannel("127.0.0.1:1", security=Security())]
        ps_servers._end_servers(channels)
        ps_servers._end_servers(channels)
        assert channels == []
