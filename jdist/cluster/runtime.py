"""This process in its cluster: JAX's runtime started, the other processes watched."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax

from jdist.cluster import exit_codes
from jdist.cluster.address import join, split
from jdist.cluster.environment import number, text
from jdist.cluster.refuse import refused
from jdist.cluster.spec import ClusterSpec
from jdist.cluster.watch.exchanges import Exchanges
from jdist.cluster.watch.hub import Hub
from jdist.cluster.watch.switchboard import Switchboard
from jdist.cluster.watch.watch import Place, Watch
from jdist.errors import ClusterError, PeerLostError

_SAME_ERROR_S = 2.0  # processes that meet the same error end so far apart from each other at most
WATCH_PORT, TOKEN, RECORDS = "JDIST_WATCH_PORT", "JDIST_TOKEN", "JDIST_RECORD_DIR"


class Runtime:
    """The processes of a synchronous job, seen from one of them; `start` makes it.

    Attributes:
        spec: the cluster.
        timeout_s: a process that is not heard of for so long is lost.
    """

    def __init__(self, spec: ClusterSpec, watch: Watch | None, switchboard: Switchboard | None, timeout_s: float):
        self.spec, self.timeout_s = spec, timeout_s
        self._watch, self._switchboard = watch, switchboard
        self._step = 0
        self._exchanges: dict[str, int] = {}  # how many there were of each name
        self._stopping: str | None = None
        self._failed: int | None = None

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

    def advance(self, steps: int) -> None:
        """Notes that so many steps more were started."""
        self.at_step(self._step + steps)

    def exchange(self, what: str, value: Any, timeout_s: float) -> list[Any]:
        """What every process says about something, by index.

        Args:
            what: names it in errors; the same on all. Exchanges of one name are to be asked for in one order by all.
            value: what this process says; what JSON can hold.
            timeout_s: how long to wait for the others.

        Raises:
            ClusterError: not all said theirs in time.
        """
        if self._watch is None:
            return [value]
        with _lock:
            number = self._exchanges[what] = self._exchanges.get(what, 0) + 1
        return self._watch.exchange(f"{what} ({number})", value, timeout_s)

    @property
    def exchanges(self) -> Exchanges | None:
        """What `exchange` goes through, for those that wait in their own way; None with one process."""
        return None if self._watch is None else self._watch.exchanges

    def wish_to_stop(self, reason: str) -> None:
        """Asks all processes to stop after the same step."""
        if self._watch is None:
            self._stopping = self._stopping or reason
        else:
            self._watch.wish_to_stop(reason)

    def stops_after(self, step: int, timeout_s: float) -> bool:
        """Whether all processes stop now, after `step` steps; all have to ask after the same steps."""
        if self._watch is None:
            return self._stopping is not None
        return self._watch.stops_after(step, timeout_s)

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Round what waits for other processes. An error of the runtime is explained by the loss of one, if it was that."""
        if self._watch is None:
            yield
            return
        try:
            with self._watch.blocked():
                yield
        except jax.errors.JaxRuntimeError as exc:
            lost = self._watch.wait_for_loss(self.timeout_s + 1)
            if lost is not None:
                raise lost from exc
            raise

    def failed(self, code: int) -> None:
        """Notes that this program ends with an error that it has reported itself."""
        self._failed = code

    def end(self) -> None:
        """Leaves the cluster: at the end of the program, together with the others; after an error of its own, without."""
        if self._watch is None:
            return
        code = self._failed
        if code is None and getattr(sys, "last_value", None) is not None:  # Python has shown a traceback
            code = exit_codes.FAILED
        if code is not None and not self._all_failed(code):
            # The others learn at once that this process is gone. JAX would wait minutes for them here.
            self._watch.close()
            if self._switchboard is not None:
                self._switchboard.close()
            logging.shutdown()
            leave(code)
        self._watch.say_bye()
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the others are gone already
            jax.distributed.shutdown()
        self._watch.close()
        if self._switchboard is not None:
            self._switchboard.close()

    def _all_failed(self, code: int) -> bool:
        """Whether all others end with an error as well: often the same one, and then none of them is lost to another."""
        try:
            self.exchange("an end with an error", code, min(_SAME_ERROR_S, self.timeout_s / 5))
        except ClusterError:
            return False
        return True


_lock = threading.Lock()
_started: Runtime | None = None


def start(spec: ClusterSpec, *, timeout_s: float, start_timeout_s: float) -> Runtime:
    """Brings this process into its cluster; a second call with the same cluster gives the same.

    Args:
        spec: the cluster.
        timeout_s: a process that is not heard of for so long is lost; this one then ends, with exit code 75.
        start_timeout_s: how long to wait until all processes have come.

    Raises:
        ClusterError: not all came in time, JAX has been used already, or this process is in another cluster.
        ClusterConfigError: a port is not allowed or taken, or `spec` is of a ps or an evaluator.
    """
    global _started
    with _lock:
        if _started is not None:
            if (spec.jobs, spec.process_index) != (_started.spec.jobs, _started.process_index):
                raise ClusterError(
                    f"this process is in a cluster already ({_started.spec}) and cannot join another ({spec}). Start it again."
                )
            return _started
        if spec.num_processes == 1:
            _started = Runtime(spec, None, None, timeout_s)
            return _started
        _started = _start(spec, timeout_s, start_timeout_s, os.environ)
        atexit.register(_started.end)
        return _started


