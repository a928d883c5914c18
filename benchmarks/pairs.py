"""Timing two or more programs fairly on a noisy machine: in turn, in one process, medians of paired ratios."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Comparison:
    """Paired measurements of one program against another.

    Attributes:
        seconds: median time of the measured program.
        ratio: median of measured / reference, pair by pair.
        ratio_low: lower end of the median ratio's 95 % confidence interval (bootstrap).
        ratio_high: its upper end.
        difference: median of measured - reference, in seconds.
    """

    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    difference: float


def alternate(
    programs: dict[str, Callable[[], None]], rounds: int, *, clock: Callable[[], Any] = time.perf_counter
) -> dict[str, list[Any]]:
    """Runs each program once a round, in another order each round; what `clock` measures of each."""
    names = list(programs)
    times: dict[str, list[Any]] = {name: [] for name in names}
    for program in programs.values():
        program()
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for name in rng.permutation(names).tolist():  # an order that only turned would leave each behind the same other
            start = clock()
            programs[name]()
            times[name].append(clock() - start)
    return times


def compare(measured: Sequence[float], reference: Sequence[float]) -> Comparison:
    """Compares paired times."""
    a, b = np.array(measured), np.array(reference)
    ratios = a / b
    draws = np.random.default_rng(0).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return Comparison(
        float(np.median(a)), float(np.median(ratios)), float(low), float(high), statistics.median((a - b).tolist())
    )


def on_cpu_devices(
    measure: Callable[..., None],
    description: str | None,
    script: str,
    *,
    devices: list[int],
    rounds: int,
    cases: tuple[str, ...] = (),
) -> None:
    """The command line of a script that measures on several numbers of virtual CPU devices, each in a process of its own.

    Args:
        measure: `(rounds) -> None`, or `(rounds, cases) -> None`; measures on the devices that JAX sees and prints.
        description: the script's docstring.
        script: its file.
        devices: numbers of devices, if none are asked for.
        rounds: rounds, if none are asked for.
        cases: names of what can be measured alone.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=devices, help="numbers of virtual CPU devices")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--here", action="store_true", help="measure on the devices that JAX sees, in this process")
    if cases:
        parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    args = parser.parse_args()
    if args.here:
        return measure(args.rounds, tuple(args.cases)) if cases else measure(args.rounds)
    for n in args.devices:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={n}"}
        chosen = ["--cases", *args.cases] if cases else []
        subprocess.run([sys.executable, script, "--here", "--rounds", str(args.rounds), *chosen], env=env, check=True)
