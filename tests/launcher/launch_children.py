"""What the tests of the launcher share: small programs to launch, and a launcher in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Each program knows its index, its attempt and its folder; `wait()` goes on until a signal ends it.
PRELUDE = """\
import json, os, pathlib, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
index, attempt, here = task["index"], int(os.environ["JDIST_LAUNCH_ATTEMPT"]), pathlib.Path(__file__).parent
def wait():
    while True:
        signal.pause()
def put(name, text=""):
    (here / (name + ".new")).write_text(str(text))
    (here / (name + ".new")).rename(here / name)
def await_file(name):
    deadline = time.monotonic() + 60
    while not (here / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.005)
"""


def program(folder, body):
    """A script of `body` in `folder`."""
    path = folder / "child.py"
    path.write_text(PRELUDE + body)
    return str(path)


@contextlib.contextmanager
def launcher(folder, *options, body="", line=(), stdout=subprocess.PIPE):
    """`jdist launch` of a program of `body`, or of a command line, in a process and a process group of its own."""
    command = [sys.executable, "-m", "jdist", "launch", "--log-dir", str(folder / "logs"), *options, "--"]
    with subprocess.Popen(
        [*command, *(map(str, line) if line else [program(folder, body)])],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        stdout=stdout,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process):
    """Its exit code and all it said."""
    out, _ = process.communicate(timeout=60)
    return process.returncode, (out or b"").decode()


def await_files(folder, *names):
    """The texts of files that children write, once they are there."""
    until(lambda: all((folder / name).exists() for name in names), f"no {names} in {os.listdir(folder)}")
    return [(folder / name).read_text() for name in names]


def is_alive(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_gone(*pids):
    """Fails if one of the processes is still there after a while; kills it then."""
    try:
        until(lambda: not any(map(is_alive, pids)), f"still alive: {[pid for pid in pids if is_alive(pid)]}")
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def until(condition, message, timeout_s=30.0):
    """Poll until it is so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.01)
