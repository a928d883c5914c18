"""What a launch was asked for, checked: how many processes, and what each of them runs."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from jdist.errors import LaunchError
from jdist.support.checks import as_real


def parse_processes(processes: int | str | tuple[int, int]) -> tuple[int, int]:
    """The fewest and the most processes.

    Args:
        processes: 4, "4", "1:4" or (1, 4).

    Raises:
        LaunchError: it is none of these, or the numbers are not positive and in rising order.

    Example:
        >>> parse_processes("1:4"), parse_processes(2)
        ((1, 4), (2, 2))
    """
    if isinstance(processes, tuple):
        parts = [str(part) for part in processes]
    else:
        parts = str(processes).split(":")
    if len(parts) in (1, 2) and all(part.isascii() and part.isdigit() for part in parts):
        smallest, largest = int(parts[0]), int(parts[-1])
        if 1 <= smallest <= largest:
            return smallest, largest
    raise LaunchError(
        f"processes={processes!r} is not a number of processes. Give one from 1 on (2), or the fewest and the "
        f"most as MIN:MAX (1:4)."
    )


def parse_servers(workers: int | None, ps: int | None, processes: object) -> tuple[int, int] | None:
    """How many workers and parameter servers serve; None for a job without them.

    Args:
        workers: as asked for.
        ps: as asked for.
        processes: as asked for; it goes with neither.

    Raises:
        LaunchError: only one of the two is given, or one is not positive, or `processes` is given as well.

    Example:
        >>> parse_servers(2, 1, None), parse_servers(None, None, "4")
        ((2, 1), None)
    """
    if workers is None and ps is None:
        return None
    if processes is not None:
        raise LaunchError(
            f"processes={processes} and workers={workers}, ps={ps} are given. `processes` is for jobs that train in step; a "
            "parameter server has `workers` and `ps`, and its program runs once, as the chief."
        )
    for name, count, other in (("workers", workers, "ps"), ("ps", ps, "workers")):
        if count is None:
            raise LaunchError(f"`{other}` is given without `{name}`; a parameter server needs both, from 1 on.")
        check_at_least(name, count, 1)
    assert workers is not None
    assert ps is not None
    return workers, ps


def command_line(command: Sequence[str], *, devices_per_process: int | None = None) -> list[str]:
    """The program and arguments that each process runs.

    Args:
        command: a config file (.yaml, .yml) and overrides, a script (.py) and its arguments, `-m` with a module
            and its arguments, or any program.
        devices_per_process: virtual CPU devices, for which a config's `platform.cpu_devices` has to make way.

    Raises:
        LaunchError: nothing is given, or what is given is not there.

    Example:
        >>> command_line(["-m", "my.train", "--steps=5"])[1:]
        ['-m', 'my.train', '--steps=5']
    """
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


def check_positive(name: str, seconds: float) -> None:
    """Refuse a duration that is not positive and finite.

    Raises:
        LaunchError: names it.
    """
    number = as_real(seconds)
    if number is None or not 0 < number < math.inf:
        raise LaunchError(f"{name}={seconds!r:.80} is not a duration: give seconds above 0.")


def check_at_least(name: str, value: int, smallest: int) -> None:
    """Refuse a number that is too small.

    Raises:
        LaunchError: names it.
    """
    if value < smallest:
        raise LaunchError(f"{name}={value} is too small: it is at least {smallest}.")
