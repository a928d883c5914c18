"""What TLS by Python's `ssl` costs in CPU time, in the ways that there are to use it.

    python benchmarks/tls.py [--rounds 5]

One process sends 256 MB to another over loopback, in calls of 1 MB. Printed are the medians of CPU seconds a GB on either side,
which other work on the machine does not change much: without TLS; TLS 1.3 as the parameter server's data connection uses it;
TLS 1.2 with AES-128 (a TLS 1.3 cipher cannot be chosen from Python); with the kernel's TLS allowed (`OP_ENABLE_KTLS`); and TLS
1.3 through `ssl.MemoryBIO`: its reads are not bound to a record of 16 kB.
"""

from __future__ import annotations

import argparse
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import trustme

SIZE = 1 << 28
GB = SIZE / 1e9
WAYS = ("plain", "TLS 1.3", "TLS 1.2, AES-128", "TLS 1.3, kernel", "TLS 1.3, MemoryBIO")


def context(way: str, folder: Path, *, server: bool) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    if server:
        made.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    else:
        made.load_verify_locations(folder / "ca.pem")
    if way == "TLS 1.2, AES-128":
        made.maximum_version = ssl.TLSVersion.TLSv1_2
        made.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    if way == "TLS 1.3, kernel":
        made.options |= 0x8  # OP_ENABLE_KTLS, which has a name from Python 3.12 on
    return made


def send(way: str, folder: Path, port: int) -> None:
    sock = socket.create_connection(("127.0.0.1", port))
    if way != "plain":
        sock = context(way, folder, server=False).wrap_socket(sock, server_hostname="127.0.0.1")
    data, start = memoryview(bytearray(1 << 20)), time.process_time()
    for _ in range(SIZE >> 20):
        sock.sendall(data)
    print(time.process_time() - start, flush=True)


def receive(way: str, folder: Path, sock: socket.socket) -> float:
    buffer, got = memoryview(bytearray(1 << 20)), 0
    if way == "TLS 1.3, MemoryBIO":
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context(way, folder, server=True).wrap_bio(incoming, outgoing, server_side=True)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                sock.sendall(outgoing.read())
                incoming.write(sock.recv(1 << 16))
        sock.sendall(outgoing.read())
        raw, start = memoryview(bytearray(1 << 20)), time.process_time()
        while got < SIZE:
            try:
                got += tls.read(1 << 20, buffer)
            except ssl.SSLWantReadError:
                incoming.write(raw[: sock.recv_into(raw)])
        return time.process_time() - start
    if way != "plain":
        sock = context(way, folder, server=True).wrap_socket(sock, server_side=True)
    start = time.process_time()
    while got < SIZE:
        got += sock.recv_into(buffer)
    return time.process_time() - start


def once(way: str, folder: Path) -> tuple[float, float]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, __file__, "--send", way, str(folder), str(listening.getsockname()[1])]
        sender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        sock, _ = listening.accept()
        received = receive(way, folder, sock)
        return received / GB, float(sender.communicate(timeout=60)[0]) / GB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--send", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send:
        way, folder, port = args.send
        return send(way, Path(folder), int(port))
    with tempfile.TemporaryDirectory() as name:
        folder, ca = Path(name), trustme.CA()
        cert = ca.issue_cert("127.0.0.1")
        ca.cert_pem.write_to_path(folder / "ca.pem")
        cert.private_key_pem.write_to_path(folder / "key.pem")
        (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
        times = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                times[way].append(once(way, folder))
    for way, each in times.items():
        received, sent = (statistics.median(side) for side in zip(*each, strict=True))
        print(f"{way:20s} receiving {received:.2f} CPU s/GB, sending {sent:.2f}", flush=True)


if __name__ == "__main__":
    main()
