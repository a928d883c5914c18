"""`jdist serve`: what it is and where, whom it lets in, how it ends, and what probes hear."""

import contextlib
import json
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import trustme

from jdist.errors import ClusterConfigError, LaunchError
from jdist.launcher.environment import free_ports
from jdist.ps.program import trial
from jdist.ps.serve import keep_freed_memory, place, serve
from jdist.ps.transport.diagnose import reach
from jdist.ps.transport.grpc_transport import RpcChannel, RpcServer
from jdist.ps.transport.interface import CallFailed
from jdist.ps.transport.security import AUTHORITY, KEY, Security, read_security
from tests.ps.servers import command, environment, health, refused, serving, written

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers

GUIDE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")


def tf_config(task, index=0, **jobs):
    jobs = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]} | jobs
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": task, "index": index}})}


class TestPlace:
    def test_tf_config_says_it_and_flags_count_before_it(self):
        assert place(None, None, tf_config("ps")) == ("ps", "127.0.0.1:3")
        assert place(None, None, tf_config("worker", worker=["localhost:2"])) == ("worker", "127.0.0.1:2")
        assert place(None, "127.0.0.1:9", tf_config("ps")) == ("ps", "127.0.0.1:9")
        assert place("worker", "127.0.0.1:9", {"TF_CONFIG": "not read"}) == ("worker", "127.0.0.1:9")
        assert place("ps", None, tf_config("worker")) == ("ps", "127.0.0.1:0")
        assert place("worker", None, {}) == ("worker", "127.0.0.1:0")

    @pytest.mark.parametrize(
        ("environ", "error", "message"),
        [
            ({}, LaunchError, "set TF_CONFIG, or give --role"),
            (tf_config("chief"), LaunchError, "this process is the chief, which runs your program"),
            ({"TF_CONFIG": "{"}, ClusterConfigError, "TF_CONFIG is '{'"),
            (tf_config("worker", worker=[None]), LaunchError, "does not say where worker 0 listens"),
        ],
    )
    def test_what_does_not_say_it_is_refused(self, environ, error, message):
        with pytest.raises(error, match=message):
            place(None, None, environ)


class TestAddress:
    @pytest.mark.parametrize("address", ["127.0.0.1", "::1:22", "127.0.0.1:70000", "127.0.0.1:x", ":22"])
    def test_it_must_be_one(self, address):
        with pytest.raises(LaunchError, match="must be host:port"):
            serve("ps", address, security=Security(), grace_s=1)

    def test_beyond_loopback_it_needs_token_and_tls(self, tmp_path):
        certified = read_security(written(tmp_path, trustme.CA()))
        for security, said in (
            (Security(), "Set JDIST_TOKEN, JDIST_TLS_CERT, JDIST_TLS_KEY, JDIST_TLS_CA on all processes"),
            (Security(token="t"), "Set JDIST_TLS_CERT, JDIST_TLS_KEY, JDIST_TLS_CA on all processes"),
            (certified, "Set JDIST_TOKEN on all processes"),
        ):
            with pytest.raises(LaunchError, match=f"'0.0.0.0:0'.*{said}.*say --insecure"):
                serve("ps", "0.0.0.0:0", security=security, grace_s=1)


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """The environment of a process with a certificate and the token."""
    return {"JDIST_TOKEN": "t", **written(tmp_path_factory.mktemp("certified"), trustme.CA())}


@pytest.fixture(scope="module")
def servers(certified):
    """A ps with a token, on all interfaces; a worker with TLS and a health address. Ended one by a call, one by a signal."""
    (port,) = free_ports(1)
    with serving(
        (["--role", "ps", "--address", "0.0.0.0:0", "--insecure"], {"JDIST_TOKEN": "t"}),
        (["--role", "worker", "--health-address", f"127.0.0.1:{port}"], certified),
    ) as ((ps, at), (worker, worker_at)):
        yield ps, at.replace("0.0.0.0", "127.0.0.1"), worker, worker_at, f"127.0.0.1:{port}"


SERVING = b"\x08\x01"


