"""What the parameter server's connections give, against raw TCP: 100 MB there and back, from two clients at the same time.

    python benchmarks/parameter_server.py [--rounds 15]

All in turns, each with one server process and two client threads on loopback: plain sockets; a data connection, which is what
pushes and pulls take; the same under TLS; and gRPC alone. Target: the data connection at least 0.8 times raw TCP. The last
lines are of small calls: how many a second, from two clients.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "peers")]
WAYS = ("data", "data, TLS", "gRPC", "gRPC, TLS")
LEAVES = 10


def security(way: str, name: str) -> Any:
    """A certificate each, of one authority that all sides of a run share by way of the command line."""
    from jdist.ps.transport.security import Security

    if "TLS" not in way:
        return Security(token="t")
    folder = Path(sys.argv[-1])
    pem = {part: (folder / f"{name}.{part}").read_bytes() for part in ("certificate", "key")}
    return Security(token="t", name="ps.job", authority=(folder / "authority").read_bytes(), **pem)


def specs(size: int) -> list[Any]:
    from jdist.ps.protocol.wire import Spec

    return [Spec((size // 4 // LEAVES,), "float32")] * LEAVES


def server(way: str) -> None:
    """Answers arrays by arrays."""
    from jdist.ps.serve import keep_freed_memory
    from jdist.ps.transport.grpc_transport import RpcServer
    from jdist.ps.transport.interface import Method

    keep_freed_memory()
    kept = {size: [np.ones(s.shape, s.dtype) for s in specs(size)] for size in (0, 100_000_000)}
    methods = {"exchange": Method(lambda header, arrays: ({}, kept[header["size"]]), lambda h: specs(h["size"]))}
    served = RpcServer("127.0.0.1:0", methods, security=security(way, "ps"))
    print(served.port, flush=True)
    sys.stdin.read()
    served.stop()


def client(way: str) -> None:
    """One side: reads numbers of exchanges, negative for small ones, prints their seconds."""
    from side import serve

    from jdist.ps.serve import keep_freed_memory
    from jdist.ps.transport.grpc_transport import RpcChannel

    keep_freed_memory()
    command = [sys.executable, __file__, "--server", way, sys.argv[-1]]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = f"127.0.0.1:{int(process.stdout.readline())}"
    channels = [RpcChannel(address, security=security(way, "worker")) for _ in range(2)]
    for channel in channels if way.startswith("gRPC") else ():
        channel._data._unreachable_until = math.inf  # as where the port of data connections cannot be reached
    sent = {size: [np.ones(s.shape, s.dtype) for s in specs(size)] for size in (0, 100_000_000)}

    def exchange(channel: RpcChannel, size: int, times: int) -> None:
        for _ in range(times):
            options = {"timeout_s": 60, "expects": lambda header: specs(size), "bulk": size > 0, "data": True}
            channel.call("exchange", {"size": size}, sent[size], **options)

    def run(times: int) -> float:
        size = 100_000_000 if times > 0 else 0
        threads = [
            threading.Thread(target=exchange, args=(c, size, (abs(times) + i) // 2)) for i, c in enumerate(channels)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 0.0

    serve({}, run)


@dataclasses.dataclass(frozen=True)
class Case:
    """So many exchanges in a round; `bytes` each."""

    name: str
    times: int
    ways: tuple[str, ...]

    def rate(self, seconds: float) -> str:
        if self.times < 0:
            return f"{-self.times / seconds:,.0f} calls/s"
        return f"{self.times * 200 / seconds:,.0f} MB/s"


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] in ("--server", "--client"):
        return {"--server": server, "--client": client}[sys.argv[1]](sys.argv[2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    import tempfile

    import trustme
    from mirrored import Side
    from pairs import compare

    with tempfile.TemporaryDirectory() as folder:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(Path(folder, "authority")))
        for name in ("ps", "worker"):
            issued = authority.issue_cert(f"{name}.job")
            issued.private_key_pem.write_to_path(str(Path(folder, f"{name}.key")))
            issued.cert_chain_pems[0].write_to_path(str(Path(folder, f"{name}.certificate")))
        sides = {way: Side(sys.executable, "../parameter_server.py", "--client", way, folder) for way in WAYS}
    sides["raw TCP"] = Side(sys.executable, "loopback.py", 100)
    sides["raw TCP again"] = sides["raw TCP"]
    cases = [Case("200 MB", 4, ("raw TCP", *WAYS, "raw TCP again")), Case("small", -2000, (*WAYS[:1], *WAYS[1:]))]
    for case in cases:
        times: dict[str, list[float]] = {way: [] for way in case.ways}
        for i in range(args.rounds):
            for way in case.ways[:: 1 if i % 2 else -1]:
                times[way].append(sides[way].run(case.times)["seconds"])
        base = case.ways[0]
        print(f"{case.name}: {base} {case.rate(float(np.median(times[base])))}", flush=True)
        for way in case.ways[1:]:
            c = compare(times[base], times[way])
            said = f"{c.ratio:.2f} [{c.ratio_low:.2f}, {c.ratio_high:.2f}] times as fast as {base}"
            print(f"{case.name}: {way} {said}, {case.rate(float(np.median(times[way])))}", flush=True)
    for way in (*WAYS, "raw TCP"):
        sides[way].close()


if __name__ == "__main__":
    main()
