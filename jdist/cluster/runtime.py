"""`Runtime`: this process's part in its cluster, from joining the others to ending with them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from jdist.cluster import exit_status, failpoints, jax_processes
from jdist.cluster.address import join, split
from jdist.cluster.environment import TOKEN, text
from jdist.cluster.exit_status import HardExit
from jdist.cluster.failpoints import Point
from jdist.cluster.jax_processes import is_error_of_jax
from jdist.cluster.listen import check_free, check_own_name, check_reachable, listen, numeric_address, watch_port
from jdist.cluster.spec import ClusterSpec
from jdist.cluster.watch.client import Identity, Watch
from jdist.cluster.watch.exchanges import Exchanges
from jdist.cluster.watch.server import WatchServer
from jdist.cluster.watch.stacks import is_exchanging, whereabouts
from jdist.errors import ClusterError, ClusterTimeoutError, PeerFailedError, PeerLostError

_SAME_ERROR_S = 2.0  # processes that meet the same error end at most this far apart
_ENDING_S = 10.0  # for the watch's thread to end the process after a loss
_CALLS, _ENOUGH_CALLS = 200, 20  # calls of a step: how many are measured, and how many are enough to know its time
_LEAST_PATIENCE_S, _PATIENCE_AT_FIRST_S = 300.0, 1800.0  # at first: the longest, until enough calls are measured
_PARTING_S = 1.0  # for the others to hear of a loss from process 0 before it ends
_MOST_LETTERS = 2000  # of an error that is sent to the others
_log = logging.getLogger(__name__)


class Runtime:
    """The processes of a synchronous job, seen from one of them; `start` makes it."""

    def __init__(self, spec: ClusterSpec, timeout_s: float, progress_timeout_s: float | Literal["auto"] = "auto"):
        self.spec, self.timeout_s, self._progress_timeout_s = spec, timeout_s, progress_timeout_s
        self._calls_s: deque[float] = deque(maxlen=_CALLS)  # from one call of a step to the next
        self._called_s: float | None = None
        self._busy: list[str] = []
        self._thread = threading.get_ident()
        self._watch: Watch | None = None
        self._server: WatchServer | None = None
        self._hard_exit: HardExit | None = None
        self._records: Path | None = None
        self.is_elastic = False  # whether the others go on without a lost process
        self._pid = os.getpid()
        self._step = 0
        self._numbers: Counter[str] = Counter()  # how many exchanges and things there were of each name
        self._stopping: str | None = None  # of one process alone; else the watch knows it
        self._blocked: list[None] = []
        self._newest: jax.Array | None = None
        self._failed: int | None = None
        self._ended = False  # whether the program has come to its end
        self._not_a_loss: BaseException | None = None

    def __repr__(self) -> str:
        return f"Runtime(process {self.process_index} of {self.num_processes})"

    @property
    def process_index(self) -> int:
        """This process's index, from 0."""
        return self.spec.process_index

    @property
    def num_processes(self) -> int:
        """The number of processes that take part."""
        return self.spec.num_processes

    @property
    def is_chief(self) -> bool:
        """Returns whether this is process 0, which alone writes metrics, plots and logs."""
        return self.process_index == 0

    @property
    def is_alone(self) -> bool:
        """Returns whether no other process hears of this one."""
        return self._watch is None

    @property
    def stopping(self) -> str | None:
        """Why all processes are to stop; None if nobody has asked."""
        return self._stopping if self._watch is None else self._watch.stopping

    def at_step(self, step: int) -> None:
        """Sets the number of the run's step, which the record of a loss names."""
        self._step = step
        if self._watch is not None:
            self._watch.progress(step)

    def advance(self, steps: int, result: jax.Array | None = None) -> None:
        """Counts dispatched steps; `result` is an array of theirs that is never donated."""
        now_s = time.monotonic()
        if self._called_s is not None:
            self._calls_s.append(now_s - self._called_s)
        self._called_s, self._thread = now_s, threading.get_ident()
        # Until it is ready, this process may be waiting for others.
        self._newest = result
        self.at_step(self._step + steps)

    def exchange(self, what: str, value: Any, timeout_s: float) -> list[Any]:
        """Gathers a value from every process, by index; all must use the same name, `what`."""
        # Values must fit into JSON.
        if self._watch is None:
            return [value]
        return self._watch.exchanges.exchange(f"{what} ({self.next_number(what)})", value, timeout_s)

    def next_number(self, what: str) -> int:
        """Numbers exchanges, and things that exchange, by name; all processes make those of one name in the same order."""
        with _lock:
            self._numbers[what] += 1
            return self._numbers[what]

    @property
    def exchanges(self) -> Exchanges | None:
        """The exchanges, for callers that wait in their own way; None with one process."""
        return None if self._watch is None else self._watch.exchanges

    def wish_to_stop(self, reason: str) -> None:
        """Asks all processes to stop after the same step; may be called from a signal handler."""
        if self._watch is None:
            self._stopping = self._stopping or reason
        else:
            self._watch.wish_to_stop(reason)

    def stops_after(self, step: int, part: int = 0) -> bool:
        """Returns whether all processes stop now, after `step` steps and `part` of the next work."""
        # All processes must ask at the same places.
        return self._stopping is not None if self._watch is None else self._watch.stops_after(step, part)

    @property
    def asked_to_end(self) -> str | None:
        """Why the programs of all processes are to end; None if nobody has asked."""
        return self.stopping

    def goes_on(self) -> bool:
        """Returns whether those that stop now go on in another world; all processes must ask."""
        return False

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Marks a wait for other processes; a loss is raised in place of JAX's error that it caused."""
        if self._watch is None:
            yield
            return
        self._blocked.append(None)
        try:
            yield
        except Exception as exc:
            if is_error_of_jax(exc):
                lost = self._watch.wait_for_loss(2 * self.timeout_s)
                if lost is not None:
                    raise lost from exc
                self._not_a_loss = exc
            raise
        finally:
            self._blocked.pop()

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Marks long work of this process alone, for which the others wait; `what` names it in messages.

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

    def follow(self, value: Any, renew: Callable[[Any], object]) -> None:
        """Calls `renew(value)` in each later world of this process, if it `is_elastic`."""

    def failed(self, code: int) -> None:
        """Notes that this program ends with an error that it has reported itself, as by `sys.exit(code)`."""
        self._failed = code

    def end(self) -> None:
        """Leaves the cluster at the end of the program: together with the others, or alone after an error of its own."""
        watch, server = self._watch, self._server
        if watch is None or self._hard_exit is None or os.getpid() != self._pid:  # a fork's end is not this program's
            return
        error = None if self._failed is not None or exit_status.is_interactive() else getattr(sys, "last_value", None)
        code = self._failed if error is None else exit_status.of_uncaught(error)
        if code is None:
            try:
                jax.block_until_ready(self._newest)  # the others cannot do their part of it without this process
            except jax.errors.JaxRuntimeError as exc:
                traceback.print_exc()
                code, error = exit_status.FAILED, exc
        if code is not None and not self._all_failed(code):
            if error is not None and error is not self._not_a_loss and is_error_of_jax(error):
                watch.wait_for_loss(2 * self.timeout_s)
            self._wait_for_the_end(watch)
            # The others learn at once that this process is gone. JAX would wait minutes for them.
            watch.close()
            self._hard_exit.exit(code, logging.shutdown)
        failpoints.reached(Point.AT_END)
        self._ended = True
        with contextlib.suppress(PeerLostError):
            watch.say_bye()
        failpoints.reached(Point.IN_END)
        self._wait_for_the_end(watch)
        if server is not None:  # the others' JAX needs this one until they have parted
            server.wait_until_alone(3 * self.timeout_s)  # who stands still now is lost, and that ends this process
        try:
            jax.distributed.shutdown()
        except jax.errors.JaxRuntimeError as exc:
            _log.warning("JAX's processes did not part well: %s", exc)
        watch.part()
        if server is not None:
            server.close()
        if error is not None and code == exit_status.PEER_LOST:  # Python itself has but one code for all errors
            self._hard_exit.exit(code, logging.shutdown)

    def _all_failed(self, code: int) -> bool:
        """Returns whether all others end with an error as well, often the same one; then none of them is lost."""
        try:
            self.exchange("an end with an error", code, min(_SAME_ERROR_S, self.timeout_s / 5))
        except ClusterError:
            return False
        return True

    def _waits(self) -> bool:
        newest: Any = self._newest  # `is_ready` is public, but not in JAX's type stubs
        return bool(self._blocked) or is_exchanging(self._thread) or (newest is not None and not newest.is_ready())

    def _patience_s(self) -> float:
        """Computes how long this process waits for others at one step."""
        if isinstance(self._progress_timeout_s, int | float):
            return self._progress_timeout_s
        calls = sorted(self._calls_s)
        if len(calls) >= _ENOUGH_CALLS:
            return max(_LEAST_PATIENCE_S, 10 * calls[int(0.95 * (len(calls) - 1))])
        # The first call compiles: another process, or another shape, may take several times as long.
        return min(max(_LEAST_PATIENCE_S, 10 * calls[-1]), _PATIENCE_AT_FIRST_S) if calls else _PATIENCE_AT_FIRST_S

    def _where(self) -> dict[str, Any]:
        return whereabouts(self._thread, self._busy[-1] if self._busy else None, waits=self._waits())

    def _open_watch(self, identity: Identity, start_timeout_s: float) -> Watch:
        """Connects this process to the watch of its world, and waits until all have come."""
        self._hard_exit = self._hard_exit or HardExit()
        return Watch(
            identity,
            start_timeout_s=start_timeout_s,
            silence_s=self.timeout_s,
            on_lost=self._end_after_loss,
            is_waiting=self._waits,
            patience_s=self._patience_s,
            where=self._where,
            say=self._hard_exit.say,
        )

    def _wait_for_the_end(self, watch: Watch) -> None:
        """Blocks this thread once a process is lost: the watch's thread ends this process."""
        if watch.lost is not None and self._hard_exit is not None:
            threading.Event().wait(_ENDING_S)
            self._hard_exit.exit(exit_status.PEER_LOST)

    def _end_after_loss(self, lost: PeerLostError) -> None:
        """Records that a process was lost, and ends this one: its main thread may be blocked for ever."""
        assert self._hard_exit is not None
        process, folder = self.process_index, self._records
        words = [lambda: exit_status.print_record(lost, process)]
        if folder is not None:
            words.append(lambda: exit_status.write_record(lost, process, folder))
        if self._server is not None:
            self._server.wait_until_alone(_PARTING_S)
        # A process that ended while others need it is to blame, and a launcher has to see that.
        is_to_blame = self._ended and lost.process == process
        self._hard_exit.exit(exit_status.FAILED if is_to_blame else exit_status.PEER_LOST, *words)


