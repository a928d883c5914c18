"""Takes JAX out of one world and into the next, within one process."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.extend.backend
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_log = logging.getLogger(__name__)
_FILES = Path("/proc/self/fd")


def leave() -> None:
    """Ends this process's part in JAX's world; its devices, and arrays that span processes, are gone then."""
    if jax.distributed.is_initialized():
        try:
            jax.distributed.shutdown()
        except jax.errors.JaxRuntimeError as exc:  # as where the service is gone: it is left all the same
            _log.debug("JAX's world was not left well: %s", exc)
    jax.clear_caches()
    jax.extend.backend.clear_backends()


def connect() -> None:
    """Lets all devices of a world exchange something."""
    mesh = Mesh(np.array(jax.devices()), ("device",))
    local = [np.zeros(1, np.int32)] * jax.local_device_count()
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("device")), np.concatenate(local))
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "device"), mesh=mesh, in_specs=PartitionSpec("device"), out_specs=PartitionSpec()
    )
    jax.block_until_ready(jax.jit(total)(x))


def listening_ports() -> frozenset[int]:
    """Finds the TCP ports on which this process listens."""
    return frozenset(s.getsockname()[1] for s in _sockets() if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def break_connections(ports: frozenset[int]) -> int:
    """Shuts down this process's TCP connections from or to these ports, which ends collectives that wait there."""
    count = 0
    for each in _sockets():
        try:
            if {each.getsockname()[1], each.getpeername()[1]} & ports:
                each.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError:  # it is not connected
            continue
    return count


def _sockets() -> Iterator[socket.socket]:
    """Iterates over this process's TCP sockets; each is closed behind the next."""
    for name in os.listdir(_FILES) if _FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # it has been closed since
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    yield each
