"""`ElasticRuntime`: a process's part in a job that goes on without lost processes, from world to world."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax

from jdist.cluster import exit_status, jax_processes, runtime
from jdist.cluster.address import join, split
from jdist.cluster.environment import NUMBER, TOKEN, WORLDS, text
from jdist.cluster.exit_status import HardExit
from jdist.cluster.jax_processes import is_error_of_jax
from jdist.cluster.listen import check_own_name, numeric_address, watch_port
from jdist.cluster.runtime import Runtime
from jdist.cluster.spec import ClusterSpec
from jdist.cluster.watch.client import Identity, Watch
from jdist.cluster.worlds import rebuild
from jdist.cluster.worlds.generations import FINISHED
from jdist.cluster.worlds.member import Member, Place
from jdist.errors import ClusterError, ClusterTimeoutError, PeerLostError
from jdist.support.tracebacks import causes

_STUCK_S = 5.0  # from a loss to the end of what waited for the lost process
REGROUP = "others wait to come in"  # why all stop at a step


class ElasticRuntime(Runtime):
    """The processes of a job, which may change, seen from one of them."""

    def __init__(
        self,
        spec: ClusterSpec,
        timeout_s: float,
        progress_timeout_s: float | Literal["auto"],
        *,
        start_timeout_s: float,
        environ: Mapping[str, str],
    ):
        super().__init__(spec, timeout_s, progress_timeout_s)
        self.generation = self._generation_of_watch = self._broken = -1
        self.is_elastic, self._is_wanted = True, False
        self._start_timeout_s, self._token = start_timeout_s, text(environ, TOKEN) or ""
        self._leaving: str | None = None  # why this process was asked to leave
        self._goes_on: bool | None = None
        self._local_device_ids, self._ports = spec.local_device_ids, frozenset[int]()
        self._followers = weakref.WeakKeyDictionary[Any, Callable[[Any], object]]()
        self._hard_exit = HardExit()
        self._records = exit_status.record_folder(environ)
        number = int(text(environ, NUMBER) or spec.task_index)
        self._member = Member(
            environ[WORLDS],
            name=f"{number}-{secrets.token_hex(8)}",
            number=number,
            address=spec.address,
            token=self._token,
            silence_s=timeout_s,
            timeout_s=start_timeout_s,
            on_broken=self._leave_broken,
            on_regroup=self._regroup,
            on_end=self._end_without_host,
        )
        if self._member.aside:
            self.spec = ClusterSpec(jobs={"worker": (spec.address,)}, task_type="worker", task_index=0)
        else:
            self.next_world(())

    @property
    def is_alone(self) -> bool:
        """Returns False: others may come."""
        return False

    @property
    def is_chief(self) -> bool:
        """Returns whether this is process 0 of a world."""
        return self.generation >= 0 and self.process_index == 0

    @property
    def is_aside(self) -> bool:
        """Returns whether this process has not come into a world yet."""
        return self.generation < 0

    def follow(self, value: Any, renew: Callable[[Any], object]) -> None:
        """Calls `renew(value)` in each world that this process comes into later, in the order of these calls."""
        self._followers[value] = renew

    def is_loss(self, error: BaseException) -> bool:
        """Returns whether an error came from the loss of a process; waits for that to be known."""
        if self._watch is None or not (
            is_error_of_jax(error) or any(isinstance(each, PeerLostError) for each in causes(error))
        ):
            return False
        return self._watch.wait_for_loss(2 * self.timeout_s) is not None

    def wish_to_stop(self, reason: str) -> None:
        """Asks all to stop after the same step; all but those who were asked to leave then go on."""
        self._leaving = reason
        super().wish_to_stop(reason)

    @property
    def asked_to_end(self) -> str | None:
        """Why this process's program is to end, or those of all; None if nobody has asked."""
        return self._leaving or (None if self.stopping == REGROUP else self.stopping)

    def exchange(self, what: str, value: Any, timeout_s: float) -> list[Any]:
        """Gathers a value from every process of the world."""
        if self._watch is None and not self.is_aside:
            raise ClusterError(f"this process is on its way to another world, and cannot exchange {what!r} now.")
        return super().exchange(what, value, timeout_s)

    def goes_on(self) -> bool:
        """Returns whether some of those that stop now go on, in another world."""
        if self.stopping is None:
            return False
        if self._goes_on is None:
            self._goes_on = not all(self.exchange("who leaves", self._leaving is not None, self._start_timeout_s))
        return self._goes_on

    def next_world(self, steps: Iterable[int]) -> Place:
        """Leaves the world, and goes into the next one, where all go on at one of each survivor's `steps`."""
        left = self.generation
        while True:
            self._leave()
            leaves = self._leaving is not None
            place = self._member.next_world(left, steps, leaves=leaves)
            try:
                self._join(place)
            except (PeerLostError, ClusterTimeoutError):  # a second one, while the first is being mended
                left = place.generation
            else:
                for value, renew in list(self._followers.items()):
                    renew(value)
                return place

    def _leave(self) -> None:
        if self._watch is not None and self._watch.lost is None:
            self._watch.part()
        self._watch = self._newest = self._goes_on = self._called_s = None
        self._stopping, self._is_wanted = self._leaving, False
        self._numbers.clear()
        self._calls_s.clear()
        rebuild.leave()

    def _join(self, place: Place) -> None:
        self.spec = spec = ClusterSpec(
            jobs={"worker": place.addresses},
            task_type="worker",
            task_index=place.rank,
            local_device_ids=self._local_device_ids,
        )
        host, port = split(place.watch)
        self._generation_of_watch = place.generation
        identity = Identity(process=place.rank, addresses=place.addresses, host=host, port=port, token=self._token)
        self._watch = self._open_watch(identity, self._start_timeout_s)
        if self._watch.lost is not None or self._broken == place.generation:
            raise self._watch.lost or ClusterTimeoutError("a process of the next world was lost before it had begun.")
        before = rebuild.listening_ports()
        with socket.create_server(("127.0.0.1", 0)) as free:
            unused = join("127.0.0.1", free.getsockname()[1])  # JAX's process 0 starts a service, which nobody asks
        with self.blocked():
            jax_processes.initialize(spec, unused, self._start_timeout_s, coordinator_address=place.jax)
            jax.devices()
        ports = sorted(rebuild.listening_ports() - before)
        self._ports = frozenset(p for each in self.exchange("gloo's ports", ports, self._start_timeout_s) for p in each)
        with self.blocked():  # gloo waits 30 s for a process that is lost while it connects: it does so now, at once
            rebuild.connect()
        self.generation = place.generation
        if self._leaving is not None:  # it stayed to hand on the state, or to save it
            self.wish_to_stop(self._leaving)
        if self._is_wanted:  # it was asked meanwhile
            self._regroup()

    def _regroup(self) -> None:
        """Asks all to leave this world at the next step, as others wait to come in."""
        self._is_wanted = True
        if self._watch is not None:
            super().wish_to_stop(REGROUP)

    def _leave_broken(self, generation: int) -> None:
        """Takes in that the members of a world leave it."""
        self._broken = generation
        if generation == self._generation_of_watch:
            self._end_waits()

    def _end_waits(self) -> None:
        """Ends collectives that wait for a lost process; ends this process if they do not end."""
        # Not always enough: about one kill in five leaves a survivor in gloo's `waitRecv`, with all its connections closed.
        rebuild.break_connections(self._ports)
        stuck_s = max(_STUCK_S, 3 * max(self._calls_s, default=0.0))
        timer = threading.Timer(stuck_s, self._end_if_stuck, [self._watch])
        timer.daemon = True
        timer.start()

    def _end_after_loss(self, lost: PeerLostError) -> None:
        """Ends collectives that wait for the lost process; the program's thread then raises the loss."""
        assert self._hard_exit is not None
        self._hard_exit.say(
            f"process {lost.process} of world {self._generation_of_watch} ({lost.address}) is lost at step {lost.last_step}: "
            f"{lost.cause}. The others go on without it."
        )
        self._end_waits()

    def _end_if_stuck(self, watch: Watch) -> None:
        """Ends this process if its collective has not ended: rarely gloo wakes nobody for a connection that is closed."""
        if self._watch is watch and self._waits():
            self._end_without_host("its exchange with a lost process does not end")

    def _wait_for_the_end(self, watch: Watch) -> None:
        """Does not wait: a loss does not end this process."""

    def _end_without_host(self, why: str) -> None:
        assert self._hard_exit is not None
        code = exit_status.FINISHED if why == FINISHED else exit_status.PEER_LOST
        words = f"\njdist: this process ends with exit code {code}: {why}\n"
        self._hard_exit.exit(code, lambda: os.write(2, words.encode()))

    def end(self) -> None:
        """Leaves the job at the end of the program."""
        super().end()
        if os.getpid() == self._pid:
            self._member.bye()


