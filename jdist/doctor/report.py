"""All checks in their order, and their report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from jdist.doctor import machine, network, together
from jdist.doctor.finding import Finding, failed
from jdist.strategies.libtpu import quiet_environment

_MARKS = {"pass": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


def examine(*, alone: bool, timeout_s: float) -> list[Finding]:
    """Makes all checks.

    Args:
        alone: leave out what needs the other processes of the cluster.
        timeout_s: how long to wait for them.
    """
    found = [*machine.versions(), *machine.disk(Path("runs")), *machine.memory()]
    spec, lines = network.cluster(os.environ)
    found += lines
    if spec is None:
        return found
    if spec.num_ps:  # its processes do not train in step, and so have nothing to do together
        from jdist.doctor.servers import servers

        return found + network.names(spec) + servers(spec, os.environ, alone=alone, timeout_s=timeout_s)
    found += [*network.names(spec), *network.ports(spec, os.environ), *network.security(spec)]
    if (alone and spec.num_processes > 1) or spec.task_type not in ("chief", "worker"):
        return found
    if any(each.status == "fail" for each in found) and spec.num_processes > 1:
        return found  # it would wait for what cannot come
    os.environ.update(quiet_environment(os.environ))
    strategy, lines = together.joined(timeout_s)
    found += lines
    if strategy is None:
        return found
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("clocks", lambda: together.clocks(strategy, timeout_s)),
        ("folder", lambda: together.folder(strategy, Path("runs"), timeout_s)),
        ("devices", lambda: together.devices(strategy, timeout_s)),
        ("all-reduce", lambda: together.all_reduce(strategy)),
    ]
    for name, check in checks:
        try:
            found += check()
        except Exception as exc:  # noqa: BLE001 # whatever a driver raises is what this report is for
            found.append(
                failed(name, f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}", "See the line above it.")
            )
            break
    return found


def report(found: list[Finding], *, as_json: bool) -> int:
    """Prints the findings.

    Returns:
        The exit code: 1 if a check failed, else 0.
    """
    if as_json:
        print(json.dumps([each.as_dict() for each in found], indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(soft_wrap=True, highlight=False)
        for each in found:
            mark, colour = _MARKS[each.status]
            console.print(Text.assemble((mark, colour), f"  {each.check:<14}{each.text}"))
            if each.remedy:
                console.print(Text(f"      {'':<14}-> {each.remedy}"))
    return int(any(each.status == "fail" for each in found))
