"""`launch`: starts the processes of one job on this machine, watches them, and restarts them when they fail."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jdist.cluster.address import ALLOWED, host_problem, problem
from jdist.cluster.environment import TOKEN, text
from jdist.errors import LaunchError
from jdist.launcher.events import Settings
from jdist.launcher.exit_cause import PS, WORKER, Task
from jdist.launcher.loop import Launched, Launcher
from jdist.launcher.process import Host
from jdist.launcher.worlds import own_address
from jdist.support import checks
from jdist.support.xla import COMPILED, bound_compiled

_RESTARTS_OF_A_RANGE = 3


def launch(
    command: Sequence[str],
    *,
    processes: int | str | tuple[int, int] | None = None,
    workers: int | None = None,
    ps: int | None = None,
    evaluator: bool = False,
    devices_per_process: int | None = None,
    max_restarts: int | None = None,
    on_loss: Literal["stop", "continue"] = "stop",
    spares: int = 0,
    host: str | None = None,
    join: str | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    grace_s: float = 10.0,
    stop_timeout_s: float = 300.0,
    regrow_s: float = 300.0,
    compilation_cache: bool = True,
) -> Launched:
    """Runs a command in several processes that find each other by TF_CONFIG; none is left when it returns.

    With `workers` and `ps` the command runs once, as the chief of a parameter server; its workers and servers run `jdist
    serve`. One of these that dies is restarted alone; all end with the chief.

    In the main thread, the first SIGINT or SIGTERM is passed on to the processes, which may save and leave; a second one
    kills them. When a process fails, the others are ended; with restarts left all are started again, at new ports.

    With `on_loss="continue"`, for a program with `jdist.multi_worker(on_loss="continue")`, the others go on without a process
    that fails or is killed, and one more is started in its place, which comes in after a step. The exit code is 0 if all
    that are in the job at its end end with 0.

    Args:
        command: a config (.yaml) and overrides, a script (.py) and arguments, `-m` and a module, or a program.
        processes: how many; None: 2. With "MIN:MAX" or (MIN, MAX) start with MAX, and after a failure go on with those
            that are left, at least MIN.
        workers: number of a parameter server's workers.
        ps: number of processes that keep its parameters.
        evaluator: start one more process, of task type evaluator, which ends with the job.
        devices_per_process: number of virtual CPU devices of each; None: the devices that JAX finds.
        max_restarts: how often to start all again after a failure, except one that a restart does not mend (exit codes 2
            and 74). None: 0, or 3 with MIN:MAX or "continue", where each process that is started again counts as well.
        on_loss: what the others do when a process is lost: "stop" or "continue". Then `processes` as one number is the most;
            the fewest is 1. It does not go together with `workers` and `ps`.
        spares: number of processes more that stand ready to take a lost one's place; needs "continue".
        host: this machine's address for processes of other machines that join; None: 127.0.0.1. Needs "continue".
        join: address of another launch's job, which its first lines say: these processes join that, as "continue". Both
            launches need the same JDIST_TOKEN in their environment.
        log_dir: folder for the output of each process; None: runs/launch-TIME.
        grace_s: seconds that others get to end by themselves after a failure, then again after SIGTERM, before SIGKILL.
        stop_timeout_s: seconds that processes get to save and leave when asked to stop.
        regrow_s: seconds to run with fewer than MAX before all are asked to save and leave, to go on with MAX.
        compilation_cache: whether the processes keep compiled programs in `log_dir`/compiled (None: runs/compiled), unless
            JAX_COMPILATION_CACHE_DIR is set. A config has a key of its own, `platform.compilation_cache`.

    Returns:
        The exit code, the attempts and the folder of the logs.

    Raises:
        LaunchError: an argument is not allowed.

    Example:
        >>> launch(["python", "-c", "pass"], processes=2).exit_code
        0
    """
    given = {"processes": processes, "workers": workers, "ps": ps, "evaluator": evaluator or None}
    check_on_loss(on_loss, join, {**given, "spares": spares or None, "host": host})
    counts = parse_servers(workers, ps, processes)
    settings = make_settings(
        1 if counts else 2 if processes is None else processes,
        max_restarts,
        grace_s=grace_s,
        stop_timeout_s=stop_timeout_s,
        regrow_s=regrow_s,
        evaluator=evaluator,
        chief=counts is not None,
        on_loss=on_loss if join is None else "continue",
        spares=spares,
        join=join,
    )
    line = command_line(command, devices_per_process=devices_per_process)
    check_cpu_devices(devices_per_process, os.environ)
    which = f"{settings.largest} process{'es' if settings.largest > 1 else ''}"
    which += f" and {settings.spares} spare" if settings.spares else f" that join {join}" if join else ""
    servers: list[Task] = []
    if counts is not None:
        num_workers, num_ps = counts
        servers = [Task(WORKER, i, serves=True) for i in range(num_workers)]
        servers += [Task(PS, i, serves=True) for i in range(num_ps)]
        which = f"a chief, {num_workers} worker{'s' if num_workers > 1 else ''} and {num_ps} ps"
    which += " and an evaluator" if evaluator else ""
    compiled: Path | None = None
    if compilation_cache and line[1:4] != ["-m", "jdist", "run"]:
        compiled = Path("runs" if log_dir is None else log_dir) / COMPILED
        bound_compiled(compiled)
    own_host = own_address(join) if join is not None else host
    launcher = Launcher(
        settings,
        line,
        host=None if own_host is None else Host(own_host),
        log_dir=make_log_dir(log_dir),
        devices_per_process=devices_per_process,
        servers=servers,
        compiled=compiled,
    )
    return launcher.run(f"{which} of {shlex.join(command)}")


def make_log_dir(log_dir: str | os.PathLike[str] | None) -> Path:
    """Makes the folder of the logs; None makes a new one, runs/launch-TIME."""
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


def parse_processes(processes: int | str | tuple[int, int]) -> tuple[int, int]:
    """Parses the fewest and the most processes: 4, "4", "1:4" or (1, 4)."""
    parts = [str(part) for part in processes] if isinstance(processes, tuple) else str(processes).split(":")
    if len(parts) in (1, 2) and all(part.isascii() and part.isdigit() for part in parts):
        smallest, largest = int(parts[0]), int(parts[-1])
        if 1 <= smallest <= largest:
            return smallest, largest
    raise LaunchError(
        f"`processes` is {processes!r}; it must be a whole number, 1 or more, or the fewest and the most as MIN:MAX (1:4)."
    )


def parse_servers(workers: int | None, ps: int | None, processes: object) -> tuple[int, int] | None:
    """Checks the numbers of workers and parameter servers; None for a job without them."""
    if workers is None and ps is None:
        return None
    if processes is not None:
        raise LaunchError(
            f"processes={processes} and workers={workers}, ps={ps} exclude each other. `processes` is for jobs that "
            "train in step; a parameter server has `workers` and `ps`, and its program runs once, as the chief."
        )
    if workers is None or ps is None:
        missing, there = ("workers", "ps") if workers is None else ("ps", "workers")
        raise LaunchError(f"`{there}` is given without `{missing}`; a parameter server needs both, 1 or more.")
    return checks.whole_number("workers", workers, LaunchError), checks.whole_number("ps", ps, LaunchError)


def check_on_loss(on_loss: str, join: str | None, given: Mapping[str, Any]) -> None:
    """Refuses options (None: not given) that do not fit a job that goes on without lost processes, or that is joined."""
    checks.choice("on_loss", on_loss, ("stop", "continue"), LaunchError)
    mode = f"`on_loss` is {on_loss!r}" if join is None else f"`join` is {join!r}"
    goes_on = on_loss == "continue" or join is not None
    wrong = ("workers", "ps") if goes_on else ("spares", "host")
    for name in wrong if join is None else (*wrong, "spares", "host", "evaluator"):
        if given[name] is not None:
            mend = "leave one of them out, or give it to the launch that is joined" if join else "leave it out"
            mend = mend if goes_on else 'it needs on_loss="continue" (--on-loss continue)'
            raise LaunchError(f"`{name}` is {given[name]!r} and {mode}; {mend}.")
    if (host := given["host"]) is not None and (problem_of_host := host_problem(host)) is not None:
        raise LaunchError(f"`host` is {host!r}; it must be this machine's name or address. {problem_of_host}")
    if join is None:
        return
    if (problem_of_join := problem(join)) is not None:
        raise LaunchError(f"`join` is {join!r}; it must be {ALLOWED}. {problem_of_join}")
    if given["processes"] is not None and _is_range(given["processes"]):
        raise LaunchError(f"`processes` is {given['processes']!r} and {mode}; it must be one number.")
    if text(os.environ, TOKEN) is None:
        raise LaunchError(f"{mode}, but {TOKEN} is not set. Set it for both launches, to the same secret.")


def _is_range(processes: object) -> bool:
    return isinstance(processes, tuple) or ":" in str(processes)


def make_settings(processes: int | str | tuple[int, int], max_restarts: int | None, **others: Any) -> Settings:
    """Makes the settings of a launch from its arguments; `others` are called as there."""
    smallest, largest = parse_processes(processes)
    if others.get("on_loss") == "continue" and not _is_range(processes):
        smallest = 1
    goes_on = smallest < largest or others.get("on_loss") == "continue"
    restarts = (_RESTARTS_OF_A_RANGE if goes_on else 0) if max_restarts is None else max_restarts
    seed = random.SystemRandom().getrandbits(32)
    return Settings(smallest=smallest, largest=largest, max_restarts=restarts, seed=seed, **others)


def command_line(command: Sequence[str], *, devices_per_process: int | None = None) -> list[str]:
    """Makes the command line of each process from a config, script, `-m` module or program."""
    # `devices_per_process` replaces a config's `platform.cpu_devices`.
    if not command or not command[0]:
        raise LaunchError(
            "nothing to launch. Give a config or a script after `--`: "
            "jdist launch --processes 2 -- configs/digits.yaml train.steps=500"
        )
    target, arguments = command[0], list(command[1:])
    ending = Path(target).suffix
    if ending in (".yaml", ".yml", ".py") and not Path(target).is_file():
        raise LaunchError(f"{target}: no such file in {Path.cwd()}.")
    if ending in (".yaml", ".yml"):
        devices = [] if devices_per_process is None else [f"platform.cpu_devices={devices_per_process}"]
        return [sys.executable, "-m", "jdist", "run", target, *devices, *arguments]
    if ending == ".py":
        return [sys.executable, target, *arguments]
    if target == "-m":
        if not arguments:
            raise LaunchError("`-m` needs the name of a module: jdist launch --processes 2 -- -m my_package.train")
        return [sys.executable, *command]
    if shutil.which(target) is None:
        raise LaunchError(
            f"{target}: no such program. Give a config (.yaml, .yml), a script (.py), `-m` and a module, or a program."
        )
    return list(command)


def check_cpu_devices(devices_per_process: int | None, environ: Mapping[str, str]) -> None:
    """Checks the number of virtual CPU devices; None: the devices that JAX finds."""
    if devices_per_process is None:
        return
    checks.whole_number("devices_per_process", devices_per_process, LaunchError)
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        raise LaunchError(
            f"devices_per_process={devices_per_process} asks for virtual CPU devices, but JAX_PLATFORMS={platforms} "
            f"rules them out. Unset it, or leave devices_per_process out."
        )
