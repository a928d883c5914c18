"""This process in its cluster: JAX's runtime started, the other processes watched."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from jdist.cluster import exit_status, failpoints, jax_processes, lost_peer
from jdist.cluster.address import join, split
from jdist.cluster.environment import TOKEN, text
from jdist.cluster.failpoints import Point
from jdist.cluster.hard_exit import Leaving
from jdist.cluster.listen import check_free, check_reachable, listen, resolved, watch_port
from jdist.cluster.spec import ClusterSpec
from jdist.cluster.watch.client import Place, Watch
from jdist.cluster.watch.exchanges import Exchanges
from jdist.cluster.watch.server import WatchServer
from jdist.cluster.watch.stacks import is_exchanging, whereabouts
from jdist.errors import ClusterError, ClusterTimeoutError, PeerLostError

_SAME_ERROR_S = 2.0  # processes that meet the same error end so far apart from each other at most
_ENDING_S = 10.0  # for the watch's thread to end the process after a loss
_CALLS, _ENOUGH_CALLS = 200, 20  # of a step, from which it is known how long one takes
_LEAST_PATIENCE_S, _PATIENCE_AT_FIRST_S = 60.0, 1800.0
_PARTING_S = 1.0  # for the others to hear of a loss from process 0, before it ends
# A collective that fails while it is dispatched raises a ValueError that only its text tells from others.
_STATUS = re.compile(
    r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|DATA_LOSS): "
)
_log = logging.getLogger(__name__)


class Runtime:
    """The processes of a synchronous job, seen from one of them; `start` makes it.

    Attributes:
        spec: the cluster.
        timeout_s: a process that is not heard of for so long is lost.
    """

    def __init__(self, spec: ClusterSpec, timeout_s: float, progress_timeout_s: float | Literal["auto"] = "auto"):
        self.spec, self.timeout_s, self._progress_timeout_s = spec, timeout_s, progress_timeout_s
        self._calls_s: deque[float] = deque(maxlen=_CALLS)  # from one call of a step to the next
        self._called_s: float | None = None
        self._busy: list[str] = []
        self._thread = threading.get_ident()
        self._watch: Watch | None = None
        self._switchboard: WatchServer | None = None
        self._leaving: Leaving | None = None
        self._records: Path | None = None
        self._pid = os.getpid()
        self._step = 0
        self._exchanges: Counter[str] = Counter()  # how many there were of each name
        self._stopping: str | None = None  # with one process
        self._blocked: list[None] = []
        self._newest: jax.Array | None = None
        self._failed: int | None = None
        self._ended = False  # whether the program has come to its end
        self._not_a_loss: BaseException | None = None

    @property
    def process_index(self) -> int:
        """The number of this process."""
        return self.spec.process_index

    @property
    def num_processes(self) -> int:
        """How many processes take part."""
        return self.spec.num_processes

    @property
    def is_chief(self) -> bool:
        """Whether this is process 0, which alone writes metrics, plots and logs."""
        return self.process_index == 0

    @property
    def stopping(self) -> str | None:
        """Why all processes are to stop soon; None if nobody wished it."""
        return self._stopping if self._watch is None else self._watch.stopping

    def at_step(self, step: int) -> None:
        """Notes which step the run is at, for the record of a loss."""
        self._step = step
        if self._watch is not None:
            self._watch.progress(step)

    def advance(self, steps: int, result: jax.Array | None = None) -> None:
        """Notes that so many steps more were started.

        Args:
            steps: how many.
            result: an array that they compute and that is never donated. While it is not ready this process waits for the
                others, if they do not wait for it.
        """
        now_s = time.monotonic()
        if self._called_s is not None:
            self._calls_s.append(now_s - self._called_s)
        self._called_s, self._thread = now_s, threading.get_ident()
        self._newest = result
        self.at_step(self._step + steps)

    def exchange(self, what: str, value: Any, timeout_s: float) -> list[Any]:
        """What every process says about something, by index.

        Args:
            what: names it in errors; the same on all. Exchanges of one name are to be asked for in one order by all.
            value: what this process says; what JSON can hold.
            timeout_s: how long to wait for the others.

        Raises:
            ClusterTimeoutError: not all said theirs in time.
            PeerLostError: a process was lost meanwhile.
        """
        if self._watch is None:
            return [value]
        with _lock:
            self._exchanges[what] += 1
            number = self._exchanges[what]
        return self._watch.exchanges.exchange(f"{what} ({number})", value, timeout_s)

    @property
    def exchanges(self) -> Exchanges | None:
        """What `exchange` goes through, for those that wait in their own way; None with one process."""
        return None if self._watch is None else self._watch.exchanges

    def wish_to_stop(self, reason: str) -> None:
        """Asks all processes to stop after the same step; may be called from a signal handler."""
        if self._watch is None:
            self._stopping = self._stopping or reason
        else:
            self._watch.wish_to_stop(reason)

    def stops_after(self, step: int) -> bool:
        """Whether all processes stop now, after `step` steps; all have to ask after the same steps.

        Raises:
            PeerLostError: a process was lost meanwhile.
        """
        return self._stopping is not None if self._watch is None else self._watch.stops_after(step)

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Round what waits for other processes. An error of the runtime is explained by the loss of one, if it was that."""
        if self._watch is None:
            yield
            return
        self._blocked.append(None)
        try:
            yield
        except Exception as exc:
            if _is_of_jax(exc):
                lost = self._watch.wait_for_loss(2 * self.timeout_s)
                if lost is not None:
                    raise lost from exc
                self._not_a_loss = exc
            raise
        finally:
            self._blocked.pop()

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Says that this process does something long on its own, for which the others wait as long as it takes.

        Args:
            what: as a phrase, for what is told of it: "downloading".

        Example:
            >>> import jdist
            >>> with jdist.multi_worker().cluster.busy("counting words"):
            ...     words = len("a long text".split())
        """
        self._busy.append(what)
        try:
            yield
        finally:
            self._busy.pop()

    def failed(self, code: int) -> None:
        """Notes that this program ends with an error that it has reported itself, by `sys.exit(code)` for instance."""
        self._failed = code

    def end(self) -> None:
        """Leaves the cluster: at the end of the program, together with the others; after an error of its own, without."""
        watch, switchboard = self._watch, self._switchboard
        if watch is None or self._leaving is None or os.getpid() != self._pid:  # a fork's end is not this program's
            return
        error = None if self._failed is not None or exit_status.is_interactive() else getattr(sys, "last_value", None)
        code = self._failed if error is None else _code(error)
        if code is None:
            try:
                jax.block_until_ready(self._newest)  # the others cannot do their part of it without this process
            except jax.errors.JaxRuntimeError as exc:
                traceback.print_exc()
                code, error = exit_status.FAILED, exc
        if code is not None and not self._all_failed(code):
            if error is not None and error is not self._not_a_loss and _is_of_jax(error):
                watch.wait_for_loss(2 * self.timeout_s)
            self._wait_for_the_end(watch)
            # The others learn at once that this process is gone. JAX would wait minutes for them here.
            watch.close()
            self._leaving.leave(code, logging.shutdown)
        failpoints.reached(Point.AT_END)
        self._ended = True
        with contextlib.suppress(PeerLostError):
            watch.say_bye()
        failpoints.reached(Point.IN_END)
        self._wait_for_the_end(watch)
        try:
            jax.distributed.shutdown()
        except jax.errors.JaxRuntimeError as exc:
            _log.warning("JAX's processes did not part well: %s", exc)
        if switchboard is not None:
            switchboard.wait_until_alone(3 * self.timeout_s)  # who stands still now is lost, and that ends this process
        watch.part()
        if switchboard is not None:
            switchboard.close()
        if error is not None and code == exit_status.PEER_LOST:  # Python itself has but one code for all errors
            self._leaving.leave(code, logging.shutdown)

    def _all_failed(self, code: int) -> bool:
        """Whether all others end with an error as well: often the same one, and then none of them is lost to another."""
        try:
            self.exchange("an end with an error", code, min(_SAME_ERROR_S, self.timeout_s / 5))
        except ClusterError:
            return False
        return True

    def _waits(self) -> bool:
        newest: Any = self._newest  # `is_ready` is public, but not in JAX's type stubs
        return bool(self._blocked) or is_exchanging(self._thread) or (newest is not None and not newest.is_ready())

    def _patience_s(self) -> float:
        """How long this process waits for others at one step."""
        if isinstance(self._progress_timeout_s, int | float):
            return self._progress_timeout_s
        calls = sorted(self._calls_s)
        if len(calls) < _ENOUGH_CALLS:
            return _PATIENCE_AT_FIRST_S
        return max(_LEAST_PATIENCE_S, 10 * calls[int(0.95 * (len(calls) - 1))])

    def _where(self) -> dict[str, Any]:
        return whereabouts(self._thread, self._busy[-1] if self._busy else None, waits=self._waits())

    def _wait_for_the_end(self, watch: Watch) -> None:
        """Keeps this thread from doing anything more once a process is lost: the watch's thread ends the process."""
        if watch.lost is not None and self._leaving is not None:
            threading.Event().wait(_ENDING_S)
            self._leaving.leave(exit_status.PEER_LOST)

    def _end_with(self, lost: PeerLostError) -> None:
        """Records that a process was lost, and ends this one: its main thread may be blocked for ever."""
        assert self._leaving is not None
        own, where, words = self.process_index, self._records, [lambda: lost_peer.say(lost, self.process_index)]
        if where is not None:
            words.append(lambda: lost_peer.write(lost, own, where))
        if self._switchboard is not None:
            self._switchboard.wait_until_alone(_PARTING_S)
        # Whoever ended while others need it is to blame, and a launcher has to see that.
        guilty = self._ended and lost.process == own
        self._leaving.leave(exit_status.FAILED if guilty else exit_status.PEER_LOST, *words)


