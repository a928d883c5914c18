"""A worker: pulls parameters, computes closures that the coordinator sends, pushes their gradients.

It keeps nothing that matters: whatever it has can be computed again elsewhere. It holds no code of the user's either, only
artifacts.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist.errors import ShardLostError, WireError
from jdist.ps.artifact import name_of, unpack
from jdist.ps.job import KINDS, Job, ShardOfJob
from jdist.ps.keeper import Keeping, specs
from jdist.ps.messages import Commit, Done, Parameters, Pull, Push, Refused, Stage
from jdist.ps.shards import ShardClient, Together
from jdist.ps.transport.seam import Channel, Header, Method
from jdist.ps.wire import Spec, from_plain

MOST_CLOSURES = 4096


class Abandoned(Exception):
    """The closure is not this worker's any more: it was fenced, or the shards began a new history."""


class WorkerServer:
    """What a worker serves to the coordinator.

    Args:
        connect: from a server's address to a channel.
        allow: custom calls that a received function may have; see `artifact.unpack`.
        timeout_s: of one call to a server.
        give_up_s: how long a call to a server is repeated.
    """

    def __init__(
        self,
        connect: Callable[[str], Channel],
        *,
        allow: Sequence[str] = (),
        timeout_s: float = 20.0,
        give_up_s: float = 60.0,
    ):
        self.incarnation = secrets.token_hex(8)
        self._connect, self._allow = connect, tuple(allow)
        self._times = {"timeout_s": timeout_s, "give_up_s": give_up_s}
        self._lock, self._running = threading.Lock(), threading.Lock()
        self._epoch = 0
        self._jobs: dict[str, _Installed] = {}

    def methods(self) -> dict[str, Method]:
        """What a transport serves."""
        return {
            "status": Method(lambda header, arrays: ({"incarnation": self.incarnation, "epoch": self._epoch}, [])),
            "install": Method(self._install, _expects_of_install),
            "execute": Method(self._execute, self._expects_of_execute),
        }

    def close(self) -> None:
        """Ends its connections."""
        for job in self._jobs.values():
            job.shards.close()

    def _install(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        job, keepings = from_plain(KINDS, header.get("job")), header.get("keepings")
        if not isinstance(job, Job) or not isinstance(keepings, list) or len(keepings) != len(job.shards):
            raise WireError("no job")
        found = [from_plain({"Keeping": Keeping}, keeping) for keeping in keepings]
        artifact = arrays[0].tobytes()
        clients = [
            ShardClient(self._connect(shard.address), keeping, **self._times)
            for shard, keeping in zip(job.shards, found, strict=True)
        ]
        name = f"{name_of(artifact)}-{header.get('as')}"
        installed = _Installed(job, unpack(artifact, allow=self._allow), Together(clients))
        with self._lock:
            before = self._jobs.pop(name, None)
            self._jobs[name] = installed
        if before is not None:
            before.shards.close()
        return {"name": name}, []

    def _expects_of_execute(self, header: Header) -> list[Spec]:
        closures, job = header.get("closures"), self._jobs.get(str(header.get("job")))
        if job is None or not isinstance(closures, list) or len(closures) > MOST_CLOSURES:
            raise WireError("closures of no job")
        return specs(job.job.arguments) * len(closures)

    def _execute(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Computes closures, one after the other.

        Returns:
            For each an outcome: "done", "void" with an error's text, or "abandoned"; and the outputs of those that are done.
        """
        numbers = [header[name] for name in ("epoch", "generation", "settled")] + header["closures"]
        if any(type(n) is not int for n in numbers):
            raise WireError("a number that is none")
        epoch, generation, settled, *closures = numbers
        with self._lock:
            self._epoch = max(self._epoch, epoch)
            job = self._jobs[header["job"]]
        outcomes, outputs = [], []
        given, count = iter(arrays), len(job.job.arguments)
        with self._running:  # what an earlier incarnation of the coordinator asked for ends first
            for closure in closures:
                arguments = list(itertools.islice(given, count))
                who = _Who(header["worker"], epoch, generation, settled)
                try:
                    if self._epoch > epoch:
                        raise Abandoned
                    results, error = job.compute(who, closure, arguments)
                except (Abandoned, ShardLostError):
                    outcomes.append({"closure": closure, "outcome": "abandoned"})
                    continue
                outcomes.append({"closure": closure, "outcome": "void" if error else "done", "error": error})
                outputs += results
        return {"outcomes": outcomes}, outputs


def _expects_of_install(header: Header) -> list[Spec]:
    size = header.get("program")
    if type(size) is not int or not 0 <= size < 1 << 32:
        raise WireError("a program of no size")
    return [Spec((size,), "uint8")]


class _Who:
    """In whose name a worker speaks: what every message of a closure says."""

    def __init__(self, worker: int, epoch: int, generation: int, settled: int):
        self.said: dict[str, Any] = {"worker": worker, "epoch": epoch, "generation": generation, "settled": settled}


class _Installed:
    """A job with its compiled function and what was pulled for it."""

    def __init__(self, job: Job, run: Callable[[Sequence[Any]], list[jax.Array]], shards: Together):
        self.job, self.shards, self._run = job, shards, run
        self._history: tuple[int, int] | None = None  # epoch and generation of what was pulled
        self._versions: list[int | None] = [None] * len(job.shards)
        self._inputs = [np.empty(spec.shape, spec.numpy) for spec in specs(job.inputs)]

    def compute(self, who: _Who, closure: int, arguments: list[np.ndarray]) -> tuple[list[np.ndarray], str | None]:
        """One closure, with as many attempts as it takes.

        Returns:
            `(outputs, error)`.

        Raises:
            Abandoned: it is not this worker's any more.
            ShardLostError: a server does not answer.
        """
        history = who.said["epoch"], who.said["generation"]
        if self._history != history:
            self._history, self._versions = history, [None] * len(self._versions)
        home = closure % len(self.job.shards)
        for attempt in itertools.count():
            if None in self._versions:
                self._pull(who)
            pushed, scalars, finite, outputs = self._computed(arguments)
            if not finite and self.job.non_finite == "raise":
                return [], "a gradient is NaN or infinite"
            result = b"".join(x.tobytes() for x in outputs)
            said = {**who.said, "closure": closure, "attempt": attempt, "finite": finite}
            if self._pushed(who, said, pushed, scalars, home, result):
                return outputs, None
        raise AssertionError  # the loop has no end

    def _computed(
        self, arguments: list[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray], bool, list[np.ndarray]]:
        results = [np.asarray(x) for x in self._run([*self._inputs, *arguments])]
        n, m = self.job.num_pushed, self.job.num_scalars
        return results[:n], results[n : n + m], bool(results[n + m]), results[n + m + 1 :]

    def _pushed(self, who: _Who, said: Header, pushed: list[Any], scalars: list[Any], home: int, result: bytes) -> bool:
        """Brings a closure's gradients to all shards, and pulls; whether they were not too stale."""
        kind = Push if len(self.job.shards) == 1 else Stage
        bases = list(self._versions)

        def first(i: int, shard: ShardOfJob) -> Any:
            shares = [place.cut(pushed[place.of]) for place in shard.pushes] + scalars
            push = kind(**said, base=bases[i] or 0)
            pull = [Pull(**who.said, known=bases[i])] if kind is Push else []
            return [push, *pull], shares, result if i == home else None

        told = self.shards.say([first(i, shard) for i, shard in enumerate(self.job.shards)])
        found = [(answers, arrays) for answers, arrays, _ in told]
        refused = [answers[0] for answers, _ in found if isinstance(answers[0], Refused)]
        if any(answer.reason != "stale" for answer in refused):
            raise Abandoned
        if refused:
            if kind is Push:
                self._take(0, found[0][0][1], found[0][1])
            else:
                self._pull(who)
            return False
        if kind is Push:
            self._take(0, found[0][0][1], found[0][1])
            return True
        commit = Commit(**who.said, closures=(said["closure"],))

        told = self.shards.say([([commit, Pull(**who.said, known=base)], (), None) for base in bases])
        for i, (answers, arrays, _) in enumerate(told):
            if not isinstance(answers[0], Done):
                raise Abandoned
            self._take(i, answers[1], arrays)
        return True

    def _pull(self, who: _Who) -> None:
        asked = list(self._versions)
        found = self.shards.say([([Pull(**who.said, known=known)], (), None) for known in asked])
        for i, (answers, arrays, _) in enumerate(found):
            self._take(i, answers[0], arrays)

    def _take(self, i: int, answer: Any, arrays: list[np.ndarray]) -> None:
        """Takes over what a shard sent of the parameters."""
        if not isinstance(answer, Parameters):
            raise Abandoned
        shard: ShardOfJob = self.job.shards[i]
        first = self._versions[i] is None
        places = [*(shard.pulled if answer.changed else ()), *(shard.pulled_once if first else ())]
        for place, array in zip(places, arrays, strict=True):
            if place.stop is None:
                self._inputs[place.of] = array
            else:
                self._inputs[place.of][place.start : place.stop] = array
        self._versions[i] = answer.version
