"""Processes of `jdist serve` for tests, their certificates, and calls to their health service."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import grpc

from jdist.launcher.environment import free_ports
from jdist.ps.transport.security import AUTHORITY, CERTIFICATE, KEY
from tests.children import without_devices

ROOT = Path(__file__).parents[2]
TLS = (CERTIFICATE, KEY, AUTHORITY)
CLEAN = {k: v for k, v in without_devices().items() if not k.startswith(("JDIST_", "TF_CONFIG"))}


def written(folder, authority, name="127.0.0.1", **options):
    """The three variables of a certificate that the authority issues, with its files."""
    issued = authority.issue_cert(name, **options)
    folder.mkdir(exist_ok=True)
    (folder / "cert").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    (folder / "key").write_bytes(issued.private_key_pem.bytes())
    (folder / "ca").write_bytes(authority.cert_pem.bytes())
    return dict(zip(TLS, (str(folder / "cert"), str(folder / "key"), str(folder / "ca")), strict=True))


def command(*flags):
    return [sys.executable, "-m", "jdist", "serve", *flags]


def environment(environ):
    return CLEAN | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environ


def refused(*flags, **environ):
    """What a server that does not start says, and its exit code."""
    done = subprocess.run(
        command(*flags), env=environment(environ), capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr.strip()


@contextlib.contextmanager
def serving(*started):
    """Starts servers, `(flags, environment)` each; yields `(process, address)` of each once it listens."""
    with contextlib.ExitStack() as stack:
        processes = []
        for flags, environ in started:
            process = stack.enter_context(
                subprocess.Popen(
                    command(*flags),
                    env=environment(environ),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            processes.append(process)
        found = []
        for process in processes:
            line = process.stdout.readline()
            assert " listens on " in line, (line, process.stderr.read())
            found.append((process, line.rpartition(" ")[2].strip()))
        yield found


def configs(workers, ps):
    """A cluster of loopback with free ports, and the TF_CONFIG of each of its tasks: `(jobs, {(type, index): text})`."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(1 + workers + ps)]
    jobs = {"chief": ports[:1], "worker": ports[1 : 1 + workers], "ps": ports[1 + workers :]}
    return jobs, {
        (job, i): json.dumps({"cluster": jobs, "task": {"type": job, "index": i}})
        for job, addresses in jobs.items()
        for i in range(len(addresses))
    }


@contextlib.contextmanager
def health(address, method, request=b""):
    """Asks a health service, without a token; yields the call, or the answer of Check."""
    with grpc.insecure_channel(address) as channel:
        path = f"/grpc.health.v1.Health/{method}"
        yield (
            channel.unary_unary(path)(request, timeout=20)
            if method == "Check"
            else channel.unary_stream(path)(request, timeout=60)
        )