_lock = threading.Lock()
_started: Runtime | None = None


def start(
    spec: ClusterSpec, *, timeout_s: float, start_timeout_s: float, progress_timeout_s: float | Literal["auto"] = "auto"
) -> Runtime:
    """Brings this process into its cluster; a second call with the same cluster gives the same, with the times of the first.

    Args:
        spec: the cluster.
        timeout_s: a process that is not heard of for so long is lost; this one then ends, with exit code 75.
        start_timeout_s: how long to wait until all processes have come.
        progress_timeout_s: how long processes wait for one that is alive and does not go on; see `CommunicationOptions`.

    Raises:
        ClusterTimeoutError: not all came in time.
        ClusterError: JAX has been used already, or this process is in another cluster.
        ClusterConfigError: a port is not allowed or taken, or `spec` is of a ps or an evaluator.
    """
    global _started
    with _lock:
        if _started is not None:
            if (spec.processes, spec.process_index) != (_started.spec.processes, _started.process_index):
                raise ClusterError(
                    f"this process is in a cluster already ({_started.spec}) and cannot join another ({spec}). Start it again."
                )
            return _started
        failpoints.arm(spec.process_index, os.environ)
        runtime = Runtime(spec, timeout_s, progress_timeout_s)
        if spec.num_processes > 1:
            _start(runtime, start_timeout_s, os.environ)
            _started = runtime
        return runtime


