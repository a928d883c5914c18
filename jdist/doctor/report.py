"""The order of the checks, and the report of their findings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jdist.doctor import gpus, machine, network, together
from jdist.doctor.finding import Finding, failed
from jdist.strategies.libtpu import quiet_environment

_MARKS = {"pass": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


def examine(*, alone: bool, timeout_s: float) -> Iterator[Finding]:
    """Makes all checks, with `alone` those of this process alone; yields findings at once, as a later check may crash."""
    yield from _findings("packages", machine.versions)
    yield from _findings("disk", machine.disk, Path("runs"))
    yield from _findings("shared memory", machine.memory)
    yield from _findings("gpus", gpus.gpus, os.environ)
    spec, findings = _value_and_findings("cluster", network.cluster, os.environ)
    yield from findings
    if spec is None:
        return
    if spec.num_ps:  # its processes do not train in step, so the joint checks do not apply
        from jdist.doctor.servers import servers

        yield from _findings("names", network.names, spec)
        yield from _findings("servers", lambda: servers(spec, os.environ, alone=alone, timeout_s=timeout_s))
        return
    hosts = len({(address or "").rpartition(":")[0] for address in spec.processes})
    yield from _findings("nccl", lambda: gpus.nccl(os.environ, hosts=hosts))
    failures = 0
    for name, check in {"names": network.names, "ports": network.ports, "security": network.security}.items():
        findings = _findings(name, check, spec)
        failures += sum(each.status == "fail" for each in findings)
        yield from findings
    if (alone and spec.num_processes > 1) or spec.task_type not in ("chief", "worker"):
        return
    if failures and spec.num_processes > 1:
        return  # the others cannot come
    yield from _joint_findings(timeout_s)


def _joint_findings(timeout_s: float) -> Iterator[Finding]:
    """Makes the checks of all processes together, up to the first that fails: others might not come to the next."""
    os.environ.update(quiet_environment(os.environ))
    strategy, findings = _value_and_findings("together", together.join, timeout_s)
    yield from findings
    if strategy is None:
        return
    checks = {
        "clocks": (together.clocks, timeout_s),
        "folder": (together.folder, Path("runs"), timeout_s),
        "devices": (together.devices, timeout_s),
        "all-reduce": (together.all_reduce,),
    }
    for name, (check, *arguments) in checks.items():
        findings = _findings(name, check, strategy, *arguments)
        yield from findings
        if any(each.status == "fail" for each in findings):
            return


def _findings(name: str, check: Callable[..., list[Finding]], *arguments: Any) -> list[Finding]:
    return _value_and_findings(name, lambda: (None, check(*arguments)))[1]


def _value_and_findings(
    name: str, check: Callable[..., tuple[Any, list[Finding]]], *arguments: Any
) -> tuple[Any, list[Finding]]:
    try:
        return check(*arguments)
    except Exception as exc:  # noqa: BLE001 # any error of a driver is a finding
        reason = str(exc).partition("\n")[0]
        return None, [
            failed(name, f"{type(exc).__name__}: {reason}", together.at_fault(exc) or "See the line above it.")
        ]


def report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Prints findings one by one, as JSON all at the end; returns the exit code, 1 if a check failed."""
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
