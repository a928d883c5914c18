"""Launched processes that a strategy does not use: each trains by itself."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jdist.cluster.environment import ATTEMPT
from jdist.cluster.resolvers.resolve import STARTED, resolve
from jdist.cluster.runtime import started
from jdist.errors import ClusterConfigError

_coordinates = False


def note_coordinator() -> None:
    """Notes that this process coordinates parameter servers, and so uses the others."""
    global _coordinates
    _coordinates = True


def unused_job(environ: Mapping[str, str], mesh: Mesh | None) -> str | None:
    """Names launched processes that a strategy over `mesh` does not use, and the fix; else None."""
    # An allocation with room for several processes does not count: a notebook may run there.
    if _coordinates or started() is not None:
        return None
    if mesh is not None and jax.process_count() > 1:  # with a mesh, JAX has started its devices
        return (
            f"JAX runs as {jax.process_count()} processes, as on the hosts of a TPU slice, and each of them trains by itself, "
            "on all of the data: `jdist.multi_worker()` trains on all of them together. "
            "docs/cluster_environments.md has the variables that each needs."
        )
    launched = ATTEMPT in environ
    try:
        spec = resolve(environ, resolvers=STARTED)
    except ClusterConfigError as exc:
        # An error in the launcher's own cluster is raised where the cluster is asked for.
        return None if launched else f"the environment names other processes, and this one trains by itself. {exc}"
    who = "`jdist launch` has started this process" if launched else f"this process was started ({spec.resolver})"
    if "ps" in spec.jobs:  # only the chief's program is the user's
        unused = spec.task_type == "chief"
        return (
            f"{who} with parameter servers, which nothing uses: `jdist.parameter_server()` would." if unused else None
        )
    if spec.task_type in ("chief", "worker") and spec.num_processes > 1:
        return (
            f"{who} as one of {spec.num_processes} processes, and each of them trains by itself, on all of the data, and "
            "writes to the same files: `jdist.multi_worker()` trains on all of them together."
        )
    return None
