"""Several descriptions of one cluster, joined."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster.resolvers.resolver import Resolver
from jdist.cluster.spec import ClusterSpec


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
