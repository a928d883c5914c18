"""`ClusterSpec`: which processes a job has, where they are, and which of them this one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jdist.cluster.check import JOBS, check_devices, check_jobs, check_task
from jdist.errors import ClusterConfigError
from jdist.support.html import table


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The processes of a job, and this process's place among them.

    The *synchronous job* is the chief, if there is one, and the workers. Its processes are numbered, the chief first:
    these are JAX's process indices. Parameter servers (ps) and the evaluator take no part in it.

    Args:
        jobs: for each of "chief", "worker", "ps", "evaluator" the tasks' addresses, "host:port"; an IPv6 address in
            brackets. None stands for an address that is not known. That is common, as only process 0 and the
            parameter servers must be found by others.
        task_type: the job that this process belongs to.
        task_index: its place in that job, from 0.
        resolver: what made the spec, "slurm".
        origins: for each field the environment variable or the argument that its value came from.
        local_device_ids: which of the visible GPUs of the host this process takes; None: all.

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
        origin = self.origins.get
        jobs = check_jobs(self.jobs, origin("jobs", "jobs"))
        check_task(
            jobs,
            self.task_type,
            self.task_index,
            type_from=origin("task_type", "task_type"),
            index_from=origin("task_index", "task_index"),
        )
        devices = check_devices(self.local_device_ids, origin("local_device_ids", "local_device_ids"))
        object.__setattr__(self, "jobs", MappingProxyType({name: jobs[name] for name in JOBS if jobs.get(name)}))
        object.__setattr__(self, "origins", MappingProxyType(dict(self.origins)))
        object.__setattr__(self, "local_device_ids", devices)

    @property
    def processes(self) -> tuple[str | None, ...]:
        """The addresses of the synchronous job's processes, the chief first."""
        return self.jobs.get("chief", ()) + self.jobs.get("worker", ())

    @property
    def num_processes(self) -> int:
        """How many processes the synchronous job has: the chief and the workers."""
        return len(self.processes)

    @property
    def num_ps(self) -> int:
        """How many parameter servers there are."""
        return len(self.jobs.get("ps", ()))

    @property
    def process_index(self) -> int:
        """The number of this process in the synchronous job: the chief is 0, or worker 0 where there is no chief.

        Raises:
            ClusterConfigError: this is a parameter server or an evaluator.
        """
        if self.task_type not in ("chief", "worker"):
            raise ClusterConfigError(
                f"This process is {self.task_type} {self.task_index}; it has no `process_index`, as only the chief and "
                "the workers take part in the synchronous job. Use `task_type` and `task_index`.",
                variable=self.origins.get("task_type", "task_type"),
                field="task_type",
                value=self.task_type,
            )
        return self.task_index + (len(self.jobs.get("chief", ())) if self.task_type == "worker" else 0)

    @property
    def is_chief(self) -> bool:
        """Whether this is process 0 of the synchronous job, which alone writes metrics, plots and logs."""
        return self.task_type in ("chief", "worker") and self.process_index == 0

    @property
    def address(self) -> str | None:
        """This process's own address; None if it is not known."""
        own = self.jobs.get(self.task_type, ())
        return own[self.task_index] if self.task_index < len(own) else None

    @property
    def coordinator_address(self) -> str:
        """The address of process 0, where JAX's coordinator listens.

        Raises:
            ClusterConfigError: there is none, as one process alone needs none, or there are only ps and evaluator.
        """
        if not self.processes or self.processes[0] is None:
            raise ClusterConfigError(
                f"`coordinator_address` is not known: the synchronous job has {self.num_processes} processes, and "
                "one alone needs no coordinator. Look at `num_processes` first.",
                variable=self.origins.get("jobs", "jobs"),
                field="coordinator_address",
                value=None,
            )
        return self.processes[0]

    def as_tf_config(self) -> dict[str, Any]:
        """What TF_CONFIG would hold, as `json.dumps` takes it; an address that is not known is None.

        Example:
            >>> ClusterSpec(jobs={"worker": ("a:1",)}, task_type="worker", task_index=0).as_tf_config()
            {'cluster': {'worker': ['a:1']}, 'task': {'type': 'worker', 'index': 0}}
        """
        return {
            "cluster": {name: list(addresses) for name, addresses in self.jobs.items()},
            "task": {"type": self.task_type, "index": self.task_index},
        }

    def describe(self) -> str:
        """Several lines for people: the cluster, this process, and where each value came from."""
        lines = [f"cluster from {self.resolver}"]
        for name, value, origin in self._rows():
            lines.append(f"  {name:<13} {value}" + (f"  [{origin}]" if origin else ""))
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str, str]]:
        """Names, values, and where each came from, if that is known."""
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
        return table(self._rows(), header=("job", "addresses", "from"), title=f"cluster from {self.resolver}")


def _listed(addresses: tuple[str | None, ...]) -> str:
    """The first addresses and the last, with their number where some are left out."""
    names = [address or "(address not known)" for address in addresses]
    if len(names) <= 6:
        return ", ".join(names)
    return f"{', '.join(names[:4])}, ..., {names[-1]} ({len(names)} in all)"
