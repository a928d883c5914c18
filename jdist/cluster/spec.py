"""`ClusterSpec`: the processes of a job, their addresses, and which of them this one is; checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jdist.cluster.address import ALLOWED, normalized, problem, refused
from jdist.errors import ClusterConfigError
from jdist.support.checks import as_int
from jdist.support.table import Table
from jdist.support.words import did_you_mean

JOBS = ("chief", "worker", "ps", "evaluator")


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The processes of a job, and this process's place among them.

    The *synchronous job* is the chief, if there is one, and the workers. Its processes are numbered, the chief first:
    these are JAX's process indices. Parameter servers (ps) and the evaluator take no part in it.

    Args:
        jobs: for each of "chief", "worker", "ps", "evaluator" the tasks' addresses, "host:port", an IPv6 address in
            brackets. None: not known, which is common, as others must find only process 0 and the parameter servers.
        task_type: this process's job.
        task_index: its place in that job, from 0.
        resolver: what made the spec, such as "slurm".
        origins: the environment variable or argument that each field's value came from.
        local_device_ids: which of the host's visible GPUs this process takes; None: all.

    Raises:
        ClusterConfigError: an address is not valid or given twice; two chiefs or two evaluators; this task is not in
            the cluster (an evaluator need not be); the address of process 0 is not known.

    Example:
        >>> spec = ClusterSpec(
        ...     jobs={"chief": ("a:2222",), "worker": ("b:2222", "c:2222")}, task_type="worker", task_index=0
        ... )
        >>> spec.process_index, spec.num_processes, spec.coordinator_address
        (1, 3, 'a:2222')
    """

    jobs: Mapping[str, tuple[str | None, ...]]
    task_type: str
    task_index: int
    resolver: str = "argument"
    origins: Mapping[str, str] = field(default_factory=dict)
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        jobs = _check_jobs(self.jobs, self._origin("jobs"))
        self._check_task({name: len(addresses) for name, addresses in jobs.items()})
        devices = _check_devices(self.local_device_ids, self._origin("local_device_ids"))
        object.__setattr__(self, "jobs", MappingProxyType({name: jobs[name] for name in JOBS if jobs.get(name)}))
        object.__setattr__(self, "origins", MappingProxyType(dict(self.origins)))
        object.__setattr__(self, "local_device_ids", devices)

    def _origin(self, field: str) -> str:
        return self.origins.get(field, field)

    def _check_task(self, counts: Mapping[str, int]) -> None:
        """Checks that this process is in a cluster with so many tasks of each job; an evaluator need not be."""
        job, index = self.task_type, as_int(self.task_index, least=0)
        mend = "Add this process's own address to the cluster, or correct"
        if job not in JOBS:
            say = f"Say which job this process is.{did_you_mean(job, JOBS)}"
            raise self._refused("task_type", f"one of {', '.join(JOBS)}", say)
        if index is None:
            raise self._refused("task_index", "a whole number of at least 0", "Number each job's tasks from 0.")
        tasks = counts.get(job) or (1 if job == "evaluator" else 0)
        if not tasks:
            there = ", ".join(name for name, count in counts.items() if count)
            raise self._refused("task_type", f"a job of the cluster, which has {there}", f"{mend} its type.")
        if index >= tasks:
            allowed = f"from 0 to {tasks - 1}, as the cluster has {tasks} {job}"
            raise self._refused("task_index", allowed, f"{mend} the index.")

    def _refused(self, field: str, allowed: str, mend: str) -> ClusterConfigError:
        return refused(self._origin(field), getattr(self, field), allowed, mend, field=field)

    @property
    def processes(self) -> tuple[str | None, ...]:
        """The addresses of the synchronous job's processes, the chief first."""
        return self.jobs.get("chief", ()) + self.jobs.get("worker", ())

    @property
    def num_processes(self) -> int:
        """The number of processes of the synchronous job."""
        return len(self.processes)

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return len(self.jobs.get("ps", ()))

    @property
    def process_index(self) -> int:
        """This process's index in the synchronous job: 0 is the chief, or worker 0 without a chief.

        Raises:
            ClusterConfigError: this is a parameter server or an evaluator.
        """
        if self.task_type not in ("chief", "worker"):
            raise ClusterConfigError(
                f"This process is {self.task_type} {self.task_index}; it has no `process_index`, as only the chief and "
                "the workers take part in the synchronous job. Use `task_type` and `task_index`.",
                variable=self._origin("task_type"),
                field="task_type",
                value=self.task_type,
            )
        return self.task_index + (len(self.jobs.get("chief", ())) if self.task_type == "worker" else 0)

    @property
    def is_chief(self) -> bool:
        """Returns whether this is process 0 of the synchronous job, which alone writes metrics, plots and logs."""
        return self.task_type in ("chief", "worker") and self.process_index == 0

    @property
    def address(self) -> str | None:
        """This process's own address; None if it is not known."""
        addresses = self.jobs.get(self.task_type, ())
        return addresses[self.task_index] if self.task_index < len(addresses) else None

    @property
    def coordinator_address(self) -> str:
        """The address of process 0, where JAX's coordinator listens.

        Raises:
            ClusterConfigError: the cluster has none, as for one process alone, or has only ps and evaluator.
        """
        if not self.processes or self.processes[0] is None:
            raise ClusterConfigError(
                f"`coordinator_address` is not known: the synchronous job has {self.num_processes} processes, and "
                "one alone needs no coordinator. Look at `num_processes` first.",
                variable=self._origin("jobs"),
                field="coordinator_address",
                value=None,
            )
        return self.processes[0]

    def as_tf_config(self) -> dict[str, Any]:
        """Makes the value of TF_CONFIG, for `json.dumps`; an address that is not known is None.

        Example:
            >>> ClusterSpec(jobs={"worker": ("a:1",)}, task_type="worker", task_index=0).as_tf_config()
            {'cluster': {'worker': ['a:1']}, 'task': {'type': 'worker', 'index': 0}}
        """
        return {
            "cluster": {name: list(addresses) for name, addresses in self.jobs.items()},
            "task": {"type": self.task_type, "index": self.task_index},
        }

    def describe(self) -> str:
        """Describes the cluster, this process, and the origin of each value, in several lines."""
        lines = [f"cluster from {self.resolver}"]
        for name, value, origin in self._rows():
            lines.append(f"  {name:<13} {value}" + (f"  [{origin}]" if origin else ""))
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str, str]]:
        """Lists names, values, and their origins, if these are known."""
        devices = self.local_device_ids
        rows = [(name, _listed(addresses), "jobs") for name, addresses in self.jobs.items()]
        rows.append(("this process", self._place(), "task_index"))
        rows.append(("GPUs", "all" if devices is None else ", ".join(map(str, devices)), "local_device_ids"))
        return [(name, value, self.origins.get(about, "")) for name, value, about in rows]

    def _place(self) -> str:
        place = f"{self.task_type} {self.task_index}"
        if self.task_type in ("chief", "worker"):
            place += f", process {self.process_index} of {self.num_processes}"
        return place

    def __repr__(self) -> str:
        tasks = ", ".join(f"{len(addresses)} {name}" for name, addresses in self.jobs.items())
        return f"ClusterSpec({self._place()}; cluster: {tasks}; from {self.resolver})"

    def _repr_html_(self) -> str:
        return Table(f"cluster from {self.resolver}", self._rows(), ("job", "addresses", "from"))._repr_html_()


