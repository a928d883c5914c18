"""Two hosts, as far as one machine can play them: network namespaces that a pair of virtual cards joins, and a cut cable."""

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cluster.fault_jobs import BOUND_S, PYTHON, STEPS, Job

HOSTS = ["198.18.77.1", "198.18.77.2"]  # of the range for such tests, RFC 2544
NAMES = [f"jdist-{os.getpid()}-{i}" for i in (0, 1)]
CARDS = [f"jd{os.getpid()}-{i}" for i in (0, 1)]


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def hosts():
    """Two namespaces with an address each, and a name for it: gloo listens where a host's own name leads."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here (iproute2)")
    files = [Path("/etc/netns") / name / "hosts" for name in NAMES]
    try:
        try:
            ip("link", "add", CARDS[0], "type", "veth", "peer", "name", CARDS[1])
            for name, card, host, file in zip(NAMES, CARDS, HOSTS, files, strict=True):
                file.parent.mkdir(parents=True)
                file.write_text(
                    f"127.0.0.1 localhost\n{host} {socket.gethostname()}\n"
                )  # `ip netns exec` shows this one
                ip("netns", "add", name)
                ip("link", "set", card, "netns", name)
                ip("-n", name, "address", "add", f"{host}/24", "dev", card)
                ip("-n", name, "link", "set", card, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except OSError as exc:
            pytest.skip(f"network namespaces are not permitted here: {exc}")
        yield
    finally:
        for name, card, file in zip(NAMES, CARDS, files, strict=True):
            for undo in (("netns", "delete", name), ("link", "delete", card)):  # a card goes with its namespace
                with contextlib.suppress(OSError):
                    ip(*undo)
            shutil.rmtree(file.parent, ignore_errors=True)
        with contextlib.suppress(OSError):
            files[0].parent.parent.rmdir()


def test_a_cut_cable_ends_both_sides_in_bounded_time(hosts, tmp_path):
    body = "train(3)\nprint('three steps', flush=True)\ntrain(1_000_000)"
    with Job(tmp_path, STEPS + body, hosts=HOSTS, command=lambda i: ["ip", "netns", "exec", NAMES[i], PYTHON]) as job:
        for index in (0, 1):
            job.await_said(index, "three steps")
        ip("-n", NAMES[1], "link", "set", CARDS[1], "down")
        assert job.codes(within_s=BOUND_S) == [75, 75], job.out(0) + job.out(1)
        for index in (0, 1):
            record = job.check_lost(index, lost=1 - index)
            assert record["cause"] == "nothing was heard of it for 3 s: it stands still"
            assert record["last_step"] >= 3


def test_process_0_listens_on_its_own_address_only(hosts, tmp_path):
    body = "joined.exchange('there', 0, 60)\nprint('there', flush=True)\nsys.stdin.read()"
    with Job(tmp_path, STEPS + body, hosts=HOSTS, command=lambda i: ["ip", "netns", "exec", NAMES[i], PYTHON]) as job:
        job.await_said(0, "there")
        seen = subprocess.run(
            ["ip", "netns", "exec", NAMES[0], "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True
        )
        for process in job.processes.values():
            process.stdin.close()
        assert job.codes() == [0, 0]
    sockets = [line.split() for line in seen.stdout.decode().splitlines()[1:]]
    listening = [address for _, address, _, state, *_ in sockets if state == "0A"]
    own = socket.inet_aton(HOSTS[0])[::-1].hex().upper()
    assert {address.rpartition(":")[0][-8:] for address in listening} == {own}  # as IPv4, or as IPv4 within IPv6
    port = int(job.addresses[0].rpartition(":")[2])
    assert {port, port + 1} <= {int(address.rpartition(":")[2], 16) for address in listening}
