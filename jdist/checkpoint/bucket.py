"""Paths in an object store (`s3://`, `gs://` and what else fsspec knows), with the part of `pathlib.Path` that checkpoints use.

An object is there whole or not at all, and a listing shows it at once. A store has no rename, no lock that ends with its
process, and a folder is no more than what the names of its objects begin with. Every wait has a deadline. A store that
cannot be reached is a `BucketError`; an object that is not there is a `FileNotFoundError`, as on a disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jdist.checkpoint.job import Job
from jdist.errors import CheckpointError

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)://(?P<path>.+)")
_BLOCK_BYTES = 16 << 20  # of what is read or written at a time: the library makes a copy
_SHUT_OUT = re.compile(
    r"credential|permission|forbidden|access ?denied|unauthori[sz]ed|anonymous|token|\b40[13]\b", re.IGNORECASE
)
_WITH_BUCKETS = ("s3", "s3a", "gs", "gcs")  # which nobody makes by writing to them


class BucketError(CheckpointError):
    """An object store cannot be reached, or refuses."""


@dataclass(frozen=True)
class BucketPath:
    """A path in an object store."""

    fs: Any = field(compare=False)  # fsspec's file system
    path: str  # for `fs`, without the protocol
    protocol: str  # of its URL
    timeout_s: float = field(compare=False)  # the longest wait for one answer

    def __str__(self) -> str:
        return f"{self.protocol}://{self.path}"

    def __truediv__(self, name: str) -> BucketPath:
        return self._at(f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> BucketPath:
        return self._at(self.path.rsplit("/", 1)[0])

    def with_name(self, name: str) -> BucketPath:
        return self.parent / name

    def iterdir(self) -> Iterator[BucketPath]:
        """Lists what is directly below; nothing if the folder is missing, an error if the bucket is."""
        return (self / name for name in self._list())

    def sizes(self) -> dict[str, int]:
        """Finds the sizes of the objects directly below, in bytes, by name."""
        return {name: size for name, size in self._list().items() if size is not None}

    def exists(self) -> bool:
        return self.name in self.parent._list()

    def is_dir(self) -> bool:
        return bool(self._list())

    def read_bytes(self) -> bytes:
        return self._ask("read", lambda: self.fs.cat_file(self.path))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Writes an object, which is there whole once this returns."""
        self._ask("written", lambda: self.fs.pipe_file(self.path, text.encode(encoding)))

    def touch(self) -> None:
        self.write_text("")

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:
        """Checks that the bucket is there; a folder is there with its first object."""
        self._list()

    def unlink(self) -> None:
        """Removes an object; one that is not there is removed already."""
        try:
            self._ask("removed", lambda: self.fs.rm_file(self.path))
        except FileNotFoundError:
            return

    @contextmanager
    def open(self, mode: str) -> Iterator[Any]:
        """Opens an object to be read ("rb"), or written ("wb"): then it is there whole after the block, or not at all."""
        doing = "read" if mode == "rb" else "written"
        with self._translated(doing):
            handle = self.fs.open(self.path, mode)
        try:
            yield _Handle(self, handle, doing)
        except BaseException as error:
            self._give_up(handle, mode, error)
            raise
        with self._translated(doing):
            handle.close()

    def _give_up(self, handle: Any, mode: str, error: BaseException) -> None:
        """Discards a file that failed, as closing it would write what was sent so far."""
        if mode == "rb":
            return
        try:
            self._ask("given up", handle.discard)
        except BucketError as another:
            error.add_note(f"{another}. What was sent of it may stay until the bucket's rules remove it.")
        with suppress(AttributeError):  # of the memory file system, which has written it already
            handle.closed = True

    def _at(self, path: str) -> BucketPath:
        return BucketPath(self.fs, path, self.protocol, self.timeout_s)

    def _list(self) -> dict[str, int | None]:
        """Lists names directly below with the sizes of objects, None for folders."""
        try:
            there = self._ask("listed", lambda: self.fs.ls(self.path, detail=True))
        except FileNotFoundError:
            self._check_bucket()
            return {}
        entries = ((each["name"].rstrip("/"), each) for each in there)
        own = self.path.strip("/")
        return {
            name.rsplit("/", 1)[-1]: None if each["type"] == "directory" else each["size"]
            for name, each in entries
            if name.strip("/") != own
        }

    def _check_bucket(self) -> None:
        """Raises a `BucketError` if the bucket does not exist: taken for an empty folder, it would restart a run."""
        bucket = self.path.strip("/").split("/", 1)[0]
        try:
            self._ask("listed", lambda: self.fs.ls(bucket, detail=True))
        except FileNotFoundError as error:
            if self.protocol not in _WITH_BUCKETS:
                return
            raise BucketError(f"{self}: the bucket {bucket!r} does not exist. Make it, or correct its name.") from error
        except BucketError as error:
            # Credentials for the folder alone: as that could be listed, there is a bucket.
            if not isinstance(error.__cause__, PermissionError):
                raise

    def _ask(self, doing: str, work: Callable[[], Any]) -> Any:
        with self._translated(doing):
            return Job(work).result(self.timeout_s, f"{self}: to be {doing}")

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Turns the store library's errors into a `BucketError` that says what to do."""
        try:
            yield
        except CheckpointError as error:
            raise BucketError(str(error)) from error
        except Exception as error:
            if isinstance(error, FileNotFoundError) and doing not in ("opened", "written"):
                raise
            kind = type(error).__name__
            said = " ".join(f"{error}".split()).rstrip(".")  # Google's errors have several lines
            text = f"{self}: cannot be {doing}: {kind}: {said:.300}"
            if _SHUT_OUT.search(text.removeprefix(str(self))):
                text += f". Give credentials that may read and write there, as fsspec's {self.protocol!r} takes them"
            elif isinstance(error, FileNotFoundError) and doing == "written":
                text += ". Does the bucket exist?"
            raise BucketError(text) from error