def _listed(addresses: tuple[str | None, ...]) -> str:
    """Lists addresses: of many the first, the last, and how many there are."""
    names = [address or "(address not known)" for address in addresses]
    if len(names) <= 6:
        return ", ".join(names)
    return f"{', '.join(names[:4])}, ..., {names[-1]} ({len(names)} in all)"


def _check_jobs(jobs: Mapping[str, object], origin: str) -> dict[str, tuple[str | None, ...]]:
    """Checks the jobs, from the variable or argument `origin`; returns them with their addresses as tuples."""
    if not isinstance(jobs, Mapping):
        raise refused(origin, jobs, "a mapping from job to addresses", 'Write {"worker": [...]}.', field="jobs")
    checked: dict[str, tuple[str | None, ...]] = {}
    tasks: dict[tuple[str, int], str] = {}  # by address
    for name, addresses in jobs.items():
        if name not in JOBS:
            rename = f"Rename the job.{did_you_mean(name, JOBS)}"
            raise refused(origin, name, f"one of {', '.join(JOBS)}", rename, field="job")
        if not isinstance(addresses, list | tuple):
            write = f'Write ["{name}0:2222", ...].'
            raise refused(origin, addresses, f"a list of addresses {ALLOWED}", write, field=name)
        for i, address in enumerate(addresses):
            task = f"{name}[{i}]"
            if address is None:
                continue
            if not isinstance(address, str):
                raise refused(origin, address, f"a text {ALLOWED}", "Write it in quotes, as node1:2222.", field=task)
            if (wrong := problem(address)) is not None:
                raise refused(origin, address, ALLOWED, wrong, field=task)
            if (other := tasks.setdefault(normalized(address), task)) != task:
                allowed = f"an address of its own, and `{other}` has the same"
                raise refused(origin, address, allowed, "Give each process another port or another host.", field=task)
        checked[name] = tuple(addresses)
    for name in ("chief", "evaluator"):
        if len(checked.get(name, ())) > 1:
            mend = "Further processes that train are workers." if name == "chief" else "Leave one of them."
            raise refused(origin, list(checked[name]), "one address at most", mend, field=name)
    if not any(checked.values()):
        raise refused(origin, dict(jobs), "a job with at least one address", "Name at least one worker.", field="jobs")
    first = "chief" if checked.get("chief") else "worker"
    alone = sum(map(len, checked.values())) == 1
    if checked.get(first) and checked[first][0] is None and not alone:
        raise refused(origin, None, ALLOWED, "All processes must find process 0.", field=f"{first}[0]")
    for i, address in enumerate(checked.get("ps", ())):
        if address is None:
            raise refused(origin, None, ALLOWED, "The workers must find every ps.", field=f"ps[{i}]")
    return checked


def _check_devices(devices: object, origin: str) -> tuple[int, ...] | None:
    """Checks the numbers of the devices; returns them as a tuple."""
    if devices is None:
        return None
    listed = devices if isinstance(devices, list | tuple) else ()
    ids = [i for device in listed if (i := as_int(device, least=0)) is not None]
    if not ids or len(set(ids)) < len(listed):
        allowed, mend = "whole numbers of at least 0, each once", "Number the visible GPUs of the host from 0."
        raise refused(origin, devices, allowed, mend, field="local_device_ids")
    return tuple(ids)
