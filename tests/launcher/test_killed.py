"""Launchers and what they started, killed and stopped by real signals; afterwards no process is left."""

import os
import re
import signal
import subprocess
import sys

import pytest

from jdist.launcher.process import GUARD
from tests.launcher.launch_children import await_files, await_gone, finish, is_alive, launcher, until

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes in sessions of their own are found on Linux only")
# A child with a grandchild in its process group and one in a session of its own, which listen to nothing.
FAMILY = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
family = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
put(f"pids_{attempt}_{index}", " ".join(str(pid) for pid in (os.getpid(), os.getppid(), *(p.pid for p in family))))
"""


def family(folder, attempt=0, processes=2):
    """Pids of all that was started: for each child itself, its guard and its grandchildren."""
    texts = await_files(folder, *(f"pids_{attempt}_{index}" for index in range(processes)))
    pids = [int(pid) for text in texts for pid in text.split()]
    assert all(map(is_alive, pids))
    return pids


@linux
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    with launcher(tmp_path, body=FAMILY + "wait()") as process:
        pids = family(tmp_path)
        process.kill()
        await_gone(*pids)


@linux
def test_nothing_is_left_when_a_stopped_launcher_is_killed(tmp_path):
    with launcher(tmp_path, body=FAMILY + "wait()") as process:
        pids = family(tmp_path)
        process.send_signal(signal.SIGSTOP)
        os.kill(pids[0], signal.SIGSTOP)
        process.kill()
        await_gone(*pids)


@linux
@pytest.mark.parametrize("how", ["sys.exit(0)", "sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_a_process_started_goes_with_it(tmp_path, how):
    with launcher(tmp_path, "--grace-s", "0.2", body=FAMILY + f'await_file("go")\n{how}') as process:
        pids = family(tmp_path)
        (tmp_path / "go").touch()
        finish(process)
        await_gone(*pids)


@linux
def test_a_guard_that_is_killed_leaves_nothing_and_is_a_failure(tmp_path):
    with launcher(tmp_path, "--grace-s", "0.2", body=FAMILY + "wait()") as process:
        pids = family(tmp_path)
        os.kill(pids[1], signal.SIGKILL)  # of process 0
        code, out = finish(process)
        assert (code, "process 0 was killed by SIGKILL" in out) == (137, True), out
        apart = pids[3]  # in a session of its own, and nobody is left who could know of it
        os.kill(apart, signal.SIGKILL)
        await_gone(*pids)


@linux
def test_no_process_outlives_launcher_and_guards_killed_together(tmp_path):
    with launcher(tmp_path, body='put(f"up_{index}", f"{os.getpid()} {os.getppid()}")\nwait()') as process:
        pids = [int(pid) for text in await_files(tmp_path, "up_0", "up_1") for pid in text.split()]
        process.send_signal(signal.SIGSTOP)  # so that it does nothing about the guards' end
        for guard in pids[1::2]:
            os.kill(guard, signal.SIGKILL)
        process.kill()
        await_gone(*pids)


SAVES = """
def save(number, frame):
    put(f"saved_{index}", number)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
put(f"up_{index}", f"{os.getpid()} {os.getppid()}")
wait()
"""


@pytest.fixture
def not_under_nohup():
    """The tests may be; a launcher started there takes no notice of SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("not_under_nohup")
@pytest.mark.parametrize(
    ("number", "passed_on"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),  # of a terminal that closes
    ],
)
def test_a_signal_is_passed_on_and_all_save(tmp_path, number, passed_on):
    with launcher(tmp_path, "--max-restarts", "3", body=SAVES) as process:
        await_files(tmp_path, "up_0", "up_1")
        process.send_signal(number)
        code, out = finish(process)
    assert code == 128 + passed_on, out
    assert await_files(tmp_path, "saved_0", "saved_1") == [str(int(passed_on))] * 2
    assert "Traceback" not in out


# As SAVES, but the save takes a while, in which a second signal would be noticed.
SAVES_SLOWLY = SAVES.replace(
    "    sys.exit", "    signal.signal(number, lambda *_: put('twice'))\n    time.sleep(0.3)\n    sys.exit"
)


def test_the_terminals_ctrl_c_reaches_the_processes_once(tmp_path):
    with launcher(tmp_path, body=SAVES_SLOWLY) as process:
        await_files(tmp_path, "up_0", "up_1")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert finish(process)[0] == 130
    assert not (tmp_path / "twice").exists()


def test_a_scheduler_that_signals_every_process_does_not_make_it_two_signals(tmp_path):
    with launcher(tmp_path, body=SAVES_SLOWLY) as process:
        pids = [int(pid) for text in await_files(tmp_path, "up_0", "up_1") for pid in text.split()]
        for pid in (*pids, process.pid):
            os.kill(pid, signal.SIGTERM)
        assert finish(process)[0] == 143
    assert not (tmp_path / "twice").exists()


