"""Folders of checkpoints: their names, commit, checks and removal, and the locks of the directory that they are in."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jdist.cluster.runtime import Runtime, together
from jdist.errors import CheckpointError, ClusterError
from jdist.support.file_lock import hold

FORMAT = 2  # 1 is read as well, see pieces.py
NAME = re.compile(r"step_(\d{8,})_save_(\d{5,})")
OURS = re.compile(r"manifest\.json|arrays|pieces_\d+(\.bin)?|part_\d+\.json")  # the files of a checkpoint
UNFINISHED = re.compile(r"\.(?:saving|deleting)_" + NAME.pattern)


class Damaged(CheckpointError):
    """A checkpoint cannot be read; an older one may be."""


def step_of(path: Path) -> int:
    """Reads the step from a checkpoint folder's name."""
    return int(path.name.split("_")[1])


def number_of(path: Path) -> int:
    """Reads the number of the save from a checkpoint folder's name."""
    return int(path.name.split("_")[3])


def list_committed(directory: Path) -> list[Path]:
    """Lists committed checkpoints in the order of saving."""
    return sorted((path for path in directory.iterdir() if NAME.fullmatch(path.name)), key=number_of)


def next_number(directory: Path) -> int:
    """Finds a number that no save in the directory has had."""
    matches = (NAME.search(path.name) for path in directory.iterdir())
    return 1 + max((int(match[2]) for match in matches if match), default=0)


def is_ours_alone(path: Path) -> bool:
    """Whether a folder holds nothing but a checkpoint's files."""
    return path.is_dir() and not path.is_symlink() and all(OURS.fullmatch(p.name) for p in path.iterdir())


def remove(path: Path) -> None:
    """Removes a checkpoint: first its name, so that a kill leaves no half checkpoint."""
    if is_ours_alone(path):
        shutil.rmtree(path.rename(path.with_name(f".deleting_{path.name}")))


def sweep(directory: Path) -> list[Path]:
    """Removes what killed processes left; returns folders with such a name that hold something else."""
    strangers: list[Path] = []
    # Another process may be saving, or the disk be read-only: then there is nothing to clean up.
    with contextlib.suppress(OSError, CheckpointError), only_writer(directory, timeout_s=0.0):
        for path in sorted(directory.iterdir()):
            if UNFINISHED.fullmatch(path.name):
                if is_ours_alone(path):
                    shutil.rmtree(path)
                else:
                    strangers.append(path)
    return strangers


@contextlib.contextmanager
def only_writer(directory: Path, timeout_s: float) -> Iterator[None]:
    """Holds the directory's lock: no folder under a hidden name is then a live writer's."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(directory / ".lock", timeout_s=timeout_s))
        except BlockingIOError as error:
            text = f"{directory}: another process saves here and did not end within {timeout_s:g} s"
            raise CheckpointError(text) from error
        yield


# The locks of this process by directory, and how many Checkpointers hold each.
_claims: dict[str, tuple[IO[str], int]] = {}
_claiming = threading.Lock()


def claim(directory: Path, timeout_s: float) -> Callable[[], None]:
    """Holds a directory for the saves of this process; returns a function that lets go, as the end of the process does.

    Several callers of one process hold it together. A forked child does not hold it, so it outlives no parent.

    Raises:
        CheckpointError: another process holds it, and still does after `timeout_s`; says which.
    """
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
                why = f"its file system has no locks ({describe_error(error)})"
                text = f"{directory}: {why}, so nothing keeps a second job from saving here"
                warnings.warn(text, stacklevel=2)
                break
            if time.monotonic() >= deadline_s:
                handle.seek(0)
                who = handle.read().strip() or "another process"
                handle.close()
                raise CheckpointError(
                    f"{directory}: {who} saves here, and a folder of checkpoints is one job's from its start to its end. "
                    "Stop that job, wait for it, or give this one another folder."
                ) from error
        time.sleep(0.05)
    with contextlib.suppress(OSError):  # on a full disk the holder stays unnamed
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}")
        handle.flush()
    return handle


_FOREIGN_FILES = re.compile(
    r"checkpoint(_\d+)?|.*\.(keras|h5|ckpt|index|pt|pth|safetensors|msgpack|orbax)|saved_model\.pb|_CHECKPOINT_METADATA|_METADATA"
)
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "checkpoint", "default")


def list_foreign(directory: Path) -> list[str]:
    """Lists what looks like a checkpoint of another library in a directory: of Orbax, flax, Keras and others."""

    def is_foreign(path: Path) -> bool:
        if path.is_dir():
            return not NAME.fullmatch(path.name) and any((path / name).exists() for name in _ORBAX)
        return _FOREIGN_FILES.fullmatch(path.name) is not None

    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(".") and is_foreign(path))


def check_room(folder: Path, needed_bytes: int) -> None:
    """Refuses early: a save that fills the disk on its way to failing would take others' writes down with it."""
    room = shutil.disk_usage(folder)
    if room.total and room.free < needed_bytes:  # some file systems report nothing at all
        text = f"{os.strerror(errno.ENOSPC)}: {needed_bytes:,} bytes needed, {room.free:,} free"
        raise OSError(errno.ENOSPC, text, str(folder))