class Alone(Runtime):
    """A job of this process alone, which belongs to no cluster: nobody hears of its steps."""

    def __init__(self) -> None:
        super().__init__(ClusterSpec(jobs={"worker": (None,)}, task_type="worker", task_index=0), 0.0)


def alone() -> Runtime:
    """A job of this process alone, which belongs to no cluster."""
    return Alone()


def started() -> Runtime | None:
    """The cluster that this process is in; None before `start`, and with one process."""
    return _started


def _start(runtime: Runtime, start_timeout_s: float, environ: Mapping[str, str]) -> None:
    spec, process, timeout_s = runtime.spec, runtime.process_index, runtime.timeout_s
    jax_processes.check_unused()
    runtime._records = lost_peer.folder(environ)
    host, port = split(spec.coordinator_address)
    place = Place(
        process=process,
        addresses=tuple(spec.address if i == process else known for i, known in enumerate(spec.processes)),
        host=host,
        port=watch_port(environ, port),
        token=text(environ, TOKEN) or "",
    )
    bind_address = None
    if process == 0:
        numeric = resolved(host, environ)
        if (wrong := check_reachable(host, numeric, spec.processes)) is not None:
            _log.warning("jdist: if other machines take part: %s", wrong)
        check_free(numeric, port)
        bind_address = join(numeric, port)
        runtime._switchboard = WatchServer(
            listen(numeric, place.port),
            spec.num_processes,
            silence_s=timeout_s,
            start_timeout_s=start_timeout_s,
            token=place.token,
        )
    try:
        failpoints.reached(Point.BEFORE_CONNECT)
        runtime._leaving = Leaving()
        runtime._watch = Watch(
            place,
            start_timeout_s=start_timeout_s,
            silence_s=timeout_s,
            on_lost=runtime._end_with,
            is_waiting=runtime._waits,
            patience_s=runtime._patience_s,
            where=runtime._where,
        )
        failpoints.reached(Point.AFTER_CONNECT)
        atexit.register(runtime.end)
        failpoints.reached(Point.BEFORE_INIT)
        with runtime.blocked():
            jax_processes.initialize(spec, bind_address, start_timeout_s)
        failpoints.reached(Point.IN_INIT)
    except BaseException as exc:
        if isinstance(exc, ClusterTimeoutError):
            atexit.register(_end_without_others, exc)
        runtime.failed(exit_status.FAILED)  # JAX may be half started, and would wait for the others at the end
        if runtime._watch is not None:
            runtime._watch.close()
        elif runtime._leaving is not None:
            runtime._leaving.close()
        if runtime._switchboard is not None:
            runtime._switchboard.wait_until_alone(_PARTING_S)
            runtime._switchboard.close()
        raise


def _is_of_jax(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, came from JAX's runtime, as a broken collective's does."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) or _STATUS.match(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _code(error: BaseException) -> int:
    """The exit code of a program that an uncaught exception has ended."""
    code = exit_status.of(error)
    return exit_status.FAILED if code == exit_status.USAGE else code  # as Python itself, which knows no other


def _end_without_others(timeout: ClusterTimeoutError) -> None:
    """At the end of a program: if it was that, by which it could not start, its exit code says so."""
    exit_status.end_with(_code(timeout), timeout)
