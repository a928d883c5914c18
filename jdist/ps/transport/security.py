"""Who may call a server, and whom a caller believes."""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Security:
    """Who may call, and who is called.

    Attributes:
        token: a secret that every call shows; None: no call shows one.
        certificate: this process's, PEM; None: without TLS.
        key: its private key, PEM.
        authority: certificates of the authority that signed everybody's, PEM.
        name: the name in the servers' certificates, where it is not their host's.
    """

    token: str | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    authority: bytes | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("certificate", "key", "authority") if getattr(self, name) is not None]
        if given and len(given) < 3:
            raise ValueError(
                f"TLS takes `certificate`, `key` and `authority` together; given is only {' and '.join(given)}."
            )

    def tls(self, *, server: bool) -> ssl.SSLContext | None:
        """What a socket of a data connection is wrapped in: TLS with certificates on both sides; None without certificates.

        Args:
            server: for the side that is called.
        """
        if self.certificate is None or self.key is None or self.authority is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        with tempfile.NamedTemporaryFile() as pair:  # `ssl` reads a key from a file only; this one is its owner's alone
            pair.write(self.key + b"\n" + self.certificate)
            pair.flush()
            context.load_cert_chain(pair.name)
        return context
