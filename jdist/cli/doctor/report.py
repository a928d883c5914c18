"""The order of the checks, those that all processes make together with JAX, and the report of all findings."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdist.cli.doctor import machine, network
from jdist.cli.doctor.finding import Finding, failed, passed, warned
from jdist.errors import ClusterError, JDistError
from jdist.strategies.absent_plugins import quiet_environment

if TYPE_CHECKING:
    from jdist.core.strategy import Strategy

_MARKS = {"pass": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}
_SIZE_BYTES = 16 << 20
_ROUNDS = 5
_CLOCKS_S = 2.0  # clocks further apart confuse logs, and the ages of files


def examine(*, alone: bool, timeout_s: float) -> Iterator[Finding]:
    """Makes all checks, with `alone` those of this process alone; yields findings at once, as a later check may crash."""
    yield from _findings("packages", machine.versions)
    yield from _findings("disk", machine.disk, Path("runs"))
    yield from _findings("compiled", machine.compiled, os.environ)
    yield from _findings("shared memory", machine.memory)
    yield from _findings("gpus", machine.gpus, os.environ)
    spec, findings = _value_and_findings("cluster", network.cluster, os.environ)
    yield from findings
    if spec is None:
        return
    if spec.num_ps:  # its processes do not train in step, so the joint checks do not apply
        from jdist.cli.doctor.servers import servers

        yield from _findings("names", network.names, spec)
        yield from _findings("servers", lambda: servers(spec, os.environ, alone=alone, timeout_s=timeout_s))
        return
    hosts = len({(address or "").rpartition(":")[0] for address in spec.processes})
    yield from _findings("nccl", lambda: machine.nccl(os.environ, hosts=hosts))
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
    strategy, findings = _value_and_findings("together", join, timeout_s)
    yield from findings
    if strategy is None:
        return
    checks = {
        "clocks": (clocks, timeout_s),
        "folder": (folder, Path("runs"), timeout_s),
        "devices": (devices, timeout_s),
        "all-reduce": (all_reduce,),
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
        return None, [failed(name, f"{type(exc).__name__}: {reason}", at_fault(exc) or "See the line above it.")]


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


# ---- checks of all processes together


def join(timeout_s: float) -> tuple[Strategy | None, list[Finding]]:
    """Joins the cluster; all its processes must run `jdist doctor`."""
    import jdist

    try:
        strategy = jdist.multi_worker(communication=jdist.CommunicationOptions(start_timeout_s=timeout_s))
    except JDistError as exc:
        every = "Run `jdist doctor` as every process of the job at the same time (`srun jdist doctor`), or say --alone."
        return None, [failed("together", str(exc), at_fault(exc) or every)]
    count = strategy.cluster.num_processes
    return strategy, [passed("together", f"all {count} processes came")] if count > 1 else []


def at_fault(exc: Exception) -> str | None:
    """Returns the remedy that points at the process or program that an error blames, if it blames one."""
    who = exc.at_fault if isinstance(exc, ClusterError) else None
    return who and f"The cause is at {who}: mend it there, then run `jdist doctor` as every process again."


def clocks(strategy: Strategy, timeout_s: float) -> list[Finding]:
    """Compares the processes' clocks, read at about the same time."""
    cluster = strategy.cluster
    if cluster.num_processes == 1:
        return []
    cluster.exchange("doctor: ready", None, timeout_s)
    times = cluster.exchange("doctor: clocks", time.time(), timeout_s)
    apart_s, median_s = max(times) - min(times), statistics.median(times)
    text = f"the clocks are at most {apart_s * 1e3:,.1f} ms apart, the exchange included"
    if apart_s > _CLOCKS_S:
        text += "; from the median: " + ", ".join(f"process {i} {x - median_s:+.1f} s" for i, x in enumerate(times))
        return [warned("clocks", text, "Run a time service (chrony) on all machines.")]
    return [passed("clocks", text)]


def folder(strategy: Strategy, path: Path, timeout_s: float) -> list[Finding]:
    """Checks that all processes see the same folder, as checkpoints need."""
    from jdist.checkpoint.folder import open_shared

    cluster = strategy.cluster
    if cluster.num_processes == 1:
        return []
    missing = [p for p in (path, *path.parents) if not p.exists()] if cluster.is_chief else []
    try:
        open_shared(path, cluster, timeout_s, "doctor: folder", make=True)
    except JDistError as exc:
        remedy = "Start all processes in one folder of a file system that they share: checkpoints go to its runs/."
        return [failed("folder", str(exc), remedy)]
    finally:
        for each in missing:
            with contextlib.suppress(OSError):  # something is in it by now
                each.rmdir()
    return [passed("folder", f"all processes see the same {path.absolute()}")]


def devices(strategy: Strategy, timeout_s: float) -> list[Finding]:
    """Lists the devices, and checks that all processes have as many and of the same kind."""
    import jax

    local = jax.local_devices()
    stats = local[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    size = f", {limit / 1e9:.1f} GB each" if limit else ""
    findings = [passed("devices", f"{len(local)} x {local[0].device_kind} ({local[0].platform}){size}")]
    if strategy.cluster.num_processes > 1:
        of_all = strategy.cluster.exchange("doctor: devices", [len(local), local[0].device_kind], timeout_s)
        if any(each != of_all[0] for each in of_all):
            listed = "; ".join(f"process {i}: {count} x {kind}" for i, (count, kind) in enumerate(of_all))
            if len({count for count, _ in of_all}) > 1:
                remedy = "Rows are shared out by process: start each with as many devices."
                findings.append(failed("devices", f"the processes have different numbers of devices: {listed}", remedy))
            else:
                remedy = "A step waits for the slowest replica; start each process with devices of one kind."
                findings.append(warned("devices", f"the processes have different devices: {listed}", remedy))
    return findings


def all_reduce(strategy: Strategy) -> list[Finding]:
    """Makes a small all-reduce over all replicas, checks its result, and measures its speed."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec

    n = strategy.num_replicas
    if n == 1:
        return [passed("all-reduce", "one device, nothing to reduce")]
    axes = strategy.axes
    elements = _SIZE_BYTES // 4

    def make() -> jax.Array:
        return jnp.full((elements,), jax.lax.axis_index(axes) + 1, jnp.float32)

    whole, per_replica = PartitionSpec(), PartitionSpec(axes)
    mapped = jax.jit(jax.shard_map(make, mesh=strategy.mesh, in_specs=(), out_specs=per_replica, check_vma=False))
    values = mapped()
    reduce = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, axes), mesh=strategy.mesh, in_specs=per_replica, out_specs=whole, check_vma=False
        )
    )
    total = reduce(values).block_until_ready()  # compiles
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        total = reduce(values).block_until_ready()
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    got, want = float(np.asarray(total.addressable_data(0))[0]), n * (n + 1) / 2
    if got != want:
        text = f"a sum over {n} replicas gave {got} instead of {want}"
        return [failed("all-reduce", text, "A device or a link is broken: leave out machines until the sum is right.")]
    sent = 2 * (n - 1) / n * _SIZE_BYTES / median
    text = f"{_SIZE_BYTES >> 20} MiB over {n} replicas in {median * 1e3:.1f} ms: each sends {sent / 1e6:,.0f} MB/s"
    return [passed("all-reduce", text)]
