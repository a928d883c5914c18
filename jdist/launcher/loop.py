"""`Launcher`: a thin shell of processes, pipes and signals round `supervisor`."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import select
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jdist.cluster.environment import NUMBER, RECORD_FOLDER, TOKEN, WORLDS, text
from jdist.cluster.exit_status import PEER_LOST
from jdist.launcher.environment import child_environment
from jdist.launcher.events import (
    Again,
    Asked,
    Command,
    Event,
    Fenced,
    JobEnded,
    Phase,
    Send,
    Settings,
    Start,
    State,
    Tick,
    World,
)
from jdist.launcher.exit_cause import CHIEF, EVALUATOR, WORKER, Attempt, End, Task, cause, failure, summary, verdict
from jdist.launcher.output import Console, LogFile, prefix
from jdist.launcher.process import Host, Process, Stream
from jdist.launcher.record import Record
from jdist.launcher.restarts import Restarts
from jdist.launcher.supervisor import begin, step
from jdist.launcher.worlds import WorldsHost, is_reachable
from jdist.support.xla import COMPILED_VARIABLE

_ROOM_POLL_S = 0.05
_CONSOLE_S = 30.0  # after which a terminal that stands still at the end is given up; the logs have the rest
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_CANNOT_BE_STARTED = 126
_JOINED = range(1_000, 1_000_000)  # numbers of processes that join another launch's job: above those of its own


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The result of a launch."""

    exit_code: int  # see `jdist.cluster.exit_status`, or 128 plus a signal's number
    attempts: tuple[Attempt, ...]
    log_dir: Path  # has attempt_A/process_I.log
    stop: signal.Signals | None = None  # the signal of the user or the time limit
    timed_out: bool = False  # the time limit stopped the launch
    # the guilty process of the last failed attempt, with its traceback or last lines
    failure: str = ""


