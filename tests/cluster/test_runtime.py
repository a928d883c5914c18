import os
import socket
import threading
import time

import pytest

from jdist.cluster import exit_status, jax_processes, runtime, simple
from jdist.cluster.runtime import alone, together
from jdist.errors import CheckpointError, ClusterConfigError, ClusterError, PeerFailedError, PeerLostError
from jdist.launcher.environment import free_ports
from tests.by_default import some
from tests.cluster.fault_jobs import BOUND_S, LIGHT, PYTHON, STEPS, TIMEOUT_S, Job


def spec(index=0, *, host="127.0.0.1", port=None, count=2):
    port = free_ports(1)[0] if port is None else port
    addresses = [f"{host}:{port}", *(None for _ in range(count - 1))]
    return simple(jobs={"worker": addresses}, task_type="worker", task_index=index)


def start(of, **options):
    return runtime.start(of, **{"timeout_s": 5.0, "start_timeout_s": 1.0} | options)


@pytest.fixture
def unused(monkeypatch):
    """As if JAX had not been used in this process."""
    monkeypatch.setattr(jax_processes, "check_unused", lambda: None)


# ---- what is refused, and leaves nothing behind


def test_a_machine_that_does_not_know_its_own_name(unused, monkeypatch):
    def unknown(host, *args, **options):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        ClusterError, match=r"own name 'node7' has no address.*Write a line \"ADDRESS node7\" into /etc/hosts"
    ):
        start(spec())


def test_no_port_for_the_watch(unused):
    with pytest.raises(
        ClusterConfigError, match="JDIST_WATCH_PORT is not set; it must be a port from 1 to 65535 other than"
    ):
        start(spec(port=65535))


@pytest.mark.parametrize("port", ["0", "65536", "x", "65535"])
def test_a_port_for_the_watch_that_cannot_be(unused, monkeypatch, port):
    monkeypatch.setenv("JDIST_WATCH_PORT", port)
    with pytest.raises(ClusterConfigError, match=rf"JDIST_WATCH_PORT is '?{port}'?; it must be a port from 1 to 65535"):
        start(spec(port=65535))


@pytest.mark.parametrize(("offset", "whose"), [(0, "JAX's coordinator"), (1, "process 0")])
def test_a_port_that_is_taken(unused, offset, whose):
    of = spec()
    port = int(of.coordinator_address.rpartition(":")[2]) + offset
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ClusterError, match=rf"{whose} cannot listen on .*:{port}"),
    ):
        start(of)


def test_a_host_that_there_is_not(unused):
    with pytest.raises(ClusterError, match=r"the host 'no-such-host\.invalid' of process 0 has no address"):
        start(spec(host="no-such-host.invalid"))


