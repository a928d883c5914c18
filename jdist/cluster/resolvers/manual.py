"""A cluster given by arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jdist.cluster.resolvers.resolve import Resolver
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


def union(*parts: Resolver | ClusterSpec) -> Resolver:
    """A resolver that joins what others find, as tf.distribute's UnionResolver does.

    Which task this process is, and which GPUs it takes, says the first part that applies. A job that several parts name
    has the tasks of all, in the parts' order; parts that name the same addresses in the same order agree, and
    count once.

    Args:
        parts: resolvers, or specs; those that do not apply (None) are passed over.

    Returns:
        The resolver. It gives None if no part applies, and raises ClusterConfigError if the parts contradict each other: two
        chiefs, one address for two tasks.

    Example:
        >>> from jdist.cluster import simple, tf_config
        >>> servers = simple(jobs={"ps": ["p:2222"]}, task_type="ps", task_index=0)
        >>> config = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
        >>> union(tf_config, servers)({"TF_CONFIG": config})
        ClusterSpec(worker 1, process 1 of 2; cluster: 2 worker, 1 ps; from union(tf_config, simple))
    """

    def joined(environ: Mapping[str, str]) -> ClusterSpec | None:
        found = [part if isinstance(part, ClusterSpec) else part(environ) for part in parts]
        specs = [spec for spec in found if spec is not None]
        if not specs:
            return None
        jobs: dict[str, list[tuple[str | None, ...]]] = {}
        for spec in specs:
            for name, addresses in spec.jobs.items():
                named = jobs.setdefault(name, [])
                if addresses not in named:
                    named.append(addresses)
        sources = [spec.origins.get("jobs") or spec.resolver for spec in specs]
        return ClusterSpec(
            jobs={name: sum(named, ()) for name, named in jobs.items()},
            task_type=specs[0].task_type,
            task_index=specs[0].task_index,
            resolver=f"union({', '.join(spec.resolver for spec in specs)})",
            origins={**specs[0].origins, "jobs": ", ".join(dict.fromkeys(sources))},
            local_device_ids=specs[0].local_device_ids,
        )

    return joined
