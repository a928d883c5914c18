"""All checks in their order, and the report of their findings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from jdist.cluster.spec import ClusterSpec
from jdist.doctor import machine, network, together
from jdist.doctor.finding import Finding, failed
from jdist.strategies.libtpu import quiet_environment

if TYPE_CHECKING:
    from jdist.core.strategy import Strategy

_MARKS = {"pass": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


def examine(*, alone: bool, timeout_s: float) -> Iterator[Finding]:
    """Makes all checks, and yields each finding as soon as it is there, so that it is printed even if a later check crashes.

    Args:
        alone: leave out the checks that need the other processes of the cluster.
        timeout_s: how long to wait for them.
    """
    yield from _findings("packages", machine.versions)
    yield from _findings("disk", lambda: machine.disk(Path("runs")))
    yield from _findings("shared memory", machine.memory)
    specs: list[ClusterSpec] = []

    def described() -> list[Finding]:
        spec, lines = network.cluster(os.environ)
        specs.extend([] if spec is None else [spec])
        return lines

    yield from _findings("cluster", described)
    if not specs:
        return
    (spec,) = specs
    if spec.num_ps:  # its processes do not train in step, so none of the joint checks apply
        from jdist.doctor.servers import servers

        yield from _findings("names", lambda: network.names(spec))
        yield from _findings("servers", lambda: servers(spec, os.environ, alone=alone, timeout_s=timeout_s))
        return
    failures = 0
    for name, check in {
        "names": lambda: network.names(spec),
        "ports": lambda: network.ports(spec, os.environ),
        "security": lambda: network.security(spec),
    }.items():
        lines = _findings(name, check)
        failures += sum(each.status == "fail" for each in lines)
        yield from lines
    if (alone and spec.num_processes > 1) or spec.task_type not in ("chief", "worker"):
        return
    if failures and spec.num_processes > 1:
        return  # the others cannot come
    yield from _together(timeout_s)


def _together(timeout_s: float) -> Iterator[Finding]:
    os.environ.update(quiet_environment(os.environ))
    strategies: list[Strategy] = []

    def joined() -> list[Finding]:
        strategy, lines = together.join(timeout_s)
        strategies.extend([] if strategy is None else [strategy])
        return lines

    yield from _findings("together", joined)
    for strategy in strategies:
        for name, check in {
            "clocks": lambda: together.clocks(strategy, timeout_s),  # noqa: B023 # called in this very turn
            "folder": lambda: together.folder(strategy, Path("runs"), timeout_s),  # noqa: B023
            "devices": lambda: together.devices(strategy, timeout_s),  # noqa: B023
            "all-reduce": lambda: together.all_reduce(strategy),  # noqa: B023
        }.items():
            lines = _findings(name, check)
            yield from lines
            if any(each.status == "fail" for each in lines):
                return  # the others would be waited for in vain


def _findings(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as exc:  # noqa: BLE001 # whatever a driver raises is what this report is for
        reason = str(exc).partition(chr(10))[0]
        return [failed(name, f"{type(exc).__name__}: {reason}", "See the line above it.")]


def report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Prints findings, each as soon as it is there; as JSON all at the end. Returns the exit code, 1 if a check failed."""
    printed: list[Finding] = []
    if as_json:
        printed += findings
        print(json.dumps([asdict(each) for each in printed], indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(soft_wrap=True, highlight=False)
        for each in findings:
            printed.append(each)
            mark, colour = _MARKS[each.status]
            console.print(Text.assemble((mark, colour), f"  {each.check:<14}{each.text}"))
            if each.remedy:
                console.print(Text(f"      {'':<14}-> {each.remedy}"))
            console.file.flush()
    return int(any(each.status == "fail" for each in printed))