class TestHealth:
    def test_a_probe_needs_no_token(self, servers):
        for request in (b"", b"\n\x0bjdist.ps.v1"):
            with health(servers[1], "Check", request) as answer:
                assert answer == SERVING
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"), health(servers[1], "Check", b"\n\x05other"):
            pass

    def test_with_tls_there_is_an_address_for_probes_alone(self, servers):
        with health(servers[4], "Check") as answer:
            assert answer == SERVING
        with pytest.raises(CallFailed) as info:
            RpcChannel(servers[4], security=Security(token="t")).call("status", {}, timeout_s=20)
        assert info.value.reason == "refused"

    def test_it_can_be_watched_by_a_few_and_calls_go_on(self, servers):
        with grpc.insecure_channel(servers[1]) as channel:
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
            calls = [watch(b"", timeout=60) for _ in range(4)]
            assert [next(call) for call in calls] == [SERVING] * 4
            with pytest.raises(grpc.RpcError, match="too many watch already"):
                next(watch(b"", timeout=60))
            assert reach(servers[1], Security(token="t"), 20) is None
            for call in calls:
                call.cancel()


class TestReach:
    """Why a server cannot be reached, against real ones."""

    def test_who_shows_the_same_is_let_in(self, servers, certified):
        assert reach(servers[1], Security(token="t"), 20) is None
        assert reach(servers[3], read_security(certified), 20) is None

    @pytest.mark.parametrize(
        ("token", "said"), [(None, "JDIST_TOKEN is not set here"), ("x", "JDIST_TOKEN is another there")]
    )
    def test_another_token(self, servers, token, said):
        trouble = reach(servers[1], Security(token=token), 20)
        assert trouble is not None
        assert (trouble.lasts, said in trouble.text) == (True, True), trouble

    def test_a_certificate_that_does_not_serve(self, servers, certified, tmp_path):
        stranger = {"JDIST_TOKEN": "t", **written(tmp_path / "stranger", trustme.CA())}
        own_authority = {**stranger, AUTHORITY: certified[AUTHORITY]}
        for environ, said in (
            ({"JDIST_TOKEN": "t"}, "it speaks TLS, and this process has no certificate"),
            (stranger, "its certificate is not accepted here"),
            (own_authority, "it does not accept this process's certificate"),
            ({**certified, "JDIST_TLS_NAME": "other"}, "its certificate is for another host"),
        ):
            trouble = reach(servers[3], read_security(environ), 20)
            assert trouble is not None
            assert (trouble.lasts, said in trouble.text) == (True, True), trouble

    def test_no_tls_there(self, servers, certified):
        trouble = reach(servers[1], read_security(certified), 20)
        assert trouble is not None
        assert (trouble.lasts, "it speaks no TLS" in trouble.text) == (True, True), trouble

    def test_nobody_there_may_come_yet(self, servers):
        for address in ("127.0.0.1:1", "nowhere.invalid:2222"):
            trouble = reach(address, Security(), 20)
            assert trouble is not None
            assert not trouble.lasts

    def test_something_else_there(self, servers):
        trouble = reach(servers[4], Security(), 20)
        assert trouble is not None
        assert (trouble.lasts, "not `jdist serve`" in trouble.text) == (True, True)

    def test_a_worker_tells_whom_it_reaches(self, servers, certified):
        channel = RpcChannel(servers[3], security=read_security(certified))
        header, _ = channel.call("reach", {"addresses": [servers[3], servers[1]]}, timeout_s=30)
        own, ps = header["found"]
        assert own is None
        assert ps == ["it speaks no TLS. Set JDIST_TLS_CERT, JDIST_TLS_KEY and JDIST_TLS_CA there, too", True]
        for wrong in ("no list", ["no address"]):
            with pytest.raises(CallFailed, match="refused"):
                channel.call("reach", {"addresses": wrong}, timeout_s=30)
        channel.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the recipe needs openssl")