_lock = threading.Lock()
_started: Runtime | None = None


def start(
    spec: ClusterSpec, *, timeout_s: float, start_timeout_s: float, progress_timeout_s: float | Literal["auto"] = "auto"
) -> Runtime:
    """Joins this process to its cluster; for the times see `CommunicationOptions`."""
    global _started
    with _lock:
        if _started is not None:
            if (spec.processes, spec.process_index) != (_started.spec.processes, _started.process_index):
                raise ClusterError(
                    f"this process is in a cluster already ({_started.spec}) and cannot join another ({spec}). Start it again."
                )
            # The first call's times stay.
            return _started
        failpoints.arm(spec.process_index, os.environ)
        runtime = Runtime(spec, timeout_s, progress_timeout_s)
        if spec.num_processes > 1:
            _start(runtime, start_timeout_s, os.environ)
            _started = runtime
        return runtime


def enter(runtime: Runtime) -> None:
    """Makes this the cluster of the process, which it leaves at the end of the program."""
    global _started
    _started = runtime
    atexit.register(runtime.end)


def alone() -> Runtime:
    """Makes the runtime of a process that belongs to no cluster."""
    return Runtime(ClusterSpec(jobs={"worker": (None,)}, task_type="worker", task_index=0), 0.0)


def started() -> Runtime | None:
    """Returns the cluster that this process has joined; None before `start`, and with one process."""
    return _started


