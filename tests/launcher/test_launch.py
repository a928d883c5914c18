import json
import re
import signal
import subprocess
import sys
import threading

import pytest

from jdist.errors import LaunchError
from jdist.launcher import process as process_file
from jdist.launcher.launch import launch
from tests.launcher.launch_children import ROOT, program, until


@pytest.fixture
def start(tmp_path, capfd):
    """`launch` of a program in a folder of its own: `(body, ...) -> (result, standard output, standard error)`."""

    def run(body, *arguments, **options):
        options = {"log_dir": tmp_path / "logs", "grace_s": 5.0} | options
        result = launch([program(tmp_path, body), *arguments], **options)
        return result, *capfd.readouterr()

    return run


def logs(result):
    return {str(path.relative_to(result.log_dir)): path.read_text() for path in result.log_dir.rglob("*.log")}


# ---- what a process is given


def test_each_process_finds_its_cluster(start, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "far.away:1")
    monkeypatch.setenv("MY_OWN", "kept")
    result, _, _ = start("print(json.dumps(dict(os.environ)))", processes=2, evaluator=True)
    said = {name: json.loads(text) for name, text in logs(result).items()}
    assert said.keys() == {"attempt_0/process_0.log", "attempt_0/process_1.log", "attempt_0/evaluator.log"}
    configs = {name: json.loads(environ["TF_CONFIG"]) for name, environ in said.items()}
    addresses = configs["attempt_0/process_0.log"]["cluster"]["worker"]
    assert len(set(addresses)) == 2
    for name, task in [("process_0", ("worker", 0)), ("process_1", ("worker", 1)), ("evaluator", ("evaluator", 0))]:
        config = configs[f"attempt_0/{name}.log"]
        assert config == {"cluster": {"worker": addresses}, "task": {"type": task[0], "index": task[1]}}
    for environ in said.values():
        assert "JAX_COORDINATOR_ADDRESS" not in environ
        assert (environ["MY_OWN"], environ["JDIST_LAUNCH_ATTEMPT"]) == ("kept", "0")