def join_job(spec: ClusterSpec, timeouts: Mapping[str, Any], environ: Mapping[str, str]) -> ElasticRuntime:
    """Joins this process to its job, once; the host of the job's worlds is at JDIST_WORLDS, or in process 0's care."""
    joined = runtime.started()
    if joined is None:
        jax_processes.check_unused()
        check_own_name(environ)
        if WORLDS not in environ:
            environ = {**environ, WORLDS: _host_of_process_0(spec, environ)}
        start_timeout_s, times = timeouts["start_timeout_s"], (timeouts["timeout_s"], timeouts["progress_timeout_s"])
        try:
            joined = ElasticRuntime(spec, *times, start_timeout_s=start_timeout_s, environ=environ)
        except ClusterTimeoutError as exc:
            exit_status.exit_with_its_code(exc)
            raise
        runtime.enter(joined)
    if not isinstance(joined, ElasticRuntime):
        raise ClusterError(f"this process is in a cluster already ({joined.spec}), which stops on a loss.")
    return joined


def _host_of_process_0(spec: ClusterSpec, environ: Mapping[str, str]) -> str:
    """Finds the address of the host where no launcher has one: process 0 starts it, and its loss ends the job."""
    global _host
    name, port = split(spec.coordinator_address)
    port = watch_port(environ, port)
    if spec.process_index == 0:
        command = [sys.executable, "-m", "jdist.cluster.worlds.host", "1", str(spec.num_processes)]
        command += ["--address", numeric_address(name, environ), "--port", str(port)]
        _host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)  # it ends with this process
    return join(name, port)


_host: subprocess.Popen[bytes] | None = None
