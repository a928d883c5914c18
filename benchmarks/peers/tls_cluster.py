"""A cluster of `jdist serve` on loopback, found by TF_CONFIG, with mutual TLS and a token; this process becomes its chief."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import trustme

from jdist.cluster.environment import TOKEN
from jdist.launcher.environment import free_ports
from jdist.ps.transport.security import AUTHORITY, CERTIFICATE, KEY


def config(jobs: dict[str, list[str]], job: str, index: int) -> str:
    """TF_CONFIG of a task."""
    return json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})


@contextlib.contextmanager
def tls_cluster(*, workers: int, ps: int) -> Iterator[None]:
    """Starts the servers, with a certificate made for them, and sets this process's environment to that of their chief.

    They end with the block. Their standard input is a pipe of this process, so they also end if it is killed.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(1 + workers + ps)]
    jobs = {"chief": addresses[:1], "worker": addresses[1 : 1 + workers], "ps": addresses[1 + workers :]}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        pem = {CERTIFICATE: issued.cert_chain_pems[0], KEY: issued.private_key_pem, AUTHORITY: authority.cert_pem}
        for variable, blob in pem.items():
            path = os.environ[variable] = str(Path(folder, variable))
            blob.write_to_path(path)
        os.environ[TOKEN] = secrets.token_hex(16)
        for job, index in [*(("worker", i) for i in range(workers)), *(("ps", i) for i in range(ps))]:
            command = [sys.executable, "-m", "jdist", "serve", "--with-parent"]
            server = servers.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,  # this process's own is read by the benchmark
                    env={**os.environ, "TF_CONFIG": config(jobs, job, index)},
                )
            )
            servers.callback(server.kill)
        os.environ["TF_CONFIG"] = config(jobs, "chief", 0)
        yield
