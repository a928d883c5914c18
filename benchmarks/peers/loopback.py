"""What loopback TCP gives two clients that each receive and send a block at a time: one side of parameter_server.py.

Arguments MEGABYTES; reads numbers of rounds (a client's, there and back), prints their seconds as JSON.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from side import serve

SIZE = int(sys.argv[1]) * 1_000_000


def receive(connection: socket.socket, block: memoryview) -> None:
    while len(block):
        got = connection.recv_into(block)
        if not got:
            raise EOFError
        block = block[got:]


def answer(connection: socket.socket) -> None:
    block = memoryview(bytearray(SIZE))
    while connection.recv(1):
        connection.sendall(block)
        receive(connection, block)
        connection.sendall(b"k")


listener = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:  # the server is another process, as a ps is
    for _ in range(2):
        threading.Thread(target=answer, args=(listener.accept()[0],)).start()
else:
    block = memoryview(bytearray(2 * SIZE))
    clients = [(socket.create_connection(listener.getsockname()), block[i * SIZE : (i + 1) * SIZE]) for i in range(2)]

    def pull_and_push(i: int, rounds: int) -> None:
        connection, mine = clients[i]
        for _ in range(rounds):
            connection.sendall(b"p")
            receive(connection, mine)
            connection.sendall(mine)
            connection.recv(1)

    def run(rounds: int) -> float:
        threads = [threading.Thread(target=pull_and_push, args=(i, (rounds + i) // 2)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 0.0

    serve({}, run)
