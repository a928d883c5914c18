"""`jdist serve`."""

from __future__ import annotations

import os
from typing import Annotated

import tyro

from jdist.cli.run import Flag


def serve(
    *,
    role: Annotated[
        str | None,
        tyro.conf.DisallowNone,
        tyro.conf.arg(metavar="worker|ps", help_behavior_hint=""),
    ] = None,
    address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="")] = None,
    grace_s: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 300.0,
    tls_cert: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    tls_key: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    tls_ca: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    health_address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="")] = None,
    allow_custom_call: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = (),
    script: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    insecure: Flag = False,
    with_parent: Flag = False,
) -> int:
    """Be a worker, or a parameter server, of an asynchronous job.

    It holds no code of the job's: what it runs, the coordinator sends. TF_CONFIG says what it is and where it
    listens. It serves those who show the secret in JDIST_TOKEN and, with TLS, a certificate of the authority in
    JDIST_TLS_CA; beyond loopback it wants both.

    For example:
      jdist serve
      jdist serve --role ps --address 127.0.0.1:4710
      jdist serve --role worker --address 0.0.0.0:2222 --tls-cert w.pem --tls-key w.key --tls-ca ca.pem

    Probes may ask grpc.health.v1.Health at the same address, without a token.

    Exit codes: 0 when the coordinator says that it is over; 75 when nobody asked for anything for --grace-s, or the
    port is taken; 143 after SIGTERM; 2 what was asked for is not right.

    Args:
        role: worker or ps, whatever TF_CONFIG says.
        address: where to listen, whatever TF_CONFIG says; without both, a free port of loopback, which is printed.
        grace_s: seconds without a call after which it ends.
        tls_cert: its certificate, PEM; else JDIST_TLS_CERT.
        tls_key: its private key, PEM; else JDIST_TLS_KEY.
        tls_ca: certificates of the authority that signed all others', PEM; else JDIST_TLS_CA.
        health_address: answer probes here, too: without TLS, and nothing else.
        allow_custom_call: custom calls that received functions may have, beside those of XLA's own operations.
        script: the program, of which a worker may be asked to make datasets by functions that are defined in it.
        insecure: listen beyond loopback without TLS or token.
        with_parent: end when standard input is closed, or the parent process is gone, and not for lack of calls.
    """
    from jdist.ps.serve import place
    from jdist.ps.serve import serve as start
    from jdist.ps.transport.security import AUTHORITY, CERTIFICATE, KEY, read_security

    security = read_security(os.environ, {CERTIFICATE: tls_cert, KEY: tls_key, AUTHORITY: tls_ca})
    found, at = place(role, address, os.environ)
    return start(
        found,
        at,
        security=security,
        grace_s=grace_s,
        allow=allow_custom_call,
        script=script,
        with_parent=with_parent,
        insecure=insecure,
        health_address=health_address,
    )
