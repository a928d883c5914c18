"""The process that hosts a job's worlds: their membership, JAX's coordination services and the watches.

It outlives every process of the job: `python -m jdist.cluster.worlds.host LEAST MOST` prints its address, then one JSON
object a line for what its starter needs to know, and ends with the job, or with its starter.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jdist.cluster.address import join, split
from jdist.cluster.environment import TOKEN, text
from jdist.cluster.jax_processes import NEVER_S
from jdist.cluster.watch.messages import MOST_BYTES
from jdist.cluster.watch.server import WatchServer
from jdist.cluster.worlds import generations
from jdist.cluster.worlds.generations import Job, Message, Transition, World
from jdist.errors import ClusterError
from jdist.support.versions import difference, versions

_TICK_S = 0.2
_SILENCE_S, _GATHER_S = 10.0, 300.0  # until a process has come, which says otherwise
_KEPT = 2  # services of earlier worlds, which a process may still be leaving


class Host:
    """The sockets round a `Job`."""

    def __init__(self, job: Job, *, address: str, token: str, tell: Any):
        self._job, self._address, self._token, self._tell = job, address, token, tell
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._services: list[Any] = []
        self._watch: WatchServer | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def serve(self, server: socket.socket, starter: asyncio.StreamReader) -> None:
        """Serves until the job has ended and all have gone, or the starter has."""
        async with await asyncio.start_server(self._greet, sock=server, limit=MOST_BYTES):
            tasks = [asyncio.create_task(each) for each in (self._tick(), self._ended.wait(), starter.read())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._advance(generations.tick(self._job, time.monotonic()))
            for writer in self._writers.values():
                _send(writer, {"type": "beat"})

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = None
        try:
            message = json.loads(await asyncio.wait_for(reader.readline(), 5.0))
            why = self._refusal(message)
            if why is not None:
                _send(writer, {"type": "refused", "reason": why})
                return
            name = str(message["name"])
            if not self._job.processes and self._job.world is None:  # all have the same
                silence_s, gather_s = float(message["silence_s"]), float(message["gather_s"])
                self._job = replace(self._job, silence_s=silence_s, gather_s=gather_s)
            self._writers[name] = writer
            peer = join(*writer.get_extra_info("peername")[:2])
            address = message.get("address") or peer
            now_s = time.monotonic()
            self._advance(generations.hello(self._job, name, int(message["number"]), address, now_s))
            while line := await reader.readline():
                self._take(name, json.loads(line))
        except (OSError, ValueError, KeyError, TypeError, TimeoutError):
            pass  # it is gone, or no process of jdist: the same end
        finally:
            if name is not None:
                self._lose(name)
            writer.close()

    def _refusal(self, hello: Message) -> str | None:
        if hello.get("type") != "hello":
            return "it did not say hello first"
        if not hmac.compare_digest(str(hello.get("token")).encode(), self._token.encode()):
            return "its JDIST_TOKEN is not that of the job"
        if hello.get("name") in self._job.processes or hello.get("name") in self._job.fenced:
            return "it was lost to the job, which goes on without it"
        differ = difference(versions(), hello.get("versions"), same_step=True)
        return None if differ is None else f"{differ.text}. Install the same versions on all hosts"

    def _take(self, name: str, message: Message) -> None:
        now_s = time.monotonic()
        if name not in self._job.processes:
            return  # it was lost; its connection is being closed
        self._job = generations.heard(self._job, name, now_s)
        match message:
            case {"type": "ready", "generation": int(generation), "steps": list(steps), "leaves": bool(leaves)}:
                at = frozenset(map(int, steps))
                self._advance(
                    generations.ready(self._job, name, generation=generation, steps=at, leaves=leaves, now_s=now_s)
                )
            case {"type": "bye"}:
                self._advance(generations.gone(self._job, name, now_s, well=True))

    def _lose(self, name: str) -> None:
        self._writers.pop(name, None)
        self._advance(generations.gone(self._job, name, time.monotonic()))
        if not self._writers and self._job.world is not None:
            self._ended.set()

    def _lose_member(self, generation: int, rank: int) -> None:
        self._advance(generations.lost_in(self._job, generation, rank, time.monotonic()))

    def _advance(self, transition: Transition) -> None:
        before, (self._job, outgoing) = self._job, transition
        world = self._job.world
        addresses: dict[str, Any] = {}
        if world is not None and world is not before.world:
            addresses = self._open(world)
            self._tell({"world": world.generation, "numbers": [self._job.processes[n].number for n in world.names]})
        if self._job.ended is not None and before.ended is None:
            self._tell({"end": self._job.ended})
        for name in self._job.fenced - before.fenced:
            self._tell({"fence": before.processes[name].number})
            if (writer := self._writers.pop(name, None)) is not None:
                _send(writer, {"type": "fenced"})
                writer.close()
        if before.runs and not self._job.runs and world is not None:
            if self._watch is not None and not self._watch.is_complete:
                self._watch.close()  # those that wait for all to come go on to the next world
            for name in self._job.members:
                self._write(name, {"type": "broken", "generation": world.generation})
        for to, message in outgoing:
            if message["type"] == "world" and world is not None:
                message = {**message, **addresses, "rank": world.names.index(to)}
            self._write(to, message)
            if message["type"] == "released" and (writer := self._writers.pop(to, None)) is not None:
                writer.close()

    def _write(self, name: str, message: Message) -> None:
        if (writer := self._writers.get(name)) is not None:
            _send(writer, message)

    def _open(self, world: World) -> dict[str, Any]:
        """Starts the watch and JAX's coordination service of a world; returns what its members must know."""
        count, host = len(world.names), split(self._address)[0]
        if self._watch is not None:
            self._watch.close()
        server = socket.create_server((host, 0))
        self._watch = WatchServer(
            server,
            count,
            silence_s=self._job.silence_s,
            start_timeout_s=self._job.gather_s,
            token=self._token,
            on_lost=lambda rank: self._loop.call_soon_threadsafe(self._lose_member, world.generation, rank),
        )
        at, service = coordination_service(host, count)
        self._services.append(service)
        if len(self._services) > _KEPT:
            # It waits 5 s for a process that stands still.
            threading.Thread(target=self._services.pop(0).shutdown, daemon=True).start()
        return {
            "generation": world.generation,
            "addresses": [self._job.processes[name].address for name in world.names],
            "jax": at,
            "watch": join(host, server.getsockname()[1]),
            "step": world.step,
            "newcomers": list(world.newcomers),
        }


