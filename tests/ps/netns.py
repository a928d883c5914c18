"""Servers on hosts of their own, as far as one machine can play them: network namespaces at a switch, and links to cut.

A cut link is silent, as real ones are: what goes over it is sent to a card that there is not. Addresses are of the range for
such tests (RFC 2544).
"""

import contextlib
import itertools
import os
import shutil
import subprocess

import pytest

from tests.ps.real_cluster import Cluster

_SUBNETS = itertools.count(os.getpid() % 120)
COORDINATOR = "coordinator"
_NOBODY = "02:00:00:00:00:99"


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Hosts:
    """Hosts at a switch, by the names of their namespaces; besides them this process's, with the address `.254`."""

    def __init__(self, number):
        self._subnet = subnet = f"198.18.{100 + next(_SUBNETS) % 120}"
        made = f"jd{os.getpid()}-{subnet.rpartition('.')[2]}"
        self.names = [f"{made}-{i}" for i in range(number)]
        self.addresses = [f"{subnet}.{i + 1}" for i in range(number)]
        self._bridge = f"b{made}"[:15]
        ip("link", "add", "name", self._bridge, "type", "bridge")
        ip("address", "add", f"{subnet}.254/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            card = f"p{i}{made}"[:15]
            ip("netns", "add", name)
            ip("link", "add", card, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", card, "master", self._bridge)
            ip("link", "set", card, "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self, i, j, *, back=True):
        """Cuts the way from one host to the other, and the way `back`; number -1 is the host of this process."""
        for of, to in ((i, j), (j, i)) if back else ((i, j),):
            ip(
                *self._of(of),
                "neighbour",
                "replace",
                self.address(to),
                "lladdr",
                _NOBODY,
                *self._card(of),
                "nud",
                "permanent",
            )

    def mend(self, i, j):
        """The link is there again."""
        for of, to in ((i, j), (j, i)):
            with contextlib.suppress(OSError):  # two cuts, and this is the second to end
                ip(*self._of(of), "neighbour", "delete", self.address(to), *self._card(of))

    def address(self, i):
        return f"{self._subnet}.{254 if i < 0 else i + 1}"

    def _of(self, i):
        return () if i < 0 else ("-n", self.names[i])

    def _card(self, i):
        return ("dev", self._bridge if i < 0 else "eth0")

    def close(self):
        for name in self.names:
            with contextlib.suppress(OSError):  # it was not made
                ip("netns", "delete", name)  # its card goes with it
        with contextlib.suppress(OSError):
            ip("link", "delete", self._bridge)


class SpreadCluster(Cluster):
    """As `Cluster`, each server on a host of its own."""

    _flags = ("--insecure",)  # the hosts are this process's alone

    def __init__(self, folder, *, workers=2, ps=2, **options):
        self._who = [*(("ps", i) for i in range(ps)), *(("worker", i) for i in range(workers))]
        self.hosts = Hosts(workers + ps)
        super().__init__(folder, workers=workers, ps=ps, **options)

    def _addresses(self, number):
        return [f"{host}:2222" for host in self.hosts.addresses]

    def _prefix(self, role, number):
        return ["ip", "netns", "exec", self.hosts.names[self._who.index((role, number))]]

    def strategy(self, **options):
        return super().strategy(insecure=True, **options)

    def cut(self, one, other, *, back=True):
        """Cuts the link between two servers, `(role, number)` each, or one and the `COORDINATOR`; see `Hosts.cut`."""
        self.hosts.cut(self._host(one), self._host(other), back=back)

    def mend(self, one, other):
        """Mends the link."""
        self.hosts.mend(self._host(one), self._host(other))

    def _host(self, who):
        return -1 if who == COORDINATOR else self._who.index(who)

    def close(self):
        super().close()
        self.hosts.close()


@contextlib.contextmanager
def spread(folder, **options):
    """A `SpreadCluster`, where the system lets one be made; else the test is skipped."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here (iproute2)")
    try:
        Hosts(1).close()
    except OSError as exc:
        pytest.skip(f"network namespaces are not permitted here: {exc}")
    made = SpreadCluster(folder, **options)
    try:
        yield made
    finally:
        made.close()
