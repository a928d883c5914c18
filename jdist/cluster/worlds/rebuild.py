"""Takes JAX out of one world and into the next, within one process."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path

import jax
import jax.extend.backend
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_log = logging.getLogger(__name__)
_FILES, _LISTENS = Path("/proc/self/fd"), "0A"


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
    return frozenset(local for _, local, _, state in _connections() if state == _LISTENS)


def break_connections(ports: frozenset[int]) -> int:
    """Shuts down this process's TCP connections from or to these ports, which ends collectives that wait there."""
    count = 0
    for number, local, remote, state in _connections():
        if state != _LISTENS and {local, remote} & ports:
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(number)) as each,
            ):  # it may have been closed since
                if {each.getsockname()[1], each.getpeername()[1]} == {local, remote}:
                    each.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _connections() -> list[tuple[int, int, int, str]]:
    """Lists this process's TCP sockets: `(file descriptor, own port, the other end's, state)`."""
    by_inode = {}
    for table in map(Path, ("/proc/self/net/tcp", "/proc/self/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, remote, state, *_ = fields = line.split()
            by_inode[f"socket:[{fields[9]}]"] = *(int(each.rpartition(":")[2], 16) for each in (local, remote)), state
    found = []
    for name in os.listdir(_FILES) if _FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # it has been closed since
            if (of := by_inode.get(os.readlink(_FILES / name))) is not None:
                found.append((int(name), *of))
    return found
