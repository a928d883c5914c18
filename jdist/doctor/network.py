"""Checks of the cluster's description and of its addresses; nothing is started."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from importlib import metadata

from jdist.cluster.address import join, split
from jdist.cluster.environment import TOKEN
from jdist.cluster.listen import check_free, check_reachable, listen, numeric_address, watch_port
from jdist.cluster.resolvers.resolve import resolve
from jdist.cluster.spec import ClusterSpec
from jdist.doctor.finding import Finding, failed, passed, warned
from jdist.doctor.tls import tls
from jdist.errors import ClusterConfigError, ClusterError


def cluster(environ: Mapping[str, str]) -> tuple[ClusterSpec | None, list[Finding]]:
    """The cluster in the environment, and where each value is from."""
    try:
        spec = resolve(environ)
    except ClusterConfigError as exc:
        return None, [
            failed("cluster", str(exc), f"Mend {exc.variable}; docs/clusters.md says which variables are read.")
        ]
    if spec.num_processes == 1 and spec.processes == (None,):
        return spec, [passed("cluster", "none in the environment: one process by itself")]
    return spec, [passed("cluster", line.strip()) for line in spec.describe().splitlines()]


def names(spec: ClusterSpec) -> list[Finding]:
    """Whether the hosts of the cluster have addresses."""
    found = []
    hosts = dict.fromkeys(split(address)[0] for tasks in spec.jobs.values() for address in tasks if address)
    for host in hosts:
        try:
            addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        except OSError as exc:
            remedy = "Is the name right? Pods need a headless service; else write addresses in numbers."
            found.append(failed("names", f"{host} has no address: {exc}", remedy))
            continue
        found.append(passed("names", f"{host} is {', '.join(sorted(addresses))}"))
        if spec.num_processes > 1 and spec.is_chief and host == split(spec.coordinator_address)[0]:
            found[-1:] = _own_name(host, min(addresses), spec, found[-1])
    return found


def _own_name(host: str, numeric: str, spec: ClusterSpec, good: Finding) -> list[Finding]:
    """Whether other machines reach process 0, which this is, by its name."""
    try:
        wrong = check_reachable(host, numeric, spec.processes)
    except ClusterError as exc:
        return [failed("names", str(exc), f"`getent hosts {host}` shows the line.")]
    return [good] if wrong is None else [warned("names", wrong, "It does no harm where all are on this machine.")]


def ports(spec: ClusterSpec, environ: Mapping[str, str]) -> list[Finding]:
    """On process 0, whether its two ports are free; a socket is opened on each for a moment."""
    if spec.num_processes == 1 or spec.task_type not in ("chief", "worker") or spec.process_index != 0:
        return []
    host, port = split(spec.coordinator_address)
    found = []
    try:
        watched = watch_port(environ, port)
    except ClusterConfigError as exc:
        return [failed("ports", str(exc), f"Mend {exc.variable}.")]
    # Tried as a job's start tries them.
    tries = (
        ("JAX's coordinator", port, lambda address: check_free(address, port)),
        ("jdist's watch", watched, lambda address: listen(address, watched).close()),
    )
    for what, number, attempt in tries:
        try:
            attempt(numeric_address(host, environ))
        except ClusterError as exc:
            found.append(failed("ports", str(exc), "Choose another port, or end what holds it."))
            continue
        found.append(passed("ports", f"{what} can have {join(host, number)}"))
    return found


def security(spec: ClusterSpec, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Who could join, and whether what is sent can be read."""
    if spec.num_processes == 1:
        return []
    loopback = all(
        address is None or split(address)[0] in ("localhost", "127.0.0.1", "::1") for address in spec.processes
    )
    if loopback:
        return [passed("security", "the cluster is on this machine alone")]
    found = [tls(environ, metadata.version("jax"))]
    if not environ.get(TOKEN, "").strip():
        remedy = f"Set {TOKEN} to the same secret on all processes."
        found.append(warned("security", "whoever reaches the watch port could end the job", remedy))
    else:
        found.append(passed("security", f"{TOKEN} is set"))
    return found