def coordination_service(host: str, count: int) -> tuple[str, Any]:
    """Starts JAX's coordination service for so many processes; its address, and the service."""
    # The only private call of jdist: JAX starts the service within process 0, with which it would be lost.
    with socket.create_server((host, 0)) as free:
        at = join(host, free.getsockname()[1])
    try:
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage] # as it says

        return at, _jax.get_distributed_runtime_service(
            at, count, heartbeat_timeout=NEVER_S, shutdown_timeout=NEVER_S, recoverable=True
        )
    except (ImportError, AttributeError, TypeError) as exc:
        raise ClusterError(
            f'JAX {versions()["jax"]} does not let jdist host its coordination service ({exc}), so `on_loss="continue"` is not '
            "possible with it. Leave it out, or use an earlier JAX."
        ) from exc


def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


async def _main(options: argparse.Namespace) -> None:
    coordination_service(options.address, 1)[1].shutdown()  # before any process comes, as JAX may not allow it
    server = socket.create_server((options.address, options.port))
    address = join(options.address, server.getsockname()[1])
    job = Job(
        least=options.least, most=options.most, silence_s=_SILENCE_S, gather_s=_GATHER_S, since_s=time.monotonic()
    )
    starter = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(starter), sys.stdin)

    def tell(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    tell({"address": address})
    await Host(job, address=address, token=text(os.environ, TOKEN) or "", tell=tell).serve(server, starter)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the host; for tests and `python -m`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a scheduler sends them to all: this one ends last
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("least", type=int)
    parser.add_argument("most", type=int)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(_main(parser.parse_args(arguments)))
    os._exit(0)  # JAX's services would wait for their processes


if __name__ == "__main__":
    main()
