"""Folders of checkpoints on a disk or in a bucket: their names, commit, checks and removal.

On a disk a folder gets its name by a rename once it is whole. In a bucket it has its name from the start, and its manifest,
which is written last and removed first, is the commit.
"""

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
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jdist.checkpoint import locks
from jdist.checkpoint.bucket import BucketError, BucketPath
from jdist.cluster.runtime import Runtime, together
from jdist.errors import CheckpointError, ClusterError

FORMAT = 2
MANIFEST = "manifest.json"
NAME = re.compile(r"step_(\d{8,})_save_(\d{5,})(?:_[0-9a-f]{8})?")
OURS = re.compile(r"manifest\.json|arrays|pieces_\d+(\.bin)?|part_\d+\.json")  # the files of a checkpoint
UNFINISHED = re.compile(r"\.(?:saving|deleting)_" + NAME.pattern)
Place = Path | BucketPath


class Damaged(CheckpointError):
    """A checkpoint cannot be read; an older one may be."""


def step_of(path: Place) -> int:
    """Reads the step from a checkpoint folder's name."""
    return int(path.name.split("_")[1])


def number_of(path: Place) -> int:
    """Reads the number of the save from a checkpoint folder's name."""
    return int(path.name.split("_")[3])


def list_committed(directory: Place) -> list[Place]:
    """Lists committed checkpoints in the order of saving; none in a folder that no save has made yet."""
    there = [path for path in _entries(directory) if NAME.fullmatch(path.name)]
    return sorted((path for path in there if isinstance(path, Path) or MANIFEST in path.sizes()), key=number_of)


def _entries(directory: Place) -> list[Place]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def next_name(directory: Place, step: int) -> str:
    """Makes a name that no save in the directory has had."""
    # In a bucket it ends at random: a job that was given up may still write, or remove, the files
    # that it began under the same number.
    matches = (NAME.search(path.name) for path in directory.iterdir())
    number = 1 + max((int(match[2]) for match in matches if match), default=0)
    tag = "" if isinstance(directory, Path) else f"_{secrets.token_hex(4)}"
    return f"step_{step:08d}_save_{number:05d}{tag}"


def is_ours_alone(path: Place) -> bool:
    """Returns whether a folder holds nothing but a checkpoint's files."""
    is_link = isinstance(path, Path) and path.is_symlink()
    return path.is_dir() and not is_link and all(OURS.fullmatch(p.name) for p in path.iterdir())


def remove(path: Place) -> None:
    """Removes a checkpoint: first its name, in a bucket its manifest, so that a kill leaves no half checkpoint."""
    if not is_ours_alone(path):
        return
    if isinstance(path, BucketPath):
        _remove_objects(path)
    else:
        shutil.rmtree(path.rename(path.with_name(f".deleting_{path.name}")))


def _remove_objects(path: BucketPath) -> None:
    (path / MANIFEST).unlink()
    for each in path.iterdir():
        each.unlink()


def claim(directory: Place, timeout_s: float) -> Callable[[], None]:
    """Holds a directory for the saves of this job; see `locks.claim`. In a bucket removes what killed processes left."""
    if not isinstance(directory, BucketPath):
        return locks.claim(directory, timeout_s)
    if locks.take_over(directory):
        for path in directory.iterdir():
            if NAME.fullmatch(path.name) and MANIFEST not in path.sizes() and is_ours_alone(path):
                _remove_objects(path)
    return lambda: None


def part_of(path: Place) -> Place:
    """Names the folder in which a checkpoint is written before it is committed."""
    return path.with_name(f".saving_{path.name}") if isinstance(path, Path) else path


def begin(path: Place) -> Place:
    """Makes that folder; one of a bucket begins with its first object."""
    part = part_of(path)
    if isinstance(part, Path):
        part.mkdir()
    return part


def discard(part: Place) -> None:
    """Removes what a failed save has written, as far as it can; the rest is removed by the next process."""
    if isinstance(part, Path):
        shutil.rmtree(part, ignore_errors=True)
        return
    with contextlib.suppress(BucketError):
        _remove_objects(part)


def sweep(directory: Path) -> list[Path]:
    """Removes what killed processes left; returns folders with such a name that hold something else."""
    strangers: list[Path] = []
    # Another process may be saving, or the disk be read-only: then there is nothing to clean up.
    with contextlib.suppress(OSError, CheckpointError), locks.only_writer(directory, timeout_s=0.0):
        for path in sorted(directory.iterdir()):
            if UNFINISHED.fullmatch(path.name):
                if is_ours_alone(path):
                    shutil.rmtree(path)
                else:
                    strangers.append(path)
    return strangers


_FOREIGN_FILES = re.compile(
    r"checkpoint(_\d+)?|.*\.(keras|h5|ckpt|index|pt|pth|safetensors|msgpack|orbax)|saved_model\.pb|_CHECKPOINT_METADATA|_METADATA"
)
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "checkpoint", "default")


def list_foreign(directory: Place) -> list[str]:
    """Lists what looks like a checkpoint of another library in a directory: of Orbax, flax, Keras and others."""

    def is_foreign(path: Place) -> bool:
        if path.is_dir():
            return not NAME.fullmatch(path.name) and any((path / name).exists() for name in _ORBAX)
        return _FOREIGN_FILES.fullmatch(path.name) is not None

    return sorted(path.name for path in _entries(directory) if not path.name.startswith(".") and is_foreign(path))


def check_room(folder: Place, needed_bytes: int) -> None:
    """Refuses early: a save that fills the disk on its way to failing would take others' writes down with it."""
    if isinstance(folder, BucketPath):
        return
    room = shutil.disk_usage(folder)
    if room.total and room.free < needed_bytes:  # some file systems report nothing at all
        text = f"{os.strerror(errno.ENOSPC)}: {needed_bytes:,} bytes needed, {room.free:,} free"
        raise OSError(errno.ENOSPC, text, str(folder))


