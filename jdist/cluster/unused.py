"""A job that this process was started in by the launcher, and does not take part in."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster.launcher.environment import ATTEMPT
from jdist.cluster.resolvers.resolve import resolve
from jdist.cluster.runtime import started
from jdist.errors import ClusterConfigError

_coordinates = False


def note_coordinator() -> None:
    """This process has become the coordinator of parameter servers."""
    global _coordinates
    _coordinates = True


def unused_job(environ: Mapping[str, str]) -> str | None:
    """What the launcher has started this process as, and what would make use of it; None: nothing is left unused."""
    if ATTEMPT not in environ or _coordinates or started() is not None:
        return None
    try:
        spec = resolve(environ)
    except ClusterConfigError:  # told to whoever asks for the cluster
        return None
    if "ps" in spec.jobs:  # of which the chief's program alone is the user's
        unused = spec.task_type == "chief"
        return "with parameter servers, which nothing uses: `jdist.parameter_server()` would" if unused else None
    if spec.task_type in ("chief", "worker") and spec.num_processes > 1:
        return (
            f"as one of {spec.num_processes} processes, and each of them trains by itself, on all of the data, and writes to "
            "the same files: `jdist.multi_worker()` trains on all of them together"
        )
    return None
