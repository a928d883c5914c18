"""A process that reads received programs first: bytes that crash or starve their reader end it, and not this process.

JAX's and MLIR's readers trust their input: one changed bit can ask for gigabytes, loop, or break the heap.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

from jax import export
from jax.interpreters import mlir

_SIZE = struct.Struct("<Q")
_ROOM_BYTES, _ROOM_PER_BYTE = 1 << 29, 32  # 10 MB of constants take 60 MB
_CPU_S, _BYTES_PER_S = 2, 1 << 17  # 10,000 operations are 1.9 MB, and are read in 1.9 s
_WALL_S = 600.0  # a heap that broke may hold a lock for ever

_lock = threading.Lock()
_reader: socket.socket | None = None
_process: subprocess.Popen[bytes] | None = None


def is_readable(program: bytes) -> bool:
    """Returns whether another process has read the program without harm."""
    global _reader
    with _lock:
        for _ in range(2):  # the reader itself may have been killed
            _reader = _reader or _start()
            try:
                _reader.sendall(_SIZE.pack(len(program)))
                _reader.sendall(program)
                if answer := _reader.recv(1):
                    return answer == b"1"
            except OSError:
                pass
            _reader.close()
            _reader = None
    return False


def start_as_fork() -> None:
    """Starts the reader in milliseconds instead of seconds, in a process that has imported JAX and has one thread."""
    global _reader
    _reader, theirs = socket.socketpair()
    with theirs:
        if os.fork() == 0:
            try:
                _reader.close()
                _serve(theirs)
            finally:
                os._exit(0)
    _reader.settimeout(_WALL_S)


def _start() -> socket.socket:
    global _process
    ours, theirs = socket.socketpair()
    with theirs:
        code = f"import socket; from {__name__} import _serve; _serve(socket.socket(fileno={theirs.fileno()}))"
        _process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
    ours.settimeout(_WALL_S)
    return ours


def _serve(connection: socket.socket) -> None:
    """Answers for one program after another, each read in a fork, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mlir.make_ir_context()  # loads what each fork would: 35 ms for a program instead of 240
    for descriptor in range(3):  # whoever reads the server's output waits for its end
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    with connection, connection.makefile("rb") as received:
        while head := received.read(_SIZE.size):
            program = received.read(*_SIZE.unpack(head))
            if (child := os.fork()) == 0:
                try:
                    _read(program)
                    os._exit(0)
                finally:
                    os._exit(1)
            connection.sendall(b"1" if os.waitpid(child, 0)[1] == 0 else b"0")


def _read(program: bytes) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    limits = {
        resource.RLIMIT_AS: pages * resource.getpagesize() + _ROOM_BYTES + _ROOM_PER_BYTE * len(program),
        resource.RLIMIT_CPU: _CPU_S + len(program) // _BYTES_PER_S,
        resource.RLIMIT_CORE: 0,
    }
    for limit, most in limits.items():
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    signal.alarm(int(_WALL_S / 2))
    export.deserialize(bytearray(program)).mlir_module()