def fsync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(file: Place) -> Iterator[Any]:
    """Opens a file to be written, which is on the disk, or in the bucket, after the block."""
    with file.open("wb") as handle:
        yield handle
        if isinstance(file, Path):
            handle.flush()
            os.fsync(handle.fileno())


def commit(part: Place, path: Place) -> None:
    """Gives a finished folder its name: from here on the checkpoint exists. One in a bucket has it, since its manifest."""
    if isinstance(part, Path) and isinstance(path, Path):
        part.rename(path)
        fsync(path.parent)


def describe_error(error: BaseException) -> str:
    """Describes an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    text = str(error).strip()
    if isinstance(error, ClusterError | BucketError):
        return text.rstrip(".")
    return f"{type(error).__name__}: {text if len(text) <= 400 else f'{text[:200]} ... {text[-200:]}'}"


def to_plain_json(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a value to JSON and back; refuses one that this changes."""
    if not isinstance(value, Mapping):
        raise CheckpointError(f"`{name}` is {value!r:.80}: it must be a mapping from names to plain JSON values")
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


def write_json(path: Place, value: Any) -> None:
    """Writes a file and flushes it to the disk."""
    path.write_text(json.dumps(value), encoding="ascii")
    if isinstance(path, Path):
        fsync(path)


def write_manifest(part: Place, body: dict[str, Any]) -> None:
    """Writes the manifest of a checkpoint, the last of its files; it commits one in a bucket."""
    if isinstance(part, BucketPath):
        locks.check_held(part.parent)
    write_json(part / MANIFEST, {"format": FORMAT, "sha256": _digest_of(body), "body": body})
    if isinstance(part, Path):
        fsync(part)


def size_of(file: Place) -> int:
    """Finds the size of a file in bytes."""
    if isinstance(file, Path):
        return file.stat().st_size
    return _size_in(file.parent.sizes(), file)


def _size_in(sizes: dict[str, int], file: BucketPath) -> int:
    if file.name not in sizes:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    return sizes[file.name]


def read_manifest(path: Place) -> dict[str, Any]:
    """Reads the manifest of a checkpoint, and checks that all files are there in full length."""
    file = path / MANIFEST
    try:
        whole = json.loads(file.read_text(encoding="ascii"))
        version, digest, body = whole["format"], whole["sha256"], whole["body"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{file}: cannot be read: {describe_error(error)}") from error
    if version != FORMAT:
        raise CheckpointError(f"{file}: has format {version!r}; this jdist reads {FORMAT}. Use the jdist that saved it")
    if digest != _digest_of(body):
        raise Damaged(f"{file}: its checksum does not match")
    sizes = path.sizes() if isinstance(path, BucketPath) else {}
    for name, size_bytes in body["files"].items():
        try:
            each = path / name
            there_bytes = size_of(each) if isinstance(each, Path) else _size_in(sizes, each)
        except OSError as error:
            raise Damaged(f"{path / name}: {describe_error(error)}") from error
        if there_bytes != size_bytes:
            raise Damaged(f"{path / name}: has {there_bytes:,} bytes of {size_bytes:,}")
    return body


_SEEN_S = 10.0  # a network file system may show a new file late
_POLL_S = 0.05


def open_shared(
    directory: Place, cluster: Runtime, timeout_s: float, name: str, *, make: bool
) -> tuple[list[Path], bool]:
    """Removes leftovers of killed processes, and checks that all processes see one folder."""
    # Returns, on process 0, folders that are named as leftovers but hold something else; and
    # whether the folder exists. Without `make`, a missing or read-only folder is left unchanged.
    strangers: list[Path] = []
    token = directory / f".shared_{secrets.token_hex(8)}"
    is_open = False
    try:
        with together(f"{name}: opening", timeout_s, cluster):
            if cluster.is_chief:
                try:
                    if make or isinstance(directory, BucketPath) or directory.exists():
                        directory.mkdir(parents=True, exist_ok=True)
                        strangers = sweep(directory) if isinstance(directory, Path) else []
                        is_open = cluster.num_processes == 1 or _touch(token, must=make)
                except OSError as error:
                    raise CheckpointError(f"{directory}: cannot be made: {describe_error(error)}") from error
        path = str(directory.absolute() if isinstance(directory, Path) else directory)
        first, is_open, theirs = cluster.exchange(f"{name}: a file", [token.name, is_open, path], timeout_s)[0]
        with together(f"{name}: looking", timeout_s, cluster):
            if is_open and not cluster.is_chief:
                _await(directory / first, path, theirs)
    finally:
        if cluster.is_chief and cluster.num_processes > 1:
            with contextlib.suppress(OSError, BucketError):  # it was never made, or it stays, which does no harm
                token.unlink()
    return strangers, is_open


def _touch(token: Place, *, must: bool) -> bool:
    """Makes a file; returns whether that may be done here, where it need not."""
    try:
        token.touch()
    except OSError as error:
        if must or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return False
    return True


def _await(token: Place, path: str, theirs: str) -> None:
    deadline_s = time.monotonic() + _SEEN_S
    while not token.exists():
        if time.monotonic() > deadline_s:
            here = f"{path} on {socket.gethostname()}"
            text = f"{here} does not show the file that process 0 wrote there"
            if path != theirs:
                text = f"{here} is another folder than {theirs} of process 0"
            raise CheckpointError(f"{text}. All processes need the same path to one folder on a shared file system.")
        time.sleep(_POLL_S)
