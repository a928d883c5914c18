"""Other processes that were started with this one, and that its strategy takes no notice of."""

from __future__ import annotations

from collections.abc import Mapping

from jdist.cluster.environment import ATTEMPT
from jdist.cluster.resolvers.resolve import STARTED, resolve
from jdist.cluster.runtime import started
from jdist.errors import ClusterConfigError

_coordinates = False


def note_coordinator() -> None:
    """This process has become the coordinator of parameter servers."""
    global _coordinates
    _coordinates = True


def unused_job(environ: Mapping[str, str]) -> str | None:
    """What this process was started as, and what would make use of it; None: nothing is left unused.

    An allocation for several processes, of which this one was not started as one, is not meant: a notebook may run there.

    Args:
        environ: the environment.
    """
    if _coordinates or started() is not None:
        return None
    launched = ATTEMPT in environ
    try:
        spec = resolve(environ, resolvers=STARTED)
    except ClusterConfigError as exc:
        # The launcher's own is told to whoever asks for the cluster.
        return None if launched else f"the environment tells of other processes, and this one trains by itself. {exc}"
    who = "`jdist launch` has started this process" if launched else f"this process was started ({spec.resolver})"
    if "ps" in spec.jobs:  # of which the chief's program alone is the user's
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