def alone() -> Runtime:
    """A job of this process alone, which belongs to no cluster."""
    return Runtime(ClusterSpec(jobs={"worker": (None,)}, task_type="worker", task_index=0), None, None, 0.0)


def started() -> Runtime | None:
    """The cluster that this process is in; None before `start`."""
    return _started


def _start(spec: ClusterSpec, timeout_s: float, start_timeout_s: float, environ: Mapping[str, str]) -> Runtime:
    if jax.distributed.is_initialized():
        raise ClusterError(
            "`jax.distributed.initialize` was called already. Leave it out: `jdist.multi_worker()` calls it, after it has "
            "found all processes."
        )
    host, port = split(spec.coordinator_address)
    watch_port = watch_port_of(spec, environ)
    token = text(environ, TOKEN) or ""
    deadline_s = time.monotonic() + start_timeout_s
    switchboard, process = None, spec.process_index
    if process == 0:
        server = _listen(host, watch_port)
        hub = Hub(count=spec.num_processes, silence_s=timeout_s)
        switchboard = Switchboard(server, hub, token, min(1.0, timeout_s / 5))
    place = Place(
        process=process, count=spec.num_processes, address=spec.address, host=host, port=watch_port, token=token
    )
    try:
        watch = Watch(
            place,
            start_timeout_s=start_timeout_s,
            silence_s=timeout_s,
            on_lost=functools.partial(_end_with, process),
            missing=lambda: [] if switchboard is None else switchboard.missing,
        )
    except ClusterError:
        if switchboard is not None:
            switchboard.close()
        raise
    runtime = Runtime(spec, watch, switchboard, timeout_s)
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # JAX would catch SIGTERM for its own agreement on a step, and a program that does not ask for it would never end.
        jax.config.update("jax_enable_preemption_service", False)
        with runtime.blocked():
            jax.distributed.initialize(
                coordinator_address=spec.coordinator_address,
                num_processes=spec.num_processes,
                process_id=process,
                local_device_ids=None if spec.local_device_ids is None else list(spec.local_device_ids),
                # Else JAX looks at Slurm's variables again, and takes one of a task's GPUs.
                cluster_detection_method="deactivate",
                initialization_timeout=max(1, round(deadline_s - time.monotonic())),
                coordinator_bind_address=join(_resolved(host), port) if process == 0 else None,
            )
    except BaseException as exc:
        watch.close()
        if switchboard is not None:
            switchboard.close()
        if isinstance(exc, RuntimeError) and "before any JAX" in str(exc):
            raise ClusterError(
                "JAX has started its devices already, without the other processes. Call `jdist.multi_worker()` before anything "
                "computes with JAX or asks for its devices."
            ) from exc
        raise
    return runtime


def watch_port_of(spec: ClusterSpec, environ: Mapping[str, str]) -> int:
    """The port on process 0's host by which the processes watch each other.

    Raises:
        ClusterConfigError: JDIST_WATCH_PORT is no port, or that of JAX's coordinator.
    """
    _, port = split(spec.coordinator_address)
    found = number(environ, WATCH_PORT, "Leave it out for the port after the coordinator's.", least=1) or port + 1
    if found > 65535 or found == port:
        raise refused(
            WATCH_PORT,
            str(found),
            f"a port from 1 to 65535 that is not the coordinator's, {port}",
            f"jdist watches its processes on a port of its own, by default the one after {port}.",
        )
    return found


def _resolved(host: str) -> str:
    """The numeric address of a host.

    Raises:
        ClusterError: there is no such host.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as exc:
        raise ClusterError(f"the host {host!r} of process 0 has no address ({exc}). Is the name right?") from exc


def _listen(host: str, port: int) -> socket.socket:
    """A socket on an address of this machine; on that alone, not on every interface."""
    address = _resolved(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as exc:
        raise ClusterError(
            f"process 0 cannot listen on {join(address, port)}, where jdist watches the processes: {exc}. The coordinator's "
            f"host must be an address of process 0's machine; for another port set {WATCH_PORT} on all processes."
        ) from exc


def _end_with(own: int, lost: PeerLostError) -> None:
    """Records that a process was lost, and ends this one, number `own`: its main thread may be blocked for ever."""
    record = {
        "error": "PeerLostError",
        "process": lost.process,
        "address": lost.address,
        "last_step": lost.last_step,
        "cause": lost.cause,
        "noticed_by": own,
        "time": time.time(),
    }
    # Not by print: the main thread may hold the lock of its buffer.
    os.write(2, f"jdist: PeerLostError: {lost}\njdist: peer lost {json.dumps(record)}\n".encode())
    folder = os.environ.get(RECORDS)
    if folder:
        with contextlib.suppress(OSError):  # said on stderr already
            Path(folder, f"peer_lost_process_{own}.json").write_text(json.dumps(record))
    leave(exit_codes.PEER_LOST)


def leave(code: int) -> NoReturn:
    """Ends the process now, without JAX's own farewell, which waits for the others."""
    for stream in (sys.stdout, sys.stderr):
        flusher = threading.Thread(target=_flush, args=(stream,), daemon=True)
        flusher.start()
        flusher.join(1.0)  # whoever holds its lock may be blocked
    os._exit(code)


def _flush(stream: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
