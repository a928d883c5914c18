"""What every cluster must fulfil, whatever it was read from."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster.address import ALLOWED, problem, refused, same_for
from jdist.support.checks import as_int
from jdist.support.suggest import did_you_mean

JOBS = ("chief", "worker", "ps", "evaluator")


def check_jobs(jobs: Mapping[str, object], origin: str) -> dict[str, tuple[str | None, ...]]:
    """The jobs with their addresses as tuples.

    Args:
        jobs: for each job its tasks' addresses.
        origin: the variable or argument that they came from.

    Raises:
        ClusterConfigError: see `ClusterSpec`.
    """
    if not isinstance(jobs, Mapping):
        raise refused(origin, jobs, "a mapping from job to addresses", 'Write {"worker": [...]}.', field="jobs")
    checked: dict[str, tuple[str | None, ...]] = {}
    for name, addresses in jobs.items():
        if name not in JOBS:
            raise refused(
                origin, name, f"one of {', '.join(JOBS)}", f"Rename the job.{did_you_mean(name, JOBS)}", field="job"
            )
        if not isinstance(addresses, list | tuple):
            raise refused(
                origin, addresses, f"a list of addresses {ALLOWED}", f'Write ["{name}0:2222", ...].', field=name
            )
        for i, address in enumerate(addresses):
            _check_address(address, f"{name}[{i}]", origin)
        checked[name] = tuple(addresses)
    for name in ("chief", "evaluator"):
        if len(checked.get(name, ())) > 1:
            raise refused(
                origin,
                list(checked[name]),
                "one address at most",
                "Further processes that train are workers." if name == "chief" else "Leave one of them.",
                field=name,
            )
    if not any(checked.values()):
        raise refused(origin, dict(jobs), "a job with at least one address", "Name at least one worker.", field="jobs")
    _check_known(checked, origin)
    _check_unique(checked, origin)
    return checked


def _check_address(address: object, field: str, origin: str) -> None:
    if address is None:
        return
    if not isinstance(address, str):
        raise refused(origin, address, f"a text {ALLOWED}", "Write it in quotes, as node1:2222.", field=field)
    if (wrong := problem(address)) is not None:
        raise refused(origin, address, ALLOWED, wrong, field=field)


def _check_known(jobs: Mapping[str, tuple[str | None, ...]], origin: str) -> None:
    """The addresses that others must find are there: that of process 0, and those of the parameter servers."""
    first = "chief" if jobs.get("chief") else "worker"
    alone = sum(len(addresses) for addresses in jobs.values()) == 1
    if jobs.get(first) and jobs[first][0] is None and not alone:
        raise refused(origin, None, ALLOWED, "All processes must find process 0.", field=f"{first}[0]")
    for i, address in enumerate(jobs.get("ps", ())):
        if address is None:
            raise refused(origin, None, ALLOWED, "The workers must find every ps.", field=f"ps[{i}]")


def _check_unique(jobs: Mapping[str, tuple[str | None, ...]], origin: str) -> None:
    seen: dict[tuple[str, int], str] = {}
    for name, addresses in jobs.items():
        for i, address in enumerate(addresses):
            if address is None:
                continue
            before = seen.setdefault(same_for(address), f"{name}[{i}]")
            if before != f"{name}[{i}]":
                raise refused(
                    origin,
                    address,
                    f"an address of its own, and `{before}` has the same",
                    "Give each process another port or another host.",
                    field=f"{name}[{i}]",
                )


def check_task(
    jobs: Mapping[str, tuple[str | None, ...]],
    task_type: object,
    task_index: object,
    *,
    type_from: str,
    index_from: str,
) -> None:
    """This process is one of the cluster's; an evaluator may be left out of it."""
    if task_type not in JOBS:
        raise refused(
            type_from,
            task_type,
            f"one of {', '.join(JOBS)}",
            f"Say which job this process is.{did_you_mean(task_type, JOBS)}",
            field="task_type",
        )
    index = as_int(task_index, least=0)
    if index is None:
        raise refused(
            index_from,
            task_index,
            "a whole number of at least 0",
            "Number each job's tasks from 0.",
            field="task_index",
        )
    job = str(task_type)
    tasks = len(jobs.get(job, ()))
    if job == "evaluator" and not tasks:
        tasks = 1
    if not tasks:
        there = ", ".join(name for name, addresses in jobs.items() if addresses)
        raise refused(
            type_from,
            task_type,
            f"a job of the cluster, which has {there}",
            "Add this process's own address to the cluster, or correct its type.",
            field="task_type",
        )
    if index >= tasks:
        raise refused(
            index_from,
            task_index,
            f"from 0 to {tasks - 1}, as the cluster has {tasks} {job}",
            "Add this process's own address to the cluster, or correct the index.",
            field="task_index",
        )


def check_devices(devices: object, origin: str) -> tuple[int, ...] | None:
    """The numbers of the devices as a tuple."""
    if devices is None:
        return None
    allowed, mend = "whole numbers of at least 0, each once", "Number the visible GPUs of the host from 0."
    if not isinstance(devices, list | tuple) or not devices:
        raise refused(origin, devices, allowed, mend, field="local_device_ids")
    ids = [i for i in devices if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
    if len(set(ids)) < len(devices):
        raise refused(origin, devices, allowed, mend, field="local_device_ids")
    return tuple(ids)
