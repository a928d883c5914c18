"""Whether JAX's coordinator will speak TLS, and whether its certificates are good: tried by a handshake in memory."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from jdist.doctor.finding import Finding, failed, passed, warned

CERTIFICATE, KEY, AUTHORITY = "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE"
SINCE = (0, 12)  # JAX's first version with TLS between the processes of a job


def tls(environ: Mapping[str, str], jax_version: str) -> Finding:
    """What of the job's traffic is encrypted.

    Args:
        environ: the environment, with JAX's three variables for mutual TLS.
        jax_version: such as "0.12.0".
    """
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
    """Both sides of a connection, each with this certificate.

    Raises:
        OSError: a file cannot be read.
        ssl.SSLError: they do not fit together, or one is expired.
    """
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
    for _ in range(4):  # each turn takes in what the other has just sent
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
