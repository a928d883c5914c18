"""`preemption`: all processes stop after the same step, save, and leave with one exit code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from jdist.cluster import exit_status
from jdist.cluster.runtime import Runtime, alone
from jdist.errors import ClusterError
from jdist.support import checks

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_SIGNAL_S = 1.0  # a scheduler may signal both a launcher, which passes it on, and what it launched
_WATCHER = "the watcher"
_handlers: list[dict[signal.Signals, Any]] = []  # the handlers that each open block has replaced, the outermost first


class Preemption:
    """The wish to stop of a job's processes, as one of them sees it; `preemption` makes it."""

    def __init__(
        self,
        cluster: Runtime,
        grace_s: float,
        save: Callable[[int], object] | None,
        exit_code: int | None,
        poll_s: float,
        second: Literal["end", "raise"],
    ):
        self._cluster, self._grace_s, self._save = cluster, grace_s, save
        self._exit_code, self._poll_s, self._second = exit_code, poll_s, second
        self._interrupts = False
        self._first: tuple[int, float] | None = None  # the first signal, and when it came
        self._notice: tuple[str, float] | None = None  # why to stop, and from when on
        self._problem: Exception | None = None
        self._stopped = False
        self._closed = threading.Event()

    @property
    def reason(self) -> str | None:
        """Names who asked: "SIGTERM", "SIGINT" or "the watcher"; None as long as nobody has."""
        return self._cluster.asked_to_end

    @property
    def exit_code(self) -> int:
        """The code to leave with, the same on all processes; 0 as long as nobody has asked."""
        if self.reason is None:
            return exit_status.FINISHED
        if self._exit_code is not None:
            return self._exit_code
        return exit_status.INTERRUPTED if self.reason == "SIGINT" else exit_status.PREEMPTED

    def stops_after(self, step: int, part: int = 0) -> bool:
        """Returns whether all processes stop now, after `step` steps; if so, it has called `save`, and raises its errors."""
        # All processes ask at the same places. `part` counts within long work between two steps, such
        # as the batches of an evaluation; it is 0 before the first. Asking is cheap until somebody stops.
        if self._problem is not None:
            raise self._problem
        if self._stopped or not self._cluster.stops_after(step, part):
            return self._stopped
        if self._cluster.goes_on():
            return True
        self._stopped = True
        exit_status.unfinished(f"stopped by {self.reason}")
        if self._save is not None:
            self._save(step)
        return True

    def _listen(self, reader: int, forward: int) -> None:
        """Reads signals and the watcher's notice, and asks all to stop once the grace is over; in a thread."""
        has_asked = False
        while not self._closed.is_set():
            patience_s = None
            if self._notice is not None and not has_asked:
                patience_s = self._notice[1] - time.monotonic()
                if patience_s <= 0:
                    has_asked, patience_s = True, None
                    self._cluster.wish_to_stop(self._notice[0])
            if select.select([reader], [], [], patience_s)[0]:
                data = os.read(reader, 4096)
                if forward != -1:
                    with contextlib.suppress(OSError):
                        os.write(forward, data)
                for number in data:
                    if number in _SIGNALS:
                        self._signalled(number)

    def _poll(self, watcher: Callable[[], bool], writer: int) -> None:
        """Polls the watcher, in a thread of its own, as a call may take long."""
        while not self._closed.wait(self._poll_s):
            try:
                if not watcher():
                    continue
                self._ask(_WATCHER)
            except Exception as exc:  # noqa: BLE001 - not swallowed: raised in the program, by `stops_after`
                self._problem = exc
            _wake(writer)
            return

    def _signalled(self, number: int) -> None:
        now_s = time.monotonic()
        if self._first is None:
            self._first = number, now_s
            self._ask(signal.Signals(number).name)
        elif self._second == "raise" and number == self._first[0] == signal.SIGINT:
            if now_s - self._first[1] > _SAME_SIGNAL_S and not self._interrupts:
                self._interrupts = True
                # Its handler may have run already.
                signal.pthread_kill(threading.main_thread().ident or 0, number)
        elif number != self._first[0] or now_s - self._first[1] > _SAME_SIGNAL_S:
            # Python's `signal.signal` is for the main thread alone, which may be waiting in XLA.
            ctypes.CDLL(None).signal(number, 0)
            os.kill(os.getpid(), number)

    def _handle(self, number: int, frame: object) -> None:
        """Handles a signal in the main thread, in place of its default, which ends the process."""
        if self._interrupts:
            self._interrupts, self._first = False, None
            raise KeyboardInterrupt

    def _ask(self, reason: str) -> None:
        if self._notice is None:
            self._notice = reason, time.monotonic() + self._grace_s