def test_a_second_signal_kills_at_once(tmp_path):
    with launcher(tmp_path, body=FAMILY + "wait()") as process:
        pids = family(tmp_path)
        process.send_signal(signal.SIGINT)
        while b"SIGINT passed on" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)  # another one counts at once, the same only after a second
        code, out = finish(process)
        assert (code, "killing all" in out) == (130, True)
        if sys.platform == "linux":
            await_gone(*pids)


def test_a_stop_has_a_deadline(tmp_path):
    with launcher(tmp_path, "--stop-timeout-s", "0.3", body=FAMILY + "wait()") as process:
        pids = family(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 137
        if sys.platform == "linux":
            await_gone(*pids)


def test_a_process_that_stalls_is_named(tmp_path):
    body = 'put(f"up_{index}", os.getpid())\nif index: wait()\nawait_file("go")\nsys.exit(75)'
    with launcher(tmp_path, "--grace-s", "0.2", body=body) as process:
        stalled = int(await_files(tmp_path, "up_0", "up_1")[1])
        os.kill(stalled, signal.SIGSTOP)
        (tmp_path / "go").touch()
        code, out = finish(process)
    assert code == 137
    assert "process 1 did not end and had to be killed (1 noticed and left)" in out


def test_the_job_goes_on_after_a_process_was_killed(tmp_path):
    body = 'put(f"up_{attempt}_{index}", os.getpid())\nif attempt == 0: wait()'
    with launcher(tmp_path, "--max-restarts", "1", "--grace-s", "0.2", body=body) as process:
        pids = await_files(tmp_path, "up_0_0", "up_0_1")
        os.kill(int(pids[1]), signal.SIGKILL)
        code, out = finish(process)
    assert code == 0, out
    assert re.search("attempt 0: 2 processes, .* process 1 was killed by SIGKILL", out)


# ---- much output

FLOOD = """
line = ("0123456789" * 10 + "\\n") * 1000
for n in range(100):
    sys.stdout.write(line)
    sys.stderr.write(line)
"""
FLOOD_BYTES = 2 * 100 * 1000 * 101


def test_much_output_is_neither_lost_nor_mixed_up(tmp_path):
    with open(tmp_path / "shown", "wb") as shown, launcher(tmp_path, body=FLOOD, stdout=shown) as process:
        assert finish(process)[0] == 0
    lines = (tmp_path / "shown").read_bytes().splitlines()
    whole = b"0123456789" * 10
    assert {line for line in lines if not line.startswith(b"[launch]")} == {b"[0] " + whole, b"[1] " + whole}
    assert len(lines) == 1 + 2 * FLOOD_BYTES // 101
    for index in (0, 1):
        assert (tmp_path / "logs" / "attempt_0" / f"process_{index}.log").stat().st_size == FLOOD_BYTES


def test_a_terminal_that_stands_still_does_not_keep_it_from_ending(tmp_path):
    body = 'put(f"guard_{index}", os.getppid())\n' + FLOOD + 'put("never")'
    with launcher(tmp_path, body=body) as process:  # nobody reads
        guards = [int(pid) for pid in await_files(tmp_path, "guard_0", "guard_1")]
        sizes = [0]

        def stands_still():
            sizes.append(sum(log.stat().st_size for log in tmp_path.rglob("process_*.log")))
            return sizes[-1] > 0 and len(sizes) > 50 and sizes[-1] == sizes[-50]

        until(stands_still, "it never waited")
        process.send_signal(signal.SIGTERM)
        await_gone(*guards)
        code, _ = finish(process)
    assert code == 143
    assert not (tmp_path / "never").exists()


def test_a_reader_that_goes_away_does_not_stop_the_job(tmp_path):
    body = 'print("one")\nawait_file("closed")\nprint("two")\nput(f"done_{index}")'
    with launcher(tmp_path, body=body) as process:
        process.stdout.readline()
        process.stdout.close()
        (tmp_path / "closed").touch()
        await_files(tmp_path, "done_0", "done_1")
        assert process.wait(30) == 0
    assert (tmp_path / "logs" / "attempt_0" / "process_1.log").read_text() == "one\ntwo\n"


_SIGNALLED_WHILE_IT_STARTS = """
import os, runpy, signal, sys, time
guard = runpy.run_path(sys.argv[1])
begin = os.setsid
os.setsid = lambda: (time.sleep(0.3), begin())  # the child takes its time before it has handlers of its own
guard["_wake_on_signals"]()
pid = guard["_start"]([sys.executable, "-c", "import time; time.sleep(60)"])
os.kill(pid, getattr(signal, sys.argv[2]))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_that_comes_while_a_process_starts_is_not_lost(name):
    command = [sys.executable, "-c", _SIGNALLED_WHILE_IT_STARTS, GUARD, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert int(done.stdout) == -getattr(signal, name)