def _start(runtime: Runtime, start_timeout_s: float, environ: Mapping[str, str]) -> None:
    spec, process, timeout_s = runtime.spec, runtime.process_index, runtime.timeout_s
    jax_processes.check_unused()
    check_own_name(environ)
    runtime._records = exit_status.record_folder(environ)
    host, port = split(spec.coordinator_address)
    identity = Identity(
        process=process,
        addresses=tuple(spec.address if i == process else known for i, known in enumerate(spec.processes)),
        host=host,
        port=watch_port(environ, port),
        token=text(environ, TOKEN) or "",
    )
    bind_address = None
    if process == 0:
        numeric = numeric_address(host, environ)
        if (wrong := check_reachable(host, numeric, spec.processes)) is not None:
            _log.warning("jdist: if other machines take part: %s", wrong)
        check_free(numeric, port)
        bind_address = join(numeric, port)
        runtime._server = WatchServer(
            listen(numeric, identity.port),
            spec.num_processes,
            silence_s=timeout_s,
            start_timeout_s=start_timeout_s,
            token=identity.token,
        )
    try:
        failpoints.reached(Point.BEFORE_CONNECT)
        runtime._watch = runtime._open_watch(identity, start_timeout_s)
        failpoints.reached(Point.AFTER_CONNECT)
        atexit.register(runtime.end)
        failpoints.reached(Point.BEFORE_INIT)
        with runtime.blocked():
            jax_processes.initialize(spec, bind_address, start_timeout_s)
        failpoints.reached(Point.IN_INIT)
        runtime._called_s = time.monotonic()
    except BaseException as exc:
        if isinstance(exc, ClusterTimeoutError):
            exit_status.exit_with_its_code(exc)
        runtime.failed(exit_status.FAILED)  # JAX may be half started, and would wait for the others at the end
        if runtime._watch is not None:
            runtime._watch.close()
        elif runtime._hard_exit is not None:
            runtime._hard_exit.close()
        if runtime._server is not None:
            runtime._server.wait_until_alone(_PARTING_S)
            runtime._server.close()
        raise


@contextlib.contextmanager
def together(what: str, timeout_s: float, cluster: Runtime | None = None) -> Iterator[None]:
    """Brings all processes to the end of the block, or raises one process's error on all."""
    # In the block no process may wait for another. Without `cluster`, the processes are those that
    # this one has joined by the end of the block.
    error = None
    try:
        yield
    except Exception as exc:  # noqa: BLE001 - not swallowed: raised below
        error = exc
    cluster = cluster or started()
    if cluster is not None:
        failure = None if error is None else [f"{error}"[:_MOST_LETTERS], exit_status.of(error)]
        failures = cluster.exchange(what, failure, timeout_s)
        first = next(((process, *each) for process, each in enumerate(failures) if each is not None), None)
        if error is None and first is not None:
            process, text, code = first
            raise PeerFailedError(f"process {process}: {text}", exit_code=code)
    if error is not None:
        raise error