@pytest.mark.parametrize(
    ("environ", "options", "folder"),
    [
        ({}, {}, "logs/compiled"),
        ({}, {"log_dir": None}, "runs/compiled"),
        ({}, {"compilation_cache": False}, None),
        ({"JAX_COMPILATION_CACHE_DIR": "/mine"}, {}, "/mine"),
    ],
)
def test_where_compiled_programs_are_kept(start, monkeypatch, tmp_path, environ, options, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    _, out, _ = start('print(os.environ.get("JAX_COMPILATION_CACHE_DIR"))', processes=1, **options)
    assert out == f"[0] {folder and tmp_path / folder}\n"


def test_a_restart_finds_what_was_compiled(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    body = """
import jax, jax.numpy as jnp, jdist, numpy as np
found, asked = [], []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event) if event.endswith("/cache_hits") else None)
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: asked.append(event) if event.endswith("/backend_compile_duration") else None
)
strategy = jdist.multi_worker()
def step(w, batch):
    loss, grad = jdist.value_and_grad(lambda w: jdist.mean((w * batch["x"] - 2.0) ** 2))(w)
    return w - 0.1 * grad, {"loss": loss}
step, w = jdist.distribute(step, strategy), strategy.init(lambda: jnp.zeros(3))
for _ in range(3):  # from the second call on a state that the first has made, which the call consumes
    w, metrics = step(w, {"x": np.ones((4, 3), np.float32)})
put(f"{strategy.cluster.num_processes}.{index}.{attempt}", json.dumps([len(found), len(asked)]))
sys.exit(attempt == 0)
"""
    for processes in (2, 1):
        devices = 2 // processes
        launch(
            [program(tmp_path, body)],
            processes=processes,
            devices_per_process=devices,
            max_restarts=1,
            log_dir=tmp_path / "logs",
        )
    told = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("[12].*")}
    assert told["2.0.0"][0] == told["1.0.0"][0] == 0  # another number of processes finds none of them
    for name in ("2.0.1", "1.0.1"):  # of several processes on CPUs the first alone, as JAX's keys differ between them
        found, asked = told[name]
        assert found == asked > 0


def test_each_attempt_has_ports_of_its_own(start):
    result, _, _ = start('print(os.environ["TF_CONFIG"])\nsys.exit(attempt == 0)', max_restarts=1)
    first, second = (json.loads(logs(result)[f"attempt_{n}/process_0.log"])["cluster"]["worker"] for n in (0, 1))
    assert not set(first) & set(second)


def test_arguments_pass_as_they_are_and_nothing_is_on_standard_input(start):
    _, out, _ = start("print(sys.argv[1:], repr(sys.stdin.read()))", "--a_b", "--", "é x", processes=1)
    assert out == "[0] ['--a_b', '--', 'é x'] ''\n"


# ---- output


def test_output_is_shown_with_the_index_and_kept_without(start, tmp_path):
    result, out, err = start('print(f"from {index}")\nprint("trouble", file=sys.stderr)')
    assert result.exit_code == 0
    assert sorted(out.splitlines()) == ["[0] from 0", "[1] from 1"]
    assert sorted(err.splitlines())[:2] == ["[0] trouble", "[1] trouble"]
    assert logs(result)["attempt_0/process_1.log"] == "from 1\ntrouble\n"


def test_the_first_line_says_what_runs_and_where_the_logs_are(start, tmp_path):
    _, _, err = start("", "x y", processes=3, evaluator=True)
    first, *rest = err.splitlines()
    assert first == f"[launch] 3 processes and an evaluator of {tmp_path}/child.py 'x y'; logs: {tmp_path}/logs"
    assert all("the evaluator has 300 s" in line for line in rest)  # said if the evaluator is not the first to end


def test_logs_of_an_earlier_launch_are_kept(start):
    start("print(1)", processes=1)
    result, _, _ = start("print(2)", processes=1)
    assert logs(result) == {"attempt_0/process_0.log": "1\n2\n"}


def test_without_a_log_dir_there_is_a_new_folder_for_each_launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {launch([sys.executable, "-c", ""], processes=1).log_dir for _ in range(2)}
    assert len(folders) == 2
    assert all(folder.parent.name == "runs" and folder.is_dir() for folder in folders)


def test_a_log_that_cannot_be_written_does_not_stop_the_job(start, tmp_path):
    (tmp_path / "logs" / "attempt_0").mkdir(parents=True)
    (tmp_path / "logs" / "attempt_0" / "process_1.log").mkdir()
    result, out, err = start("print(index)")
    assert result.exit_code == 0
    assert sorted(out.splitlines()) == ["[0] 0", "[1] 1"]
    assert "process_1.log is not whole" in err


# ---- failures


def test_the_first_that_failed_is_named_with_its_traceback_and_log(start, tmp_path):
    result, _, err = start('if index: raise ValueError("no luck")\nwait()', grace_s=0.2)
    assert result.exit_code == 1
    report = err[err.index("attempt 0 failed") :]
    assert f"process 1 ended with exit code 1; its log: {tmp_path}/logs/attempt_0/process_1.log" in report
    assert "raise ValueError" in report
    said, last = report.splitlines()[-2:]
    assert said == "[launch]   ValueError: no luck"
    assert re.match(r"\[launch\] the job failed \d+ s after attempt 0 began: process 1 ended with exit code 1", last)
    assert "ValueError: no luck. Look at its log, mend the cause, and start the job again" in last


def test_a_mistake_that_every_start_would_make_is_to_be_mended_first(start):
    _, _, err = start('print("jdist: train.step: no such key", file=sys.stderr)\nsys.exit(2)')
    assert err.splitlines()[-1].endswith("no such key. Another start would end in the same way: mend this first.")


def test_the_guilty_comes_before_those_that_lost_it_even_when_seen_later(start):
    body = 'put(f"there_{index}")\nif index != 1: sys.exit(75)\n'
    body += '[await_file(f"there_{n}") for n in (0, 2)]\ntime.sleep(0.2)\nos.kill(os.getpid(), signal.SIGSEGV)'
    result, _, err = start(body, processes=3)
    assert result.exit_code == 128 + 11
    assert "attempt 0 failed: process 1 was killed by SIGSEGV (2 noticed and left)" in err


def test_one_that_ends_well_early_is_no_failure(start):
    result, _, err = start('put("first") if index else await_file("first")')
    assert result.exit_code == 0
    assert len(err.splitlines()) == 1


def test_what_does_not_listen_is_killed(start):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    body += 'put(f"deaf_{index}")\n[await_file(f"deaf_{n}") for n in (0, 1)]\nsys.exit(3) if index else wait()'
    result, _, _ = start(body, grace_s=0.2)
    assert result.exit_code == 3
    assert [end.code for end in result.attempts[0].ends] == [3, -9]


def test_a_program_that_cannot_be_run_says_why(tmp_path, capfd):
    script = tmp_path / "broken"
    script.write_text("#!/nowhere/python\n")
    script.chmod(0o755)
    result = launch([str(script)], log_dir=tmp_path / "logs", max_restarts=3)
    assert result.exit_code == 127
    assert len(result.attempts) == 1
    assert "broken: No such file or directory" in capfd.readouterr().err


def test_processes_that_cannot_be_started_end_the_launch(start, monkeypatch):
    def none(number):
        raise OSError("no port is free")

    monkeypatch.setattr(process_file, "free_ports", none)
    result, _, err = start("", max_restarts=3)
    assert result.exit_code == 126
    assert "attempt 0 cannot be started: no port is free" in err


def test_a_signal_that_another_thread_takes_is_heard_at_once(start, tmp_path):
    def take_it():
        until(lambda: (tmp_path / "there").exists(), "nobody is there")
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # the kernel may choose any thread

    thread = threading.Thread(target=take_it)
    thread.start()
    result, _, err = start('put("there")\nwait()', processes=1)
    thread.join()
    assert (result.exit_code, result.stop, result.timed_out) == (143, signal.SIGTERM, False)
    assert "SIGTERM passed on" in err


# ---- attempts


def test_all_are_started_again_after_a_failure(start):
    result, _, err = start("if index and attempt < 2: sys.exit(1)\nprint(attempt)", max_restarts=3, grace_s=20.0)
    assert result.exit_code == 0
    assert [attempt.outcome for attempt in result.attempts] == ["failed", "failed", "finished"]
    assert logs(result)["attempt_2/process_0.log"] == "2\n"
    assert "restart 2 of 3" in err
    assert err.splitlines()[-1].endswith("finished")


def test_a_crash_loop_names_its_cause(start):
    result, _, err = start('raise OSError("no such data set")', processes=1, max_restarts=1)
    assert result.exit_code == 1
    loop, last = err.splitlines()[-2:]
    assert "crash loop: 2 attempts in a row failed alike" in loop
    assert loop.endswith("OSError: no such data set")
    assert (
        "process 0 ended with exit code 1: OSError: no such data set. Look at its log, mend the cause, and start the job again"
        in last
    )


def test_it_goes_on_with_those_that_are_left_and_grows_again(start):
    body = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
put(f"up_{attempt}_{index}")
workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
print(workers)
if attempt == 0 and index == 2: sys.exit(1)
if attempt == 0: sys.exit(75)
if attempt == 1: wait()
"""
    result, _, err = start(body, processes="1:3", regrow_s=0.5)
    assert (result.exit_code, [attempt.size for attempt in result.attempts]) == (0, [3, 2, 3])
    assert logs(result)["attempt_2/process_0.log"] == "3\n"
    assert "attempt 1: 2 processes" in err


def test_the_evaluator_gets_time_to_finish_after_the_workers(start):
    body = """
if task["type"] == "worker":
    put("guard", os.getppid())
else:
    await_file("guard")
    guard = (here / "guard").read_text()
    deadline = time.monotonic() + 30
    while pathlib.Path(f"/proc/{guard}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
"""
    result, _, _ = start(body, processes=1, evaluator=True)
    assert result.exit_code == 0
    assert [end.task.type for end in result.attempts[0].ends] == ["worker", "evaluator"]


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 0}, "`processes` is 0; it must be a whole number"),
        ({"max_restarts": -1}, "`max_restarts` is -1"),
        ({"devices_per_process": 0}, "`devices_per_process` is 0"),
        ({"grace_s": float("nan")}, "`grace_s` is nan"),
        ({"stop_timeout_s": 0.0}, "`stop_timeout_s` is 0"),
        ({"regrow_s": -1.0}, "`regrow_s` is -1"),
    ],
)
def test_options_that_are_not_right(start, options, message):
    with pytest.raises(LaunchError, match=message):
        start("", **options)


def test_a_log_dir_that_is_a_file(start, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="log_dir="):
        start("", log_dir=tmp_path / "file")


# A process of its own: in the tests' own one, XLA and gRPC begin and end threads whenever they like.
LEAVES_NOTHING = """
import os, sys, time
from jdist.launcher.launch import launch
def held():
    return os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
before = held()
assert launch(sys.argv[1:2], log_dir=sys.argv[2], grace_s=5.0, max_restarts=1).exit_code == 7
for _ in range(1000):  # a thread that was joined may still be in the kernel
    if held() == before:
        break
    time.sleep(0.01)
assert held() == before, (held(), before)
"""


def test_nothing_of_the_launcher_is_left_in_its_process(tmp_path):
    command = [sys.executable, "-c", LEAVES_NOTHING, program(tmp_path, "sys.exit(7)"), str(tmp_path / "logs")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