def test_the_certificates_of_the_guide_serve(tmp_path):
    (recipe,) = re.findall(r"^```bash\n(openssl req -x509.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    listed = f"set -e\n{recipe}\nenv -0"
    done = subprocess.run(["bash", "-c", listed], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    said = dict(line.split("=", 1) for line in done.stdout.split("\0") if line.startswith(("JDIST_TLS", "JDIST_TOKEN")))
    assert len(said) == 5
    environ = {
        name: str(tmp_path / value) if value.endswith((".pem", ".key")) else value for name, value in said.items()
    }
    with serving((["--role", "ps", "--address", "0.0.0.0:0"], environ)) as ((process, at),):
        assert reach(at.replace("0.0.0.0", "127.0.0.1"), read_security(environ), 20) is None
        process.terminate()
        assert (process.wait(20), process.stderr.read()) == (143, "")


class TestEnds:
    def test_on_sigterm_with_143(self, servers):
        servers[2].send_signal(signal.SIGTERM)
        assert servers[2].wait(20) == 143

    def test_when_it_is_told_to_and_has_said_what_is_open(self, servers):
        RpcChannel(servers[1], security=Security(token="t")).call("end", {}, timeout_s=20)
        assert servers[0].wait(20) == 0
        said = servers[0].stderr.read()
        assert said.startswith(
            "jdist serve: insecure: 0.0.0.0:0 can be reached from other machines. Without TLS whoever"
        )

    def test_when_nobody_asks_for_anything(self):
        code, said = refused("--role", "ps", "--grace-s", "0.2")
        assert (code, "ends after 0.2 s without a call" in said) == (75, True)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"grace_s": float("nan")}, "`--grace-s` is nan; it must be a number of seconds above 0"),
            ({"grace_s": 0.0}, "`--grace-s` is 0.0;"),
            ({"grace_s": -1.0}, "`--grace-s` is -1.0;"),
            ({"grace_s": 1.0, "script": "/nowhere.py"}, "--script is '/nowhere.py'; it must be an existing file"),
        ],
    )
    def test_what_is_not_allowed(self, options, message):
        with pytest.raises(LaunchError, match=message):
            serve("worker", "no address", security=Security(), **options)

    @pytest.mark.parametrize("is_idle", [True, False])
    def test_it_leaves_at_once_where_a_call_still_runs(self, monkeypatch, is_idle):
        stop, codes = RpcServer.stop, []
        monkeypatch.setattr(RpcServer, "stop", lambda server, grace_s: stop(server, grace_s) and is_idle)
        monkeypatch.setattr("jdist.ps.serve.keep_freed_memory", lambda: None)
        monkeypatch.setattr(trial, "start_as_fork", lambda: None)  # this process has threads
        assert serve("ps", "127.0.0.1:0", security=Security(), grace_s=0.01, leave=codes.append) == 75
        assert codes == ([] if is_idle else [75])

    @pytest.mark.parametrize("role", ["server", "None"])
    def test_no_such_role(self, role):
        code, said = refused("--role", role)
        assert (code, said) == (2, f"jdist: `--role` is '{role}'; it must be 'worker' or 'ps'.")

    def test_what_is_wrong_is_said_at_once_with_exit_code_2(self, certified):
        code, said = refused(**{**certified, KEY: "/nowhere"})
        assert code == 2
        assert said.startswith(
            "jdist: JDIST_TLS_KEY is '/nowhere'; it must be the path of a PEM file. It cannot be read"
        )

    def test_a_port_that_is_taken(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            code, said = refused("--role", "ps", "--address", f"127.0.0.1:{taken.getsockname()[1]}")
        assert (code, "the port is taken" in said) == (75, True), said


@pytest.fixture
def tied():
    """Starts a server that ends with its parent, whose standard input is open."""
    with contextlib.ExitStack() as stack:

        def start(*flags, through=()):
            process = stack.enter_context(
                subprocess.Popen(
                    [*through, *command("--role", "ps", "--with-parent", *flags)],
                    env=environment({}),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert " listens on " in process.stdout.readline(), process.stderr.read()
            return process

        yield start


class TestWithParent:
    def test_it_lives_as_long_as_standard_input_is_open(self, tied):
        process = tied("--grace-s", "0.1")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        _, said = process.communicate(timeout=30)  # closes it
        assert (process.returncode, said) == (0, "")

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_another_end_is_as_without_one(self, tied, number, code):
        process = tied()
        process.send_signal(number)
        assert process.wait(30) == code
        assert process.stderr.read() == ("jdist: interrupted\n" if code == 130 else "")

    @pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the parent's number may not change")
    def test_it_ends_when_the_parent_is_gone_though_standard_input_is_open(self, tied):
        waits = "import subprocess, sys; subprocess.call(sys.argv[1:])"
        parent = tied(through=[sys.executable, "-c", waits])
        parent.kill()
        assert select.select([parent.stdout], [], [], 60)[0]
        assert parent.stdout.read() == ""  # the end of file: the server, which holds it too, has ended


def test_the_c_library_is_told_where_it_listens():
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
