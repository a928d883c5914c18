"""The locks of a directory of checkpoints: of one save, and of one job from its start to its end.

A disk's are files that the system unlocks however their process ends. An object store has none: there the job that came last
holds the directory, and the one before it commits nothing any more.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from jdist.checkpoint.bucket import BucketPath
from jdist.errors import CheckpointError
from jdist.support.file_lock import hold
from jdist.support.tracebacks import callers_level


@contextlib.contextmanager
def only_writer(directory: Path | BucketPath, timeout_s: float) -> Iterator[None]:
    """Holds the directory's lock: no folder under a hidden name is then a live writer's."""
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(directory, BucketPath):
                stack.enter_context(_only_one_here(directory, timeout_s))
            else:
                stack.enter_context(hold(directory / ".lock", timeout_s=timeout_s))
        except BlockingIOError as error:
            text = f"{directory}: another process saves here and did not end within {timeout_s:g} s"
            raise CheckpointError(text) from error
        yield


_saving: dict[str, threading.Lock] = {}


@contextlib.contextmanager
def _only_one_here(directory: BucketPath, timeout_s: float) -> Iterator[None]:
    """Lets one thread of this process at a time save in a bucket's directory; what other jobs do, `check_held` finds."""
    lock = _saving.setdefault(str(directory), threading.Lock())
    if not lock.acquire(timeout=timeout_s):
        raise BlockingIOError
    try:
        yield
    finally:
        lock.release()


@functools.cache
def _token(process: int) -> str:
    return secrets.token_hex(8)


def take_over(directory: BucketPath) -> bool:
    """Names this process as the one that saves in a bucket's directory; returns whether another was named before, or none."""
    if _holder(directory).get("token") == _token(os.getpid()):
        return False
    (directory / ".job").write_text(json.dumps({"token": _token(os.getpid()), "who": _this_process()}))
    return True


def check_held(directory: BucketPath) -> None:
    """Raises a `CheckpointError` if another job has taken over since: it takes what is not committed for left behind."""
    holder = _holder(directory)
    if holder.get("token", _token(os.getpid())) != _token(os.getpid()):
        raise CheckpointError(
            f"{directory}: {holder.get('who')} has since begun to save here, and a folder of checkpoints belongs to "
            "one job at a time. Stop that job, or give this one another folder. This save was not committed."
        )


def _holder(directory: BucketPath) -> dict[str, str]:
    try:
        return json.loads((directory / ".job").read_text())
    except FileNotFoundError:
        return {}


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


# The locks of this process by directory, and how many Checkpointers hold each.
_claims: dict[str, tuple[IO[str], int]] = {}
_claiming = threading.Lock()


def claim(directory: Path, timeout_s: float) -> Callable[[], None]:
    """Holds a directory for the saves of this process; returns a function that releases it."""
    # The end of the process releases it, too. Several callers of one process share the hold. A
    # forked child does not hold it, so the hold ends with its owner.
    key = os.path.realpath(directory)
    with _claiming:
        handle, count = _claims.get(key, (None, 0))
        handle = handle or _lock_for_job(directory, timeout_s)
        if handle is None:
            return lambda: None
        _claims[key] = handle, count + 1

    def let_go() -> None:
        with _claiming:
            handle, count = _claims.pop(key)
            if count > 1:
                _claims[key] = handle, count - 1
            else:
                handle.close()

    return let_go


def is_claimed(directory: Path) -> bool:
    """Returns whether a process holds a directory for its saves."""
    import fcntl

    if os.path.realpath(directory) in _claims:  # to close a file would end this process's own lock on it
        return True
    try:
        handle = (directory / ".job").open()
    except OSError:
        return False
    with handle:
        try:
            fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EACCES, errno.EAGAIN)
    return False


def _lock_for_job(directory: Path, timeout_s: float) -> IO[str] | None:
    """Locks the directory's file of its job, and names this process in it; None where the file cannot be made."""
    import fcntl

    deadline_s = time.monotonic() + timeout_s
    try:
        handle = (directory / ".job").open("a+")
    except OSError:
        return None  # the next save reports what is wrong with the disk
    while True:
        try:
            # POSIX's, not `flock`: a forked child does not hold it.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                why = f"its file system has no locks ({error.strerror or error})"
                text = f"{directory}: {why}, so nothing keeps a second job from saving here"
                warnings.warn(text, stacklevel=callers_level())
                break
            if time.monotonic() >= deadline_s:
                handle.seek(0)
                who = handle.read().strip() or "another process"
                handle.close()
                raise CheckpointError(
                    f"{directory}: {who} saves here, and a folder of checkpoints belongs to one job at a time. Stop "
                    "that job, wait for it, or give this one another folder."
                ) from error
        time.sleep(0.05)
    with contextlib.suppress(OSError):  # on a full disk the holder stays unnamed
        handle.truncate(0)
        handle.write(_this_process())
        handle.flush()
    return handle