@dataclass
class _Handle:
    """A file of fsspec, with errors that name the path."""

    path: BucketPath
    handle: Any
    doing: str

    def seek(self, offset: int) -> int:
        return self.handle.seek(offset)

    def tell(self) -> int:
        return self.handle.tell()

    def readinto(self, data: memoryview) -> int:
        with self.path._translated(self.doing):
            blocks = (data[first : first + _BLOCK_BYTES] for first in range(0, len(data), _BLOCK_BYTES))
            return sum(self.handle.readinto(block) for block in blocks)

    def write(self, data: memoryview) -> int:
        with self.path._translated(self.doing):
            for first in range(0, len(data), _BLOCK_BYTES):
                self.handle.write(data[first : first + _BLOCK_BYTES])
        return len(data)


def open_path(directory: str | os.PathLike[str] | BucketPath, timeout_s: float) -> Path | BucketPath:
    """Makes a path of a local path or a URL."""
    if isinstance(directory, BucketPath):
        return directory
    check_is_path(directory)
    match = _URL.fullmatch(str(directory))
    if match is None and "://" not in str(directory):
        return Path(directory).expanduser().absolute()
    if match is None or match["protocol"] in ("file", "local"):
        raise CheckpointError(
            f"{directory}: neither a folder nor a bucket; give a local path, or PROTOCOL://BUCKET/FOLDER"
        )
    try:
        import fsspec

        fsspec.get_filesystem_class(match["protocol"])
    except ImportError as error:
        raise CheckpointError(
            f"{directory}: what opens {match['protocol']}:// is not installed: {error}. "
            'For s3:// and gs:// there is an extra: pip install "jdist[remote]"'
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{directory}: fsspec does not know {match['protocol']}://: {error}") from error
    unopened = BucketPath(None, match["path"], match["protocol"], timeout_s)
    # With a deadline: Google's looks for credentials in the network. No listing is kept, as other processes write there too.
    fs, path = unopened._ask("opened", lambda: fsspec.url_to_fs(str(directory), use_listings_cache=False))
    return BucketPath(fs, path.rstrip("/"), match["protocol"], timeout_s)


def check_is_path(directory: Any) -> None:
    """Raises a `CheckpointError` for what is neither a path nor a URL."""
    if not isinstance(directory, str | os.PathLike) or isinstance(os.fspath(directory), bytes):
        raise CheckpointError(
            f"{directory!r:.80} is not a directory: give a path, or a bucket's URL such as s3://BUCKET/FOLDER"
        )
