"""The end of a process: its exit code, the record of a lost process, which launchers read, and ways to end it at once."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from jdist.cluster.address import refused
from jdist.cluster.environment import RECORD_FOLDER
from jdist.errors import (
    CheckpointError,
    ClosureError,
    ClusterTimeoutError,
    JDistError,
    NonFiniteError,
    NoWorkersError,
    OutOfMemoryError,
    PeerFailedError,
    PeerLostError,
    PortInUseError,
    ReplicaDivergenceError,
    ShardLostError,
)
from jdist.support.tracebacks import causes

_log = logging.getLogger(__name__)
FINISHED = 0
FAILED = 1  # training failed: a NaN, replicas that differ, an exception
CANNOT_WRITE = 74  # EX_IOERR of sysexits.h: the disk is full, or may not be written; trying again leads to the same
USAGE = 2  # what was asked for is not right; trying again leads to the same
PEER_LOST = 75  # EX_TEMPFAIL of sysexits.h: another process was lost, failed or did not come; nothing was saved since
INTERRUPTED = 130  # 128 + SIGINT: saved and left
PREEMPTED = 143  # 128 + SIGTERM: saved and left
RECORD = "jdist: peer lost "  # begins the line that programs read, the launcher among them
_LAST_WORDS_S = 2.0  # then a process ends without them: nobody reads the pipe, or the disk is gone
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_LOST = (PeerFailedError, PeerLostError, ClusterTimeoutError, PortInUseError, NoWorkersError, ShardLostError)


def of(error: BaseException) -> int:
    """Maps an error that ends a program to the program's exit code."""
    if isinstance(error, PeerFailedError) and error.exit_code in (USAGE, CANNOT_WRITE):
        return error.exit_code  # then starting again helps nowhere
    if any(isinstance(each, OSError) and each.errno in _NO_ROOM for each in causes(error)):
        return CANNOT_WRITE
    if isinstance(error, _LOST):
        return PEER_LOST
    if isinstance(error, JDistError) and not isinstance(
        error, NonFiniteError | ReplicaDivergenceError | OutOfMemoryError | CheckpointError | ClosureError
    ):
        return USAGE
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def of_uncaught(error: BaseException) -> int:
    """Maps an uncaught exception to an exit code, as `of` but with 1, which is Python's own, in place of `USAGE`."""
    code = of(error)
    return FAILED if code == USAGE else code


_notes: list[str] = []


def unfinished(why: str) -> None:
    """Notes, as a clause, why the program ends before its work is done."""
    _notes.append(why)


def failed(code: int) -> None:
    """Notes, here and in the cluster, that the program ends with an error that it has reported itself."""
    unfinished(f"exit code {code}")
    runtime = sys.modules.get("jdist.cluster.runtime")  # importing it here would start JAX only to end
    if runtime is not None and (cluster := runtime.started()) is not None:
        cluster.failed(code)


def is_finished() -> bool:
    """Returns whether the program's work is done: no note, and no exception has reached the interpreter."""
    return not _notes and getattr(sys, "last_value", None) is None


def is_interactive() -> bool:
    """Returns whether this is a notebook or a Python shell, where an earlier error says nothing of the end."""
    return bool(sys.flags.interactive) or getattr(sys, "ps1", None) is not None


def exit_if_uncaught(error: BaseException | None, code: int) -> None:
    """Ends the process with `code` if `error` has ended the program, where Python itself would exit with 1; for `atexit`."""
    if error is not None and getattr(sys, "last_value", None) is error and not is_interactive():
        leave(code)


def exit_with_its_code(error: BaseException) -> None:
    """Has the process end with an error's code, if that ends the program."""
    atexit.register(exit_if_uncaught, error, of_uncaught(error))


def leave(code: int) -> NoReturn:
    """Ends the process after what it has written is flushed, without the end of the interpreter."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class HardExit:
    """Ends the process from any thread, whatever the other threads hold or wait for."""

    def __init__(self) -> None:
        self._words: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A thread of its own writes the last words, and lines before them. It starts now, because
        # Python starts no thread at the end of a program.
        threading.Thread(target=self._write, name="jdist-last-words", daemon=True).start()

    def exit(self, code: int, *last_words: Callable[[], object]) -> NoReturn:
        """Ends the process after `last_words`, which get 2 s; without JAX's shutdown, which would wait for others."""
        written = threading.Event()
        for words in (*last_words, sys.stdout.flush, sys.stderr.flush, written.set):
            self._words.put(words)
        written.wait(_LAST_WORDS_S)
        os._exit(code)

    def say(self, text: str) -> None:
        """Logs a warning from the thread: the caller's must not wait for a pipe that nobody reads."""
        self._words.put(lambda: _log.warning("jdist: %s", text))

    def close(self) -> None:
        """Ends the thread."""
        self._words.put(None)

    def _write(self) -> None:
        while (words := self._words.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # closed, full, gone: the next may still be written
                words()


def record_folder(environ: Mapping[str, str]) -> Path | None:
    """Makes the folder for records, JDIST_RECORD_DIR; None if that is not set."""
    if not (name := environ.get(RECORD_FOLDER)):
        return None
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise refused(RECORD_FOLDER, name, "a folder that can be written", f"{exc}.") from exc
    return Path(name)


def print_record(lost: PeerLostError, noticed_by: int) -> None:
    """Writes the record to standard error, for people, who read the end first, and programs."""
    lines = []
    for place in lost.places:
        lines.append(f"jdist: process {place['process']}, step {place['step']}: {place['phase']}")
        lines += [f"jdist:     {frame}" for frame in place["stack"]]
    lines += [f"{RECORD}{json.dumps(_record(lost, noticed_by))}", f"jdist: PeerLostError: {lost}"]
    # `print` has a lock, which a blocked thread may hold. The first newline ends a line that another thread has begun.
    os.write(2, ("\n" + "\n".join(lines) + "\n").encode())


def write_record(lost: PeerLostError, noticed_by: int, where: Path) -> None:
    """Writes the record to a file in the folder for records."""
    (where / f"peer_lost_process_{noticed_by}.json").write_text(json.dumps(_record(lost, noticed_by)) + "\n")


def _record(lost: PeerLostError, noticed_by: int) -> dict[str, object]:
    return {
        "error": "PeerLostError",
        "process": lost.process,
        "address": lost.address,
        "last_step": lost.last_step,
        "cause": lost.cause,
        "places": list(lost.places),
        "noticed_by": noticed_by,
        "time": time.time(),
    }
