"""Credentials of the processes of a parameter server: a token, and certificates of one authority."""

from __future__ import annotations

import ipaddress
import ssl
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jdist.cluster.address import refused, split
from jdist.cluster.environment import TOKEN, text

CERTIFICATE, KEY, AUTHORITY, NAME = "JDIST_TLS_CERT", "JDIST_TLS_KEY", "JDIST_TLS_CA", "JDIST_TLS_NAME"
_TOGETHER = f"Set {CERTIFICATE}, {KEY} and {AUTHORITY}, or none of them."


@dataclass(frozen=True, kw_only=True)
class Security:
    """Credentials of a process; certificates and keys are PEM."""

    token: str | None = None  # a secret that every call shows; None: no call shows one
    certificate: bytes | None = None  # None: no TLS
    key: bytes | None = None
    authority: bytes | None = None  # certificates of the authority that signed all certificates
    name: str | None = None  # the name in the servers' certificates, if it is not their host's
    files: tuple[str, str, str] | None = None  # paths of certificate, key and authority

    def __post_init__(self) -> None:
        parts = [name for name in ("certificate", "key", "authority") if getattr(self, name) is not None]
        if parts and len(parts) < 3:
            raise ValueError(
                f"TLS takes `certificate`, `key` and `authority` together; given is only {' and '.join(parts)}."
            )

    @property
    def lacks(self) -> tuple[str, ...]:
        """Names the missing ones of the two protections: "token", "TLS"."""
        token = () if self.token else ("token",)
        return token if self.certificate is not None else (*token, "TLS")

    def tls(self, *, server: bool) -> ssl.SSLContext | None:
        """Returns a data connection's TLS, with certificates on both sides; None without them."""
        if self.certificate is None or self.key is None or self.authority is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        with tempfile.NamedTemporaryFile() as pair:  # `ssl` reads a key from files; only its owner reads this
            pair.write(self.key + b"\n" + self.certificate)
            pair.flush()
            context.load_cert_chain(pair.name)
        return context


OPEN = Security()


def read_security(environ: Mapping[str, str], flags: Mapping[str, str | None] | None = None) -> Security:
    """Reads and tries the environment's token and certificates; `flags` override it."""
    set_flags = {name: value for name, value in (flags or {}).items() if value}
    path_of = {name: text({**environ, **set_flags}, name) for name in (CERTIFICATE, KEY, AUTHORITY)}
    token, name = text(environ, TOKEN), text(environ, NAME)
    if token is not None and not (token.isascii() and token.isprintable()):
        raise refused(
            TOKEN, f"{len(token)} characters", "of printable ASCII characters", "Make one by `openssl rand -hex 16`."
        )
    if not any(path_of.values()):
        return Security(token=token, name=name)
    contents: dict[str, bytes] = {}
    paths: dict[str, str] = {}
    for variable, path in path_of.items():
        if path is None:
            raise refused(variable, None, "set, as others of the three are", _TOGETHER)
        contents[variable], paths[variable] = _read(variable, path), path
    files = paths[CERTIFICATE], paths[KEY], paths[AUTHORITY]
    tls_context(files, ssl.PROTOCOL_TLS_SERVER)
    return Security(
        token=token,
        certificate=contents[CERTIFICATE],
        key=contents[KEY],
        authority=contents[AUTHORITY],
        name=name,
        files=files,
    )


def tls_context(files: tuple[str, str, str], protocol: int) -> ssl.SSLContext:
    """Makes Python's TLS of these files, to try them and explain errors that gRPC hides."""
    certificate, key, authority = files
    context = ssl.SSLContext(protocol)
    try:
        # Without a password the one of an encrypted key is asked for on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as exc:
        raise refused(
            KEY,
            key,
            f"the key, in PEM and without a passphrase, of the certificate {certificate} ({CERTIFICATE})",
            f"They do not go together: {_reason(exc)}. Take both from the same request.",
        ) from exc
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as exc:
        raise refused(
            AUTHORITY, authority, "certificates in PEM", f"It cannot be read as such: {_reason(exc)}."
        ) from exc
    return context


def _read(variable: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as exc:
        mend = f"It cannot be read: {exc.strerror}. In a container, is the secret mounted there?"
        raise refused(variable, path, "the path of a PEM file", mend) from exc


def _reason(exc: Exception) -> str:
    return getattr(exc, "reason", None) or str(exc)


def is_loopback(host: str) -> bool:
    """Returns whether a host, as written, is this machine alone; "0.0.0.0" and names of hosts are not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def open_to_others(addresses: Iterable[str], security: Security) -> str | None:
    """Describes the exposure of unprotected servers beyond this machine; None without any."""
    beyond = [address for address in addresses if not is_loopback(split(address)[0])]
    if not beyond or not security.lacks:
        return None
    named = beyond[0] if len(beyond) == 1 else f"{beyond[0]} and {len(beyond) - 1} more"
    lines = [f"{named} can be reached from other machines."]
    if "token" in security.lacks:
        lines.append("Without a token whoever reaches a server can run programs there, and read and change parameters.")
    if "TLS" in security.lacks:
        lines.append("Without TLS whoever is on the way can read and change what is sent, parameters and token.")
    return " ".join(lines)


def how_to_protect(security: Security) -> str:
    """Says in a sentence what to set."""
    wanted = [TOKEN] if "token" in security.lacks else []
    if "TLS" in security.lacks:
        wanted += [CERTIFICATE, KEY, AUTHORITY]
    return f"Set {', '.join(wanted)} on all processes; docs/clusters.md says how they are made."
