"""Checks of a parameter server's cluster: token and certificates, and whether each server answers this process."""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Mapping

from jdist.cli.doctor.finding import Finding, failed, passed, warned
from jdist.cli.doctor.network import handshake
from jdist.cluster.spec import ClusterSpec
from jdist.errors import ClusterConfigError
from jdist.ps.coordinator.servers import seen_from
from jdist.ps.transport.diagnose import Diagnosis, reach_all
from jdist.ps.transport.security import Security, how_to_protect, open_to_others, read_security

_ANSWER_S = 10.0  # for one answer
_RETRY_S = 0.5
_QUIET_S = 5.0  # a longer wait is reported
_NOT_THERE = "Start `jdist serve` as that task; if it runs, allow its port among the machines of the cluster."
_SETTINGS = 'SECURITY.md and docs/clusters.md ("A parameter server\'s cluster") have the settings that all must share.'


def servers(spec: ClusterSpec, environ: Mapping[str, str], *, alone: bool, timeout_s: float) -> list[Finding]:
    """Makes all these checks, with `alone` those that need no server; servers have `timeout_s` to start."""
    try:
        security = read_security(environ)
    except ClusterConfigError as exc:
        return [failed("security", str(exc), f"Mend {exc.variable}.")]
    local = [_protection(spec, security), *_certificate(security)]
    return local if alone else local + _answers(spec, security, timeout_s)


def _protection(spec: ClusterSpec, security: Security) -> Finding:
    addresses = [address for job in ("worker", "ps") for address in spec.jobs.get(job, ()) if address is not None]
    wrong = open_to_others(addresses, security)
    if wrong is not None:
        remedy = (
            f"{how_to_protect(security)} Without them servers start only with `jdist serve --insecure`, and the coordinator "
            "with `jdist.parameter_server(insecure=True)`."
        )
        return warned("security", wrong, remedy)
    if security.lacks:
        return passed("security", "the servers are on this machine alone")
    return passed("security", "TLS and a token")


def _certificate(security: Security) -> list[Finding]:
    """Checks that the certificate serves both sides of a connection; one for a single side may be intended."""
    if security.files is None:
        return []
    certificate, _, authority = security.files
    try:
        handshake(*security.files)
    except (OSError, ssl.SSLError) as exc:
        remedy = f"{certificate} must not be expired, be signed by {authority}, and allow both client and server."
        return [warned("tls", f"a handshake with this process's own certificate fails: {exc}", remedy)]
    return [passed("tls", f"{certificate} is good for both sides of a connection")]


def _answers(spec: ClusterSpec, security: Security, timeout_s: float) -> list[Finding]:
    named = {
        address: f"{job} {i} ({address})"
        for job in ("ps", "worker")
        for i, address in enumerate(spec.jobs.get(job, ()))
        if address is not None
    }
    troubles = _troubles(named, security, timeout_s)
    findings = [_finding(named[address], trouble) for address, trouble in troubles.items()]
    ps = [address for address in spec.jobs["ps"] if address is not None and troubles[address] is None]
    for worker in spec.jobs.get("worker", ()):
        if worker is None or troubles[worker] is not None or not ps:
            continue
        from_worker = zip(ps, seen_from(worker, ps, security), strict=True)
        wrong = [
            _finding(f"{named[worker]} to {named[to]}", trouble) for to, trouble in from_worker if trouble is not None
        ]
        findings += wrong or [passed("servers", f"{named[worker]} reaches {len(ps)} ps")]
    return findings


def _troubles(named: Mapping[str, str], security: Security, timeout_s: float) -> dict[str, Diagnosis | None]:
    """Finds why each server cannot be reached, if it cannot, once waiting longer does not help."""
    begin, is_reported = time.monotonic(), False
    troubles: dict[str, Diagnosis | None] = {}
    missing = list(named)
    while True:
        troubles |= zip(missing, reach_all(missing, security, min(timeout_s, _ANSWER_S)), strict=True)
        missing = [address for address, trouble in troubles.items() if trouble is not None and not trouble.lasts]
        waited_s = time.monotonic() - begin
        if not missing or waited_s + _RETRY_S > timeout_s:
            return troubles
        if waited_s > _QUIET_S and not is_reported:
            is_reported = True
            waiting = ", ".join(named[address] for address in missing[:4])
            print(f"jdist doctor: waiting up to {timeout_s:g} s for {waiting}", file=sys.stderr, flush=True)
        time.sleep(_RETRY_S)


def _finding(who: str, trouble: Diagnosis | None) -> Finding:
    if trouble is None:
        return passed("servers", f"{who} answers")
    return failed("servers", f"{who}: {trouble.text}", _SETTINGS if trouble.lasts else _NOT_THERE)