def test_a_folder_for_records_that_cannot_be(unused, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JDIST_RECORD_DIR", str(tmp_path / "file" / "folder"))
    with pytest.raises(ClusterConfigError, match=r"JDIST_RECORD_DIR is .*; it must be a folder that can be written"):
        start(spec())


def test_failpoints_that_there_are_not(unused, monkeypatch):
    monkeypatch.setenv("JDIST_FAILPOINTS", "process=0:nowhere=in:kill")
    with pytest.raises(ClusterConfigError, match="JDIST_FAILPOINTS"):
        start(spec())


def test_processes_that_do_not_come_are_named_and_it_can_be_tried_again(unused):
    of, before = spec(count=3), threading.active_count()
    for _ in range(2):
        with pytest.raises(
            ClusterError, match="not all of the 3 processes came in time; missing: process 1, process 2"
        ):
            start(of)
    deadline = time.monotonic() + BOUND_S
    while threading.active_count() > before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def test_process_0_that_does_not_come(unused):
    with pytest.raises(ClusterError, match="process 1 did not reach process 0 at 127"):
        start(spec(1))


def test_one_process_alone_needs_nothing():
    alone = start(spec(count=1))
    assert (alone.num_processes, alone.is_chief, alone.stopping) == (1, True, None)
    assert alone.exchange("what", 7, timeout_s=1.0) == [7]
    assert not alone.stops_after(1)
    alone.wish_to_stop("a reason")
    assert (alone.stops_after(2), alone.stopping) == (True, "a reason")
    alone.end()


# ---- how programs end


def test_all_start_once_and_end_together(tmp_path):
    body = """
import threading
from jdist.errors import ClusterError
from jdist.cluster import simple
again = []
thread = threading.Thread(target=lambda: again.append(runtime.start(spec, timeout_s=99, start_timeout_s=99)))
thread.start(); thread.join()
assert again == [joined] and joined.timeout_s == 3
try:
    runtime.start(simple(jobs={"worker": ["a:1", "b:1"]}, task_type="worker", task_index=0), **others_end)
except ClusterError as exc:
    assert "in a cluster already" in str(exc)
else:
    raise AssertionError("joined another cluster")
assert joined.exchange("k", index, 60) == [0, 1] and joined.exchange("k", -index, 60) == [0, -1]
if os.fork() == 0:
    joined.end()  # a fork's end is not the program's
    os._exit(0)
os.wait()
assert joined.exchange("k", 2, 60) == [2, 2]
if index == 1:
    time.sleep(1.5 * others_end["timeout_s"])  # process 0 has come to its end, and waits
"""
    with Job(tmp_path, LIGHT + body) as job:
        assert job.codes() == [0, 0], job.out(0) + job.out(1)


def test_exit_codes_are_kept_when_all_leave(tmp_path):
    with Job(tmp_path, LIGHT + "sys.exit(3 + index)") as job:
        assert job.codes() == [3, 4]


@pytest.mark.parametrize(
    ("guilty", "body", "code"),
    [
        (0, "raise ValueError('no luck')", 1),
        (1, "raise ValueError('no luck')", 1),
        (1, "raise KeyboardInterrupt", 130),
        (1, "joined.failed(2); sys.exit(2)", 2),
    ],
)
def test_a_program_that_fails_keeps_its_exit_code_and_ends_the_others(tmp_path, guilty, body, code):
    body = f"joined.at_step(7)\njoined.exchange('there', 0, 60)\nif index == {guilty}: {body}\njoined.exchange('never', 0, 60)"
    with Job(tmp_path, LIGHT + body) as job:
        assert job.codes(guilty, 1 - guilty) == [code, 75]
        record = job.check_lost(1 - guilty, lost=guilty)
    assert (record["error"], record["last_step"]) == ("PeerLostError", 7)


def test_a_program_that_waits_in_vain_says_so_by_its_exit_code_and_by_no_other(tmp_path):
    lonely = LIGHT.replace('"start_timeout_s": 60', '"start_timeout_s": 1')
    caught = lonely.replace("joined = ", "try: joined = ") + "except RuntimeError: sys.exit(index)"
    (tmp_path / "caught").mkdir()
    for folder, script, codes in ((tmp_path, lonely, [75, 75]), (tmp_path / "caught", caught, [0, 1])):
        with Job(folder, script, failpoints="process=2:connect=before:kill", count=3) as job:
            assert job.codes(0, 1) == codes, job.out(1)
    with Job(tmp_path, LIGHT + "if index: time.sleep(3)\njoined.exchange('k', 0, 1 + 9 * index)") as job:
        assert job.codes() == [75, 75]
        assert "ClusterTimeoutError: the other processes did not reach 'k (1)'" in job.out(0)


def test_who_fails_has_the_code_of_its_error_and_the_others_say_that_they_followed(tmp_path):
    body = """
from jdist.cluster.runtime import together
with together("reading", 60):
    if index == 1: raise OSError("disk gone")
"""
    with Job(tmp_path, LIGHT + body) as job:
        assert job.codes() == [75, 1], job.out(0) + job.out(1)
        assert "PeerFailedError: process 1: disk gone" in job.out(0)


def test_after_errors_in_a_python_shell_its_end_is_no_failure(tmp_path):
    with Job(tmp_path, LIGHT, command=lambda _: [PYTHON, "-i"]) as job:
        for process in job.processes.values():
            process.stdin.write(b"1/0\n")
            process.stdin.close()
        assert job.codes() == [0, 0]
        assert "ZeroDivisionError" in job.out(0)


def test_a_pipe_that_nobody_reads_keeps_nobody_alive(tmp_path):
    body = """
if index == 1:
    joined.exchange("full", 0, 60)
    os._exit(9)
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(writer, True)
print("full", flush=True)
os.dup2(writer, 1); os.dup2(writer, 2)
joined.exchange("full", 0, 60)
print("x" * 1_000_000, flush=True)
"""
    with Job(tmp_path, LIGHT + body) as job:
        assert job.codes(1, 0) == [9, 75]


# ---- who stands still, and goes on later


@pytest.mark.parametrize("victim", some([0, 1], [0]))
def test_who_was_stopped_for_too_long_ends_itself_when_it_goes_on(tmp_path, victim):
    body = f"if index == {victim}: os.kill(os.getpid(), signal.SIGSTOP)\njoined.exchange('never', 0, 60)"
    with Job(tmp_path, LIGHT + body) as job:
        job.await_stopped(victim)
        assert job.code(1 - victim, TIMEOUT_S + BOUND_S) == 75
        assert "stands still" in job.check_lost(1 - victim, lost=victim)["cause"]
        job.resume(victim)
        assert job.code(victim, BOUND_S) == 75
        assert "stood still" in job.check_lost(victim, lost=victim)["cause"]


def test_who_was_stopped_for_a_moment_goes_on(tmp_path):
    body = "if index == 1: os.kill(os.getpid(), signal.SIGSTOP)\nassert joined.exchange('k', index, 60) == [0, 1]"
    with Job(tmp_path, LIGHT + body) as job:
        job.await_stopped(1)
        job.resume(1)
        assert job.codes() == [0, 0]


def test_another_token_is_refused_and_says_so(tmp_path):
    script = "import os\nos.environ['JDIST_TOKEN'] += os.environ['TF_CONFIG'][-3]\n" + LIGHT
    with Job(tmp_path, script, environ={"JDIST_TOKEN": "secret"}) as job:
        assert job.code(1, 60.0) == 1
        assert (
            f"process 0 ({job.addresses[0]}) refused process 1: its JDIST_TOKEN is not that of process 0." in job.out(1)
        )


def test_the_record_of_a_lost_process_begins_a_line(capfd):
    os.write(2, b'  File "a traceback that another thread has begun')
    exit_status.print_record(PeerLostError(1, "a:1", 3, "killed"), noticed_by=0)
    (record, sentence) = capfd.readouterr().err.splitlines()[-2:]
    assert record.startswith(exit_status.RECORD)
    assert sentence.startswith("jdist: PeerLostError: process 1 (a:1) is lost")


# ---- an error of one process is raised on all


class Cluster:
    """A cluster of which this is process 0, and the others say `others`."""

    def __init__(self, *others):
        self.others, self.said = list(others), []

    def exchange(self, what, value, timeout_s):
        self.said.append(value)
        return [value, *self.others]


def test_nothing_is_raised_where_all_went_well():
    cluster = Cluster(None)
    with together("a save", 1.0, cluster):
        pass
    assert cluster.said == [None]


def test_ones_own_error_is_told_and_raised():
    cluster = Cluster(["another error", 1])
    with pytest.raises(CheckpointError, match="the disk is full"), together("a save", 1.0, cluster):
        raise CheckpointError("the disk is full")
    assert cluster.said == [["the disk is full", 1]]


def test_anothers_error_is_raised_with_its_name():
    with (
        pytest.raises(PeerFailedError, match=r"^process 2: no such key$") as met,
        together("a run", 1.0, Cluster(None, ["no such key", 2])),
    ):
        pass
    assert met.value.exit_code == 2


def test_alone_there_is_nobody_to_tell():
    with pytest.raises(ZeroDivisionError), together("a save", 1.0, alone()):
        _ = 1 / 0


# ---- numbers of devices


UNEQUAL = """\
import json, os
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={1 + index}"
"""


def test_unequal_numbers_of_devices_are_refused_with_the_counts(tmp_path):
    with Job(tmp_path, UNEQUAL + STEPS + "train(1)") as job:
        codes = job.codes(within_s=60 + BOUND_S)
        for index in (0, 1):
            said = "the processes have different numbers of devices: process 0 has 1, process 1 has 2."
            assert said in job.out(index), job.out(index)
        assert codes == [1, 1]  # a script's own end by an exception; `jdist run` leaves with 2


def test_it_is_shown_as_its_place_in_the_job():
    assert repr(runtime.alone()) == "Runtime(process 0 of 1)"
