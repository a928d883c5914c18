"""A cluster given by arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jdist.cluster.spec import ClusterSpec


def simple(
    *,
    jobs: Mapping[str, Sequence[str | None]],
    task_type: str,
    task_index: int,
    local_device_ids: Sequence[int] | None = None,
) -> ClusterSpec:
    """A cluster as you name it; the environment is not read.

    Args:
        jobs: for each of "chief", "worker", "ps", "evaluator" the tasks' addresses, "host:port".
        task_type: which of them this process is.
        task_index: its place there, from 0.
        local_device_ids: which of the visible GPUs this process takes; None: all.

    Returns:
        The spec.

    Raises:
        ClusterConfigError: see `ClusterSpec`.

    Example:
        >>> simple(jobs={"worker": ["a:2222", "b:2222"]}, task_type="worker", task_index=1)
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker; from simple)
    """
    return ClusterSpec(
        jobs=jobs,  # type: ignore[arg-type]  # ClusterSpec makes tuples of the lists, and refuses what is neither
        task_type=task_type,
        task_index=task_index,
        resolver="simple",
        origins={name: f"`{name}`" for name in ("jobs", "task_type", "task_index", "local_device_ids")},
        local_device_ids=None if local_device_ids is None else tuple(local_device_ids),
    )