@contextlib.contextmanager
def preemption(
    cluster: Runtime | None = None,
    *,
    watcher: Callable[[], bool] | None = None,
    grace_s: float = 0.0,
    save: Callable[[int], object] | None = None,
    exit_code: int | None = None,
    poll_s: float = 1.0,
    second: Literal["end", "raise"] = "end",
) -> Iterator[Preemption]:
    """Stops a training loop after the same step on all processes, and saves, once one of them is asked to stop.

    While the block runs, SIGTERM and SIGINT ask to stop. The same signal again within a second counts once; a later one
    ends the process at once, or see `second`. Outside the main thread signals are left alone, and only the watcher counts.

    Args:
        cluster: the job's processes, `strategy.cluster`; None: this one alone.
        watcher: called from a thread every `poll_s`; returns whether the machine is about to be taken away.
        grace_s: how long training goes on after a notice, in seconds, before all stop.
        save: called with the step on every process where all stop.
        exit_code: the code to leave with; None: 143 after SIGTERM or the watcher, 130 after SIGINT.
        poll_s: seconds between two calls of the watcher.
        second: what a later SIGINT does: "end" the process at once; or "raise" KeyboardInterrupt in it as soon as Python
            can, for a process that lives on, such as a notebook's.

    Yields:
        A `Preemption`: ask it `stops_after(step)` after every step.

    Raises:
        ClusterError: a number is not allowed.

    Example:
        >>> import os, signal, jdist
        >>> saved = []
        >>> with jdist.cluster.preemption(save=saved.append) as stop:
        ...     for step in range(10_000_000):
        ...         if step == 3:
        ...             os.kill(os.getpid(), signal.SIGTERM)
        ...         if stop.stops_after(step):
        ...             break
        >>> saved == [step], stop.exit_code
        (True, 143)

    Source: `tf.distribute.experimental.PreemptionCheckpointHandler` and `TerminationConfig`
    """
    checks.seconds("grace_s", grace_s, ClusterError, least=0)
    checks.seconds("poll_s", poll_s, ClusterError, least=0.01)
    if exit_code is not None:
        checks.whole_number("exit_code", exit_code, ClusterError, least=0, most=255)
    # Of a process alone a wish to stop ends with this block: its strategy may train again.
    runtime = alone() if cluster is None or cluster.is_alone else cluster
    stop = Preemption(runtime, grace_s, save, exit_code, poll_s, second)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    in_main = threading.current_thread() is threading.main_thread()
    # The interpreter writes a signal's number at once; a Python handler waits for the main thread.
    before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if in_main else -1
    before: dict[signal.Signals, Any] = {each: signal.signal(each, stop._handle) for each in _SIGNALS if in_main}
    _handlers.append(before)
    threads = [threading.Thread(target=stop._listen, args=(reader, before_fd), name="jdist-preemption", daemon=True)]
    if watcher is not None:
        poll = threading.Thread(target=stop._poll, args=(watcher, writer), name="jdist-preemption", daemon=True)
        threads.append(poll)
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        if in_main:
            signal.set_wakeup_fd(before_fd)
        for each, handler in before.items():
            signal.signal(each, handler)
        _handlers.remove(before)
        stop._closed.set()
        _wake(writer)
        for thread in threads:
            thread.join(2.0)
        if not any(thread.is_alive() for thread in threads):  # a watcher may hang
            os.close(reader)
            os.close(writer)


def _wake(writer: int) -> None:
    with contextlib.suppress(BlockingIOError):  # full: it is awake
        os.write(writer, b"\0")


def _forked() -> None:
    """Restores the handlers in a forked child, such as a data loader's: signals end it, and the job goes on."""
    replaced = next(filter(None, _handlers), None)
    if replaced is not None:
        signal.set_wakeup_fd(-1)  # the pipe is its parent's
        for each, handler in replaced.items():
            signal.signal(each, handler)


os.register_at_fork(after_in_child=_forked)
