"""Diagnoses of servers that cannot be reached: gRPC says "unavailable" for a certificate as for a cable."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from jdist.cluster.address import split
from jdist.cluster.environment import TOKEN
from jdist.ps.transport.grpc_transport import RpcChannel
from jdist.ps.transport.interface import EXHAUSTED, CallFailed, ask_once
from jdist.ps.transport.security import AUTHORITY, CERTIFICATE, KEY, NAME, Security, tls_context
from jdist.ps.transport.threads import at_once
from jdist.support.versions import difference, versions

_HANDSHAKE_S = 5.0


@dataclass(frozen=True)
class Diagnosis:
    """Why a server cannot be reached."""

    text: str  # follows the server's address and a colon
    lasts: bool  # until somebody changes a setting; else the server may only not be up yet


def reach_all(
    addresses: Sequence[str], security: Security, timeout_s: float, *, sends_programs: bool = True
) -> list[Diagnosis | None]:
    """`reach` of several servers, at the same time."""
    return at_once("jdist-reach", lambda x: reach(x, security, timeout_s, sends_programs=sends_programs), addresses)


def reach(address: str, security: Security, timeout_s: float, *, sends_programs: bool = True) -> Diagnosis | None:
    """Asks a server for its status; None if it answered, and can read programs from here if `sends_programs`."""
    answer = ask_once(RpcChannel(address, security=security), "status", {}, timeout_s)
    if not isinstance(answer, CallFailed):
        differ = difference(versions(), answer.get("versions"), same_step=False) if sends_programs else None
        if differ is None or not differ.is_fatal:
            return None
        return Diagnosis(f"it has other versions: {differ.text}. Install the same on all hosts", lasts=True)
    if answer.reason == "unauthenticated":
        shown = "is another there" if security.token is not None else "is not set here"
        return Diagnosis(f"it refuses this process's token. {TOKEN} {shown}: set the same on all processes", lasts=True)
    if answer.reason == "refused":
        return Diagnosis("the program there is not `jdist serve`, or one of another version", lasts=True)
    if answer.reason == EXHAUSTED:
        return Diagnosis(answer.why, lasts=False)
    return _unavailable(address, security, str(answer).partition("(")[2].removesuffix(")") or answer.reason)


def _unavailable(address: str, security: Security, reason: str) -> Diagnosis:
    """Looks at the connection itself, as gRPC does not tell."""
    host, port = split(address)
    try:
        connection = socket.create_connection((host, port), timeout=_HANDSHAKE_S)
    except socket.gaierror as exc:
        return Diagnosis(f"the host {host!r} has no address ({exc.strerror})", lasts=False)
    except OSError as exc:
        return Diagnosis(f"nothing answers there ({exc.strerror or exc})", lasts=False)
    with connection:
        text = _without_tls(connection) if security.files is None else _with_tls(connection, host, security)
    if text is not None:
        return Diagnosis(text, lasts=True)
    # What holds the port took the connection in.
    return Diagnosis(
        f"it accepts connections, but does not answer ({reason}): another program has the port, or the server hangs",
        lasts=False,
    )


def _without_tls(connection: socket.socket) -> str | None:
    """Says that the server speaks TLS, which this process does not, if it is so."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection):
            pass
    except OSError:  # it speaks none; what is wrong is something else
        return None
    return f"it speaks TLS, and this process has no certificate. Set {CERTIFICATE}, {KEY} and {AUTHORITY}"


def _with_tls(connection: socket.socket, host: str, security: Security) -> str | None:
    """Says what keeps the two sides from a handshake, if something does."""
    assert security.files is not None  # asked before
    context = tls_context(security.files, ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        wrapped = context.wrap_socket(connection, server_hostname=security.name or host)
    except ssl.SSLCertVerificationError as exc:
        if exc.verify_code in (62, 64):  # the host's name, or its number, is not in the certificate
            return f"its certificate is for another host ({exc.verify_message}). Set {NAME} to the name that it has"
        text = f"its certificate is not accepted here ({exc.verify_message})"
        return f"{text}. {AUTHORITY} ({security.files[2]}) must hold the authority that signed it"
    except ssl.SSLError as exc:
        if exc.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return f"it speaks no TLS. Set {CERTIFICATE}, {KEY} and {AUTHORITY} there, too"
        return f"the TLS handshake fails ({exc.reason or exc})"
    except OSError:
        return None
    with wrapped, contextlib.suppress(TimeoutError):
        # The client of TLS 1.3 is done before the server looks at its certificate; a server that accepts
        # it speaks first.
        try:
            accepted = bool(wrapped.recv(1))
        except (ssl.SSLError, ConnectionError):
            accepted = False
        if not accepted:
            text = f"it does not accept this process's certificate ({CERTIFICATE}: {security.files[0]})"
            return f"{text}: it is expired, or not signed by the authority that the server knows"
    return None
