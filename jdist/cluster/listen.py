"""The two ports of process 0, on one address of its machine, never on every interface."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence

from jdist.cluster import environment
from jdist.cluster.address import join, refused, split
from jdist.errors import ClusterError, PortInUseError

WATCH_PORT = "JDIST_WATCH_PORT"
_POD_S = 30.0  # a pod may start before the cluster's DNS knows its name
_RETRY_S = 0.5


def watch_port(environ: Mapping[str, str], coordinator_port: int) -> int:
    """Finds the port of the watch: JDIST_WATCH_PORT, or the one after the coordinator's."""
    port = environment.port(environ, WATCH_PORT)
    if port is None and coordinator_port < 65535:
        return coordinator_port + 1
    if port is None or port == coordinator_port:
        allowed = f"a port from 1 to 65535 other than the coordinator's, {coordinator_port}"
        mend = "jdist watches the processes on a port of its own; without the variable it is the one after the coordinator's."
        raise refused(WATCH_PORT, port, allowed, mend)
    return port


def numeric_address(host: str, environ: Mapping[str, str], *, owner: str = "process 0") -> str:
    """Looks up a host's numeric address; in a Kubernetes pod it waits until the name is known."""
    deadline_s = time.monotonic() + (_POD_S if "KUBERNETES_SERVICE_HOST" in environ else 0.0)
    while True:
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as exc:
            if time.monotonic() > deadline_s:
                raise ClusterError(f"the host {host!r} of {owner} has no address ({exc}). Is the name right?") from exc
        time.sleep(_RETRY_S)


def check_own_name(environ: Mapping[str, str]) -> None:
    """Refuses, by a ClusterError, a machine that does not know its own name: gloo looks it up to connect the processes."""
    name = socket.gethostname()
    try:
        numeric_address(name, environ)
    except ClusterError as exc:
        raise ClusterError(
            f"this machine's own name {name!r} has no address, and gloo, which connects JAX's processes on CPUs, looks it up. "
            f'Write a line "ADDRESS {name}" into /etc/hosts, with an address that the other machines reach.'
        ) from exc


def check_reachable(host: str, numeric: str, processes: Sequence[str | None]) -> str | None:
    """Refuses a loopback address of process 0 if other machines need it; warns if they may."""
    if host.lower().startswith(("localhost", "ip6-localhost")) or host == numeric:
        return None
    # Debian and Ubuntu write "127.0.1.1 node1" into /etc/hosts. `numeric` is the address of `host`
    # on that host; unknown addresses of processes are None.
    others = {None if address is None else split(address)[0] for address in processes} - {host}
    if not others or not ipaddress.ip_address(numeric).is_loopback:
        return None
    wrong = (
        f"on its own machine the name {host!r} of process 0 is {numeric}, where no other machine reaches it. Take the name out "
        f"of that line of /etc/hosts, or set JAX_COORDINATOR_ADDRESS to an address that all machines reach, on all processes."
    )
    if others != {None}:
        raise ClusterError(wrong)
    return wrong


def listen(address: str, port: int) -> socket.socket:
    """Opens the socket of the watch on a numeric address of this machine."""
    return _server(address, port, "process 0", f"jdist watches the processes there; {WATCH_PORT} sets another port.")


def check_free(address: str, port: int) -> None:
    """Refuses a coordinator port that is taken: JAX itself would share it with another JAX job."""
    _server(
        address,
        port,
        "JAX's coordinator",
        "an earlier job, or another process that counts as process 0, may hold it. JAX_COORDINATOR_PORT on all processes "
        "replaces a port that jdist chose.",
    ).close()


def _server(address: str, port: int, who: str, mend: str) -> socket.socket:
    try:
        return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as exc:  # a port that is taken may be free soon, an address of another machine stays one
        error = PortInUseError if exc.errno == errno.EADDRINUSE else ClusterError
        raise error(
            f"{who} cannot listen on {join(address, port)}: {exc}. The address of process 0 must be one of its own machine, "
            f"and the port free there; {mend}"
        ) from exc
