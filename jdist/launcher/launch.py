"""`launch`: starts the processes of one job on this machine, watches them, and restarts them when they fail."""

from __future__ import annotations

import os
import random
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from jdist.errors import LaunchError
from jdist.launcher.events import Settings
from jdist.launcher.exit_cause import WORKER, Task
from jdist.launcher.loop import Launched, Launcher
from jdist.launcher.options import (
    check_cpu_devices,
    check_positive,
    command_line,
    parse_processes,
    parse_servers,
    whole_number,
)
from jdist.launcher.supervisor import PS

RESTARTS_OF_A_RANGE = 3


def launch(
    command: Sequence[str],
    *,
    processes: int | str | tuple[int, int] | None = None,
    workers: int | None = None,
    ps: int | None = None,
    evaluator: bool = False,
    devices_per_process: int | None = None,
    max_restarts: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    grace_s: float = 10.0,
    stop_timeout_s: float = 300.0,
    regrow_s: float = 300.0,
) -> Launched:
    """Runs a command in several processes that find each other by TF_CONFIG; none is left when it returns.

    With `workers` and `ps` the command runs once, as the chief of a parameter server, whose workers and servers run `jdist
    serve`. One of these that dies is started again by itself; all end with the chief.

    While it runs, in the main thread, SIGINT and SIGTERM are passed on to the processes once, which may then save
    and leave; a second one kills them. When a process fails, the others are ended, and with restarts left all are
    started again, at new ports.

    Args:
        command: a config (.yaml) and overrides, a script (.py) and arguments, `-m` and a module, or a program.
        processes: how many, None for 2; as "MIN:MAX" or (MIN, MAX), start with MAX, and after a failure go on with those that
            are left, at least MIN.
        workers: of a parameter server.
        ps: how many processes keep its parameters.
        evaluator: start one more process, of task type evaluator; it ends with the job.
        devices_per_process: run on this many virtual CPU devices each; None for the devices that JAX finds.
        max_restarts: how often to start all again after a failure that this may mend: any but exit code 2. None
            for 0, or for 3 with MIN:MAX.
        log_dir: folder for the output of each process; None for runs/launch-TIME.
        grace_s: seconds that others get to end by themselves after a failure, then again after SIGTERM, before
            SIGKILL.
        stop_timeout_s: seconds that processes get to save and leave when asked to stop.
        regrow_s: seconds to go on with fewer than MAX before all are asked to save and leave, to go on with MAX.

    Returns:
        The exit code, the attempts and where the logs are.

    Raises:
        LaunchError: what is asked for is not right.

    Example:
        >>> launch(["python", "-c", "pass"], processes=2).exit_code
        0
    """
    counts = parse_servers(workers, ps, processes)
    smallest, largest = (1, 1) if counts else parse_processes(2 if processes is None else processes)
    servers = () if counts is None else _servers(*counts)
    restarts = (RESTARTS_OF_A_RANGE if smallest < largest else 0) if max_restarts is None else max_restarts
    for name, seconds in (("grace_s", grace_s), ("stop_timeout_s", stop_timeout_s), ("regrow_s", regrow_s)):
        check_positive(name, seconds)
    settings = Settings(
        smallest=smallest,
        largest=largest,
        evaluator=evaluator,
        chief=counts is not None,
        max_restarts=whole_number("max_restarts", restarts, least=0),
        grace_s=grace_s,
        stop_timeout_s=stop_timeout_s,
        regrow_s=regrow_s,
        seed=random.SystemRandom().getrandbits(32),
    )
    line = command_line(command, devices_per_process=devices_per_process)
    check_cpu_devices(devices_per_process, os.environ)
    which = f"{largest} process{'es' if largest > 1 else ''}"
    if counts is not None:
        num_workers, num_ps = counts
        which = f"a chief, {num_workers} worker{'s' if num_workers > 1 else ''} and {num_ps} ps"
    which += " and an evaluator" if evaluator else ""
    launcher = Launcher(
        settings, line, log_dir=make_log_dir(log_dir), devices_per_process=devices_per_process, servers=servers
    )
    return launcher.run(f"{which} of {shlex.join(command)}")


def make_log_dir(log_dir: str | os.PathLike[str] | None) -> Path:
    """Makes the folder of the logs; None: a new one, runs/launch-TIME.

    Raises:
        LaunchError: it cannot be made.
    """
    try:
        if log_dir is not None:
            folder = Path(log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        name = time.strftime("launch-%Y%m%d-%H%M%S")
        for suffix in ("", *(f"-{n}" for n in range(2, 100))):
            folder = Path("runs") / f"{name}{suffix}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            return folder
    except OSError as exc:
        raise LaunchError(f"log_dir={log_dir}: {exc}. Give a folder that can be written.") from exc
    raise LaunchError(f"runs/{name} and 98 more like it exist already; give log_dir.")


def _servers(workers: int, ps: int) -> tuple[Task, ...]:
    return tuple(Task(job, i, serves=True) for job, count in ((WORKER, workers), (PS, ps)) for i in range(count))
