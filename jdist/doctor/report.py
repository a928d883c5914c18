"""All checks in their order, and their report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
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
    """Makes all checks, and gives each finding as soon as it is there: whatever ends the process later, it was told.

    Args:
        alone: leave out what needs the other processes of the cluster.
        timeout_s: how long to wait for them.
    """
    yield from _found("packages", machine.versions)
    yield from _found("disk", lambda: machine.disk(Path("runs")))
    yield from _found("shared memory", machine.memory)
    specs: list[ClusterSpec] = []

    def described() -> list[Finding]:
        spec, lines = network.cluster(os.environ)
        specs.extend([] if spec is None else [spec])
        return lines

    yield from _found("cluster", described)
    if not specs:
        return
    (spec,) = specs
    if spec.num_ps:  # its processes do not train in step, and so have nothing to do together
        from jdist.doctor.servers import servers

        yield from _found("names", lambda: network.names(spec))
        yield from _found("servers", lambda: servers(spec, os.environ, alone=alone, timeout_s=timeout_s))
        return
    failures = 0
    for name, check in {
        "names": lambda: network.names(spec),
        "ports": lambda: network.ports(spec, os.environ),
        "security": lambda: network.security(spec),
    }.items():
        lines = _found(name, check)
        failures += sum(each.status == "fail" for each in lines)
        yield from lines
    if (alone and spec.num_processes > 1) or spec.task_type not in ("chief", "worker"):
        return
    if failures and spec.num_processes > 1:
        return  # it would wait for what cannot come
    yield from _together(timeout_s)


def _together(timeout_s: float) -> Iterator[Finding]:
    os.environ.update(quiet_environment(os.environ))
    strategies: list[Strategy] = []

    def joined() -> list[Finding]:
        strategy, lines = together.joined(timeout_s)
        strategies.extend([] if strategy is None else [strategy])
        return lines

    yield from _found("together", joined)
    for strategy in strategies:
        for name, check in {
            "clocks": lambda: together.clocks(strategy, timeout_s),  # noqa: B023 # called in this very turn
            "folder": lambda: together.folder(strategy, Path("runs"), timeout_s),  # noqa: B023
            "devices": lambda: together.devices(strategy, timeout_s),  # noqa: B023
            "all-reduce": lambda: together.all_reduce(strategy),  # noqa: B023
        }.items():
            lines = _found(name, check)
            yield from lines
            if any(each.status == "fail" for each in lines):
                return  # the others would be waited for in vain


def _found(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as exc:  # noqa: BLE001 # whatever a driver raises is what this report is for
        reason = str(exc).partition(chr(10))[0]
        return [failed(name, f"{type(exc).__name__}: {reason}", "See the line above it.")]


def report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Prints findings, each as soon as it is there; as JSON all at the end.

    Returns:
        The exit code: 1 if a check failed, else 0.
    """
    found: list[Finding] = []
    if as_json:
        found += findings
        print(json.dumps([each.as_dict() for each in found], indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(soft_wrap=True, highlight=False)
        for each in findings:
            found.append(each)
            mark, colour = _MARKS[each.status]
            console.print(Text.assemble((mark, colour), f"  {each.check:<14}{each.text}"))
            if each.remedy:
                console.print(Text(f"      {'':<14}-> {each.remedy}"))
            console.file.flush()
    return int(any(each.status == "fail" for each in found))