class Launcher:
    """Runs one launch; `run` may be called once."""

    def __init__(
        self,
        settings: Settings,
        line: Sequence[str],  # program and arguments of each process
        *,
        log_dir: Path,  # exists
        devices_per_process: int | None = None,  # virtual CPU devices; None: JAX's devices
        servers: Sequence[Task] = (),  # run `jdist serve` next to the program, until it ends
        timeout_s: float | None = None,  # then all are asked to stop, as by SIGTERM
        compiled: Path | None = None,  # has JAX's compiled programs, unless the user has chosen a folder
        explains: bool = True,  # prints the cause of a failed attempt at once
        host: Host | None = None,  # None: this machine
    ) -> None:
        self._host = host or Host()
        self._settings, self._line, self._log_dir = settings, line, log_dir
        self._devices, self._timeout_s, self._explains = devices_per_process, timeout_s, explains
        # The job refuses processes with another token, such as those of another user.
        cache = {} if compiled is None else {COMPILED_VARIABLE: str(compiled.absolute())}
        self._environ = {TOKEN: secrets.token_hex(16), **cache, **os.environ}
        self._console, self._prefixes = Console(), _prefixes(settings, servers)
        self._selector = selectors.DefaultSelector()
        self._processes: dict[Task, Process] = {}
        self._stderr: dict[Task, str] = {}
        self._causes: dict[int, str] = {}
        self._events: deque[Event] = deque()
        self._reading: dict[int, tuple[Process, Stream]] = {}
        self._paused = False
        self._servers = Restarts(servers, seed=settings.seed)
        self._worlds: WorldsHost | None = None
        self._worlds_at, self._first_number = (
            settings.join,
            random.SystemRandom().choice(_JOINED) if settings.join else 0,
        )
        self._cluster: dict[str, list[str]] = {}
        self._attempt = 0
        self._signals = self._others = -1
        self._timeout_at: float | None = None
        self._timed_out, self._failure = False, ""
        self._record = Record(log_dir, self._say)

    def run(self, what: str) -> Launched:
        """Runs the launch, called `what` in its first line, to its end; no process is left, also after an exception."""
        try:
            self._say(f"{what}; logs: {self._log_dir}")
            self._record.add("launch", command=list(self._line), max_restarts=self._settings.max_restarts)
            state = self._run()
            self._record.add("done", code=state.exit_code)
            self._say(summary(state.history, self._causes))
            if self._explains and (guilty := state.history[-1].guilty) is not None:
                self._say(verdict(state.history[-1], guilty, self._stderr.get(guilty.task, "")))
        finally:
            self._console.close(_CONSOLE_S)
        assert state.exit_code is not None
        return Launched(
            exit_code=state.exit_code,
            attempts=state.history,
            log_dir=self._log_dir,
            stop=state.stop,
            timed_out=self._timed_out,
            failure=self._failure,
        )

    def _run(self) -> State:
        with self._selector, _signals() as (self._signals, self._others):
            self._selector.register(self._signals, selectors.EVENT_READ, "signals")
            try:
                began = time.monotonic()
                self._timeout_at = None if self._timeout_s is None else began + self._timeout_s
                state, commands = begin(self._settings, began)
                self._obey(commands)
                while state.phase is not Phase.DONE:
                    if not self._events:
                        self._wait(state)
                    while self._events:
                        state, commands = step(state, self._events.popleft())
                        self._obey(commands)
            finally:
                for process in self._processes.values():
                    process.transport.control.close()  # all guards at once, before any is waited for
                for process in self._processes.values():
                    process.abandon()
                self._close_worlds()
        return state

    def _say(self, text: str) -> None:
        """Writes to the user, on standard error."""
        lines = "".join(f"[launch] {line}\n" for line in text.splitlines())
        self._console.write(sys.stderr, lines.encode(errors="backslashreplace"))

    def _wait(self, state: State) -> None:
        """Waits until something comes or is due, and handles it."""
        self._pause_if_full()
        times = [at for at in (state.due, self._servers.next_at, self._timeout_at) if at is not None]
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        if self._paused:
            timeout = _ROOM_POLL_S if timeout is None else min(timeout, _ROOM_POLL_S)
        for key, _ in self._selector.select(timeout):
            if key.data == "signals":
                self._hear(os.read(self._signals, 64))
            elif key.data == "worlds":
                self._hear_worlds()
            elif isinstance(key.data, Process):
                if key.data.transport.is_gone():
                    self._gone(key.data)
            elif key.fd in self._reading:  # not if its process has just gone
                process, stream = self._reading[key.fd]
                if not process.read(stream, time.monotonic()):
                    self._stop_reading(key.fd)
        self._start_servers()
        if self._timeout_at is not None and time.monotonic() >= self._timeout_at:
            self._timeout_at, self._timed_out = None, True
            self._say(f"not over after {self._timeout_s:g} s")
            self._events.append(Asked(at=time.monotonic(), signal=signal.SIGTERM))
        if state.due is not None and time.monotonic() >= state.due:
            self._events.append(Tick(at=time.monotonic()))

    def _is_asked(self) -> bool:
        """Takes in the signals that have come; returns whether the user has asked to stop."""
        if select.select([self._signals], [], [], 0)[0]:
            self._hear(os.read(self._signals, 64))
        return any(isinstance(event, Asked) for event in self._events)

    def _hear(self, numbers: bytes) -> None:
        """Takes in signals; passes the numbers of those that are not the launcher's on."""
        for number in numbers:
            if number == signal.SIGHUP:  # a terminal that closes asks for the same as SIGTERM
                number = signal.SIGTERM
            if number in (signal.SIGINT, signal.SIGTERM):
                self._record.add("signal", signal=signal.Signals(number).name)
                self._events.append(Asked(at=time.monotonic(), signal=signal.Signals(number)))
            elif self._others != -1:
                with contextlib.suppress(OSError):  # full
                    os.write(self._others, bytes([number]))

    def _hear_worlds(self) -> None:
        """Takes in the news of the job's worlds."""
        if self._worlds is None or self._worlds.pipe not in self._selector.get_map():
            return
        events, may_follow = self._worlds.read()
        for event in events:
            if isinstance(event, World):
                numbers = sorted(event.numbers)
                self._record.add("world", attempt=self._attempt, generation=event.generation, numbers=numbers)
            elif isinstance(event, Fenced):
                self._record.add("lost", attempt=self._attempt, number=event.number)
        self._events.extend(events)
        if not may_follow:
            self._selector.unregister(self._worlds.pipe)

    def _open_worlds(self) -> None:
        """Starts the host of an attempt's worlds."""
        if not self._settings.goes_on or self._settings.join is not None:
            return
        log = self._log_dir / f"attempt_{self._attempt}" / "host.log"
        self._worlds = WorldsHost(self._settings, self._host.address, self._environ, log)
        self._worlds_at = self._worlds.address(self._is_asked)
        self._selector.register(self._worlds.pipe, selectors.EVENT_READ, "worlds")
        token = f"with the same {TOKEN}" if text(os.environ, TOKEN) else f"if this launch is given a {TOKEN}"
        self._say(f"other launches may join by --join {self._worlds_at}, {token}")

    def _close_worlds(self) -> None:
        """Ends the host of an attempt's worlds."""
        if self._worlds is not None:
            if self._worlds.pipe in self._selector.get_map():
                self._selector.unregister(self._worlds.pipe)
            self._worlds.close()
            self._worlds = None

    def _gone(self, process: Process) -> None:
        self._hear_worlds()  # it ended after them
        self._selector.unregister(process.transport.control)
        for stream in process.streams:
            self._stop_reading(stream.pipe)
        code, at = process.finish(time.monotonic())
        self._record.add("end", at=at, attempt=self._attempt, process=process.task.label, code=code)
        del self._processes[process.task]
        self._stderr[process.task] = process.stderr
        if process.log.problem is not None:
            self._say(f"the log {process.log.path} is not whole: {process.log.problem}")
        end = End(at=at, task=process.task, code=code)
        if (host := self._settings.join) is not None and code == PEER_LOST and not is_reachable(host):
            self._events.append(JobEnded(at=at, why=f"its host at {host} has ended"))
        if not process.task.serves:
            self._events.append(end)
        elif text := self._servers.ended(process.task, code, time.monotonic()):
            why = cause(process.stderr, killed=end.was_killed)
            self._say(f"{text}; its log: {process.log.path}" + (f"\n  {why}" if why else ""))

    def _obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Start):
                self._start(command)
            elif isinstance(command, Again):
                try:
                    self._spawn(command.task, self._line)
                except OSError as exc:
                    self._say(f"{command.task} cannot be started: {exc}")
                    self._events.append(End(at=time.monotonic(), task=command.task, code=_CANNOT_BE_STARTED))
            elif isinstance(command, Send):
                for task in command.tasks & self._processes.keys():
                    self._processes[task].transport.send(command.signal)
            elif isinstance(command, str):
                self._say(command)
            else:
                self._close_worlds()
                if command.guilty is not None:
                    self._report(command)

    def _start(self, command: Start) -> None:
        self._stderr.clear()
        self._attempt = command.attempt
        self._record.add("attempt", attempt=command.attempt, processes=len(command.tasks))
        try:
            self._choose_ports(command.tasks)
            self._open_worlds()
            self._servers.attempt()
            self._start_servers()
            for task in command.tasks:
                self._spawn(task, self._line)
        except OSError as exc:
            self._say(f"attempt {command.attempt} cannot be started: {exc}")
            asked = next((event.signal for event in self._events if isinstance(event, Asked)), None)
            code = _CANNOT_BE_STARTED if asked is None else 128 + asked
            for task in command.tasks:
                if task not in self._processes:
                    self._events.append(End(at=time.monotonic(), task=task, code=code))

    def _choose_ports(self, tasks: Sequence[Task]) -> None:
        """Chooses new ports for each attempt; servers keep theirs, and so does their chief."""
        if self._cluster and self._servers.tasks:
            return
        named = [task for task in (*tasks, *self._servers.tasks) if task.type != EVALUATOR]
        self._cluster = {}
        for task, address in zip(named, self._host.place(named, self._is_asked), strict=True):
            self._cluster.setdefault(task.type, []).append(address)

    def _start_servers(self) -> None:
        for task in self._servers.due(time.monotonic()):
            line = [sys.executable, "-m", "jdist", "serve"]
            script = next(iter(self._line[1:]), "")
            if task.type == WORKER and script.endswith(".py") and Path(script).is_file():
                line += ["--script", script]  # for dataset functions of the program itself
            try:
                self._spawn(task, line)
            except OSError as exc:
                text = self._servers.ended(task, PEER_LOST, time.monotonic())
                self._say(f"{text}: {exc}")

    def _spawn(self, task: Task, line: Sequence[str]) -> None:
        attempt = self._attempt
        log = self._log_path(task, attempt)
        environ = {RECORD_FOLDER: str(log.parent.absolute()), **self._environ}
        environ = child_environment(environ, task, self._cluster, attempt=attempt, devices_per_process=self._devices)
        if self._worlds_at is not None:
            environ |= {WORLDS: self._worlds_at, NUMBER: str(self._first_number + task.index)}
        transport = self._host.start(task, line, environ)
        process = Process(task, transport, log=LogFile(log), prefixes=self._prefixes[task], console=self._console)
        self._processes[task] = process
        self._record.add("process", attempt=attempt, process=task.label)
        self._selector.register(process.transport.control, selectors.EVENT_READ, process)
        for stream in process.streams:
            self._reading[stream.pipe] = process, stream
            if not self._paused:
                self._selector.register(stream.pipe, selectors.EVENT_READ)

    def _log_path(self, task: Task, attempt: int) -> Path:
        if task.serves:
            return self._log_dir / "servers" / f"{task.type}_{task.index}.log"
        return self._log_dir / f"attempt_{attempt}" / f"{'process_' if task.type == WORKER else ''}{task.label}.log"

    def _report(self, attempt: Attempt) -> None:
        assert attempt.guilty is not None
        task = attempt.guilty.task
        stderr = self._stderr.get(task, "")
        self._causes[attempt.number] = cause(stderr, killed=attempt.guilty.was_killed)
        self._failure = failure(attempt, lambda each: self._log_path(each, attempt.number), stderr)
        if self._explains:
            self._say(self._failure)

    def _pause_if_full(self) -> None:
        """Stops reading output while too much of it waits to be shown, so that the processes wait, too."""
        if self._console.is_full == self._paused:
            return
        self._paused = not self._paused
        for pipe in self._reading:
            if self._paused:
                self._selector.unregister(pipe)
            else:
                self._selector.register(pipe, selectors.EVENT_READ)

    def _stop_reading(self, pipe: int) -> None:
        if self._reading.pop(pipe, None) is not None and not self._paused:
            self._selector.unregister(pipe)


def _prefixes(settings: Settings, servers: Sequence[Task]) -> dict[Task, tuple[bytes, bytes]]:
    """Makes the prefixes of each process's lines on standard output and on standard error."""
    tasks = [Task(CHIEF if settings.chief else WORKER, index) for index in range(settings.largest + settings.spares)]
    if settings.evaluator:
        tasks.append(Task(EVALUATOR, 0))
    return {
        task: (prefix(task.label, sys.stdout, colour), prefix(task.label, sys.stderr, colour))
        for task, colour in zip([*tasks, *servers], itertools.cycle(_COLOURS), strict=False)
    }


@contextlib.contextmanager
def _signals() -> Iterator[tuple[int, int]]:
    """Opens a pipe for SIGINT, SIGTERM and SIGHUP; yields `(reader, descriptor of others)`."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    in_main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGINT, signal.SIGTERM] if in_main else []
    if in_main and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else nohup has turned it off
        numbers.append(signal.SIGHUP)
    # The interpreter writes the number, whichever thread takes the signal: a Python handler would
    # wait for the main thread, which waits for the pipe. No signals arrive outside of that thread.
    woken_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if in_main else -1
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    try:
        yield reader, woken_before
    finally:
        if in_main:
            signal.set_wakeup_fd(woken_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
