"""A host and processes of `job.py`, which a test kills, stops and starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("job.py")


class Job:
    """The processes of one job, by the order of their starts."""

    def __init__(self, folder: Path, processes: int, *, epochs: int, least: int = 1, spares: int = 0, devices: int = 1):
        self.folder, self.epochs, self.devices = folder, epochs, devices
        self.environ = {**os.environ, "JAX_PLATFORMS": "cpu", "JDIST_TOKEN": "secret"}
        self.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        )
        self.go_on_to(0)
        self.processes: list[subprocess.Popen[str]] = []
        line = [sys.executable, "-m", "jdist.cluster.worlds.host", str(least), str(processes)]
        self.host = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environ)
        assert self.host.stdout is not None
        self.environ["JDIST_WORLDS"] = json.loads(self.host.stdout.readline())["address"]
        self.most = processes
        for number in range(processes + spares):
            self.start(number)

    def start(self, number: int) -> subprocess.Popen[str]:
        cluster = {"worker": [f"127.0.0.1:{20000 + i}" for i in range(max(self.most, number + 1))]}
        config = {"cluster": cluster, "task": {"type": "worker", "index": number}}
        with (self.folder / f"{number}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(self.folder), str(self.epochs)],
                env={**self.environ, "TF_CONFIG": json.dumps(config)},
                stdout=log,
                stderr=log,
                text=True,
            )
        self.processes.append(process)
        return process

    def go_on_to(self, step: int) -> None:
        """Lets the run go on up to a step."""
        (self.folder / "tmp").write_text(str(step))
        (self.folder / "tmp").rename(self.folder / "pause_at")

    def where(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Returns the step, rank, size and generation that a process was last at."""
        with contextlib.suppress(OSError):
            return json.loads((self.folder / f"{process.pid}.at").read_text())
        return {"step": -1, "generation": -1}

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = 150.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            logs = "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))
            assert time.monotonic() < deadline, f"no {what} in {timeout_s:g} s{logs}"
            time.sleep(0.02)

    def at(self, step: int, *processes: subprocess.Popen[str]) -> None:
        """Lets the run go on to a step, and waits until these processes are there."""
        self.go_on_to(step)
        self.wait_for(lambda: all(self.where(each)["step"] >= step for each in processes), f"step {step}")

    def kill(self, process: subprocess.Popen[str], *others: subprocess.Popen[str]) -> None:
        """Kills a process between two steps; waits until the others know."""
        process.kill()
        logs = [self.folder / f"{self.processes.index(each)}.log" for each in others]
        self.wait_for(lambda: all("is lost at step" in log.read_text() for log in logs), "news of the loss")

    def end(self, *processes: subprocess.Popen[str], codes: Collection[int] = (0,)) -> list[dict[str, Any]]:
        """Lets the run come to its end; returns what these processes have then, if they were members; checks exit codes."""
        self.go_on_to(1 << 30)
        self.wait_for(lambda: all(each.poll() is not None for each in processes), "end")
        found = [each.returncode for each in processes]
        logs = "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))
        assert set(found) <= set(codes), f"{found}{logs}"
        results = [self.folder / f"{each.pid}.json" for each in processes]
        return [json.loads(path.read_text()) for path in results if path.exists()]

    def close(self) -> None:
        for process in [*self.processes, self.host]:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(30)
        for pipe in (self.host.stdin, self.host.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def job(folder: Path, processes: int, **options: Any) -> Iterator[Job]:
    folder.mkdir(exist_ok=True)
    running = Job(folder, processes, **options)
    try:
        yield running
    finally:
        running.close()