def file_crc32(path: Path) -> int:
    """Computes the crc32 of a file's bytes."""
    crc32 = 0
    with path.open("rb", buffering=0) as handle:
        while block := handle.read(1 << 20):
            crc32 = zlib.crc32(block, crc32)
    return crc32


def fsync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(part: Path, path: Path) -> None:
    """Gives a finished folder its name: from here on the checkpoint exists."""
    part.rename(path)
    fsync(path.parent)


def describe_error(error: BaseException) -> str:
    """Describes an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    text = str(error).strip()
    if isinstance(error, ClusterError):
        return text
    return f"{type(error).__name__}: {text if len(text) <= 400 else f'{text[:200]} ... {text[-200:]}'}"


def to_plain_json(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a value to JSON and back; refuses one that this changes."""
    value = dict(value)
    try:
        same = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"`{name}` cannot be saved as JSON: {error}. It is {value!r}") from error
    if same != value:
        text = "JSON would change it (a tuple to a list, a key to a string, or a NaN)"
        raise CheckpointError(f"`{name}` is not plain JSON: {text}. It is {value!r}")
    return same


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Writes a file and flushes it to the disk."""
    path.write_text(json.dumps(value), encoding="ascii")
    fsync(path)


def write_manifest(part: Path, body: dict[str, Any]) -> None:
    """Writes the manifest of a checkpoint, the last of its files."""
    write_json(part / "manifest.json", {"format": FORMAT, "sha256": _digest_of(body), "body": body})
    fsync(part)


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint, and checks that all files are there in full length."""
    file = path / "manifest.json"
    try:
        whole = json.loads(file.read_text(encoding="ascii"))
        version, digest, body = whole["format"], whole["sha256"], whole["body"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{file}: cannot be read: {describe_error(error)}") from error
    if version not in (1, FORMAT):
        raise CheckpointError(
            f"{file}: has format {version!r}; this jdist reads 1 to {FORMAT}. Use the jdist that saved it"
        )
    if digest != _digest_of(body):
        raise Damaged(f"{file}: its checksum does not match")
    for name, facts in body["files"].items():
        size_bytes = facts[0] if version == 1 else facts  # in format 1 with the file's crc32
        try:
            there_bytes = (path / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{path / name}: {describe_error(error)}") from error
        if there_bytes != size_bytes:
            raise Damaged(f"{path / name}: has {there_bytes:,} bytes of {size_bytes:,}")
    return body


_SEEN_S = 10.0  # a network file system may show a new file late
_POLL_S = 0.05


def open_shared(directory: Path, cluster: Runtime, timeout_s: float, name: str) -> list[Path]:
    """Makes the folder, removes what killed processes left in it, and checks that all processes see the same one.

    Returns:
        On process 0, folders named as a killed process's that hold something else.

    Raises:
        CheckpointError: it cannot be made, or is not the one that process 0 writes to.
        ClusterError: so on another process.
    """
    strangers: list[Path] = []
    token = directory / f".shared_{secrets.token_hex(8)}"
    try:
        with together(f"{name}: opening", timeout_s, cluster):
            if cluster.is_chief:
                try:
                    directory.mkdir(parents=True, exist_ok=True)
                    strangers = sweep(directory)
                    if cluster.num_processes > 1:
                        token.touch()
                except OSError as error:
                    raise CheckpointError(f"{directory}: cannot be made: {describe_error(error)}") from error
        first = cluster.exchange(f"{name}: a file", token.name, timeout_s)[0]
        with together(f"{name}: looking", timeout_s, cluster):
            if not cluster.is_chief:
                _await(directory / first, cluster.process_index)
    finally:
        if cluster.is_chief and cluster.num_processes > 1:
            with contextlib.suppress(OSError):  # it was never made, or it stays, which does no harm
                token.unlink()
    return strangers


def _await(token: Path, process: int) -> None:
    deadline_s = time.monotonic() + _SEEN_S
    while not token.exists():
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"process {process}, on {socket.gethostname()}, does not see in {token.parent} what process 0 has written "
                "there. All processes need one folder on a file system that they share, and the same path to it."
            )
        time.sleep(_POLL_S)
