"""What cannot be relied on in gloo, by which XLA exchanges arrays between CPU devices once `jax.distributed` is up."""

from __future__ import annotations

import jax
import jaxlib.version

_RIGHT_SINCE = (0, 12, 0)  # jaxlib; JAX's issues 40830 and 40831


def scatters_wrongly() -> bool:
    """Whether `jax.lax.psum_scatter` may silently return wrong values here."""
    # It also gives up after 30 s. Until jaxlib 0.12 gloo's reduce-scatter overwrites data that it
    # is still sending: of parts of several MiB the end is now and then wrong on the first device of
    # a group, also if all devices of a group belong to one process. Exchange the parts by
    # `all_to_all` and add them up instead, which sends as much. Asked where the axes are bound, so
    # devices are known.
    is_gloo = jax.distributed.is_initialized() and jax.default_backend() == "cpu"
    return is_gloo and jaxlib.version.__version_info__ < _RIGHT_SINCE
