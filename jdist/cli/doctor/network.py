"""Checks of the cluster's description, addresses and security, which start nothing."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from importlib import metadata

from jdist.cli.doctor.finding import Finding, failed, passed, warned
from jdist.cluster.address import join, split
from jdist.cluster.environment import TOKEN
from jdist.cluster.listen import check_free, check_reachable, listen, numeric_address, watch_port
from jdist.cluster.resolvers.resolve import resolve
from jdist.cluster.spec import ClusterSpec
from jdist.errors import ClusterConfigError, ClusterError

CERTIFICATE, KEY, AUTHORITY = "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE"
SINCE = (0, 12)  # JAX's first version with TLS between the processes of a job


def cluster(environ: Mapping[str, str]) -> tuple[ClusterSpec | None, list[Finding]]:
    """Finds the cluster in the environment, and the origin of each value."""
    try:
        spec = resolve(environ)
    except ClusterConfigError as exc:
        return None, [failed("cluster", str(exc), f"docs/cluster_environments.md says what sets {exc.variable}.")]
    if spec.num_processes == 1 and spec.processes == (None,):
        return spec, [passed("cluster", "none in the environment: one process by itself")]
    return spec, [passed("cluster", line.strip()) for line in spec.describe().splitlines()]


def names(spec: ClusterSpec) -> list[Finding]:
    """Checks that the hosts of the cluster have addresses."""
    findings = []
    hosts = dict.fromkeys(split(address)[0] for tasks in spec.jobs.values() for address in tasks if address)
    for host in hosts:
        try:
            addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        except OSError as exc:
            remedy = "Is the name right? Pods need a headless service; else write addresses in numbers."
            findings.append(failed("names", f"{host} has no address: {exc}", remedy))
            continue
        findings.append(passed("names", f"{host} is {', '.join(sorted(addresses))}"))
        if spec.num_processes > 1 and spec.is_chief and host == split(spec.coordinator_address)[0]:
            findings[-1:] = _own_name(host, min(addresses), spec, findings[-1])
    return findings


def _own_name(host: str, numeric: str, spec: ClusterSpec, good: Finding) -> list[Finding]:
    """Checks that other machines reach this process, process 0, by its name."""
    try:
        wrong = check_reachable(host, numeric, spec.processes)
    except ClusterError as exc:
        return [failed("names", str(exc), f"`getent hosts {host}` shows the line.")]
    return [good] if wrong is None else [warned("names", wrong, "It does no harm where all are on this machine.")]


def ports(spec: ClusterSpec, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Checks on process 0 that its two ports are free, by opening a socket on each."""
    if spec.num_processes == 1 or spec.task_type not in ("chief", "worker") or spec.process_index != 0:
        return []
    host, port = split(spec.coordinator_address)
    findings = []
    try:
        watch = watch_port(environ, port)
    except ClusterConfigError as exc:
        return [failed("ports", str(exc), f"Mend {exc.variable}.")]
    tries = (  # as at the start of a job
        ("JAX's coordinator", port, lambda address: check_free(address, port)),
        ("jdist's watch", watch, lambda address: listen(address, watch).close()),
    )
    for what, number, attempt in tries:
        try:
            attempt(numeric_address(host, environ))
        except ClusterError as exc:
            findings.append(failed("ports", str(exc), "Choose another port, or end what holds it."))
            continue
        findings.append(passed("ports", f"{what} can have {join(host, number)}"))
    return findings


def security(spec: ClusterSpec, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Checks who could join the job, and whether its traffic can be read."""
    if spec.num_processes == 1:
        return []
    loopback = all(
        address is None or split(address)[0] in ("localhost", "127.0.0.1", "::1") for address in spec.processes
    )
    if loopback:
        return [passed("security", "the cluster is on this machine alone")]
    findings = [tls(environ, metadata.version("jax"))]
    if not spec.is_chief:  # which warns for all
        return [each for each in findings if each.status == "fail"]
    if not environ.get(TOKEN, "").strip():
        remedy = f"Set {TOKEN} to the same secret on all processes."
        findings.append(warned("security", "whoever reaches the watch port could end the job", remedy))
    else:
        findings.append(passed("security", f"{TOKEN} is set"))
    return findings


def tls(environ: Mapping[str, str], jax_version: str) -> Finding:
    """Checks JAX's three variables for mutual TLS, by which its coordinator's traffic is encrypted."""
    files = {name: environ.get(name, "").strip() for name in (CERTIFICATE, KEY, AUTHORITY)}
    missing = [name for name, file in files.items() if not file]
    if len(missing) == len(files):
        return warned(
            "tls",
            "multi_worker sends gradients as JAX does, unencrypted",
            "Keep the machines in a network of their own; SECURITY.md says what listens where.",
        )
    if missing:
        return failed("tls", f"{' and '.join(missing)} not set, as the others are", "Set all three, or none.")
    if tuple(map(int, jax_version.split(".")[:2])) < SINCE:
        text = f"JAX {jax_version} does not read {CERTIFICATE}; its coordinator speaks no TLS"
        return failed("tls", text, "Take JAX 0.12 or newer, or unset the three.")
    try:
        handshake(files[CERTIFICATE], files[KEY], files[AUTHORITY])
    except (OSError, ssl.SSLError) as exc:
        text = f"a handshake with {CERTIFICATE}, {KEY} and {AUTHORITY} fails: {exc}"
        remedy = "All processes need a certificate that is not expired, its own key, and the authority that signed it."
        return failed("tls", text, remedy)
    return passed("tls", "JAX's coordinator has mutual TLS; what the devices exchange is not encrypted")


def handshake(certificate: str, key: str, authority: str) -> None:
    """Makes a TLS handshake in memory, both sides with this certificate."""
    sides = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(protocol)
        context.check_hostname = False  # the names are those of other machines
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(authority)
        sides.append(context)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = sides[0].wrap_bio(to_client, to_server)
    server = sides[1].wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):  # each side takes in what the other has just sent
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
