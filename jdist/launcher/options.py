"""Checks of a launch's arguments: its settings, numbers, devices, and the program of each process."""

from __future__ import annotations

import math
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jdist.errors import LaunchError
from jdist.launcher.events import Settings
from jdist.support.checks import as_int, as_real

_RESTARTS_OF_A_RANGE = 3


def parse_processes(processes: int | str | tuple[int, int]) -> tuple[int, int]:
    """Parses the fewest and the most processes: 4, "4", "1:4" or (1, 4)."""
    parts = [str(part) for part in processes] if isinstance(processes, tuple) else str(processes).split(":")
    if len(parts) in (1, 2) and all(part.isascii() and part.isdigit() for part in parts):
        smallest, largest = int(parts[0]), int(parts[-1])
        if 1 <= smallest <= largest:
            return smallest, largest
    raise LaunchError(
        f"processes={processes!r} is not a number of processes. Give one from 1 on (2), or the fewest and the "
        f"most as MIN:MAX (1:4)."
    )


def parse_servers(workers: int | None, ps: int | None, processes: object) -> tuple[int, int] | None:
    """Checks the numbers of workers and parameter servers; None for a job without them."""
    if workers is None and ps is None:
        return None
    if processes is not None:
        raise LaunchError(
            f"processes={processes} and workers={workers}, ps={ps} are given. `processes` is for jobs that train in step; a "
            "parameter server has `workers` and `ps`, and its program runs once, as the chief."
        )
    if workers is None or ps is None:
        missing, there = ("workers", "ps") if workers is None else ("ps", "workers")
        raise LaunchError(f"`{there}` is given without `{missing}`; a parameter server needs both, from 1 on.")
    return whole_number("workers", workers, least=1), whole_number("ps", ps, least=1)


def make_settings(
    processes: int | str | tuple[int, int],
    *,
    max_restarts: int | None,
    grace_s: float,
    stop_timeout_s: float,
    regrow_s: float,
    evaluator: bool = False,
    chief: bool = False,
) -> Settings:
    """Checks `jdist.cluster.launch`'s arguments; `chief`: for a parameter server's chief."""
    smallest, largest = parse_processes(processes)
    restarts = (_RESTARTS_OF_A_RANGE if smallest < largest else 0) if max_restarts is None else max_restarts
    for name, seconds in (("grace_s", grace_s), ("stop_timeout_s", stop_timeout_s), ("regrow_s", regrow_s)):
        check_positive(name, seconds)
    return Settings(
        smallest=smallest,
        largest=largest,
        evaluator=evaluator,
        chief=chief,
        max_restarts=whole_number("max_restarts", restarts, least=0),
        grace_s=grace_s,
        stop_timeout_s=stop_timeout_s,
        regrow_s=regrow_s,
        seed=random.SystemRandom().getrandbits(32),
    )


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
            f"{target}: no such program. What is launched is a config (.yaml, .yml), a script (.py), `-m` and a "
            f"module, or a program."
        )
    return list(command)


def check_cpu_devices(devices_per_process: int | None, environ: Mapping[str, str]) -> None:
    """Checks the number of virtual CPU devices; None: the devices that JAX finds."""
    if devices_per_process is None:
        return
    whole_number("devices_per_process", devices_per_process, least=1)
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        raise LaunchError(
            f"devices_per_process={devices_per_process} asks for virtual CPU devices, but JAX_PLATFORMS={platforms} "
            f"rules them out. Unset it, or leave devices_per_process out."
        )


def whole_number(name: str, value: int, *, least: int) -> int:
    """Checks a whole number, Python's or NumPy's."""
    number = as_int(value)
    if number is None:
        raise LaunchError(f"{name}={value!r:.80} is not a number from {least} on: give a whole one.")
    if number < least:
        raise LaunchError(f"{name}={number} is too small: it is at least {least}.")
    return number


def check_positive(name: str, seconds: float) -> None:
    """Refuses, by a LaunchError, a duration that is not positive and finite."""
    number = as_real(seconds)
    if number is None or not 0 < number < math.inf:
        raise LaunchError(f"{name}={seconds!r:.80} is not a duration: give seconds above 0.")
