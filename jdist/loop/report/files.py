"""Files that no kill leaves half written."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from jdist.errors import ConfigError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failure of the file system into a `ConfigError` that names the path."""
    try:
        yield
    except OSError as exc:
        where = exc.filename or path
        raise ConfigError(
            f"{where}: cannot be written: {exc.strerror or exc}. What was saved before is untouched; "
            "free or mend the disk, or choose another place (of `jdist run`: log.folder=FOLDER; of `jdist.fit`: "
            "log_to=FOLDER), and run the same again."
        ) from exc


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file atomically (text as UTF-8): a kill leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        try:
            with partial.open("wb") as handle:
                handle.write(content.encode() if isinstance(content, str) else content)
                handle.flush()
                os.fsync(handle.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def first_free(path: Path) -> Path:
    """Finds the first of `NAME.1`, `NAME.2`, ... that is free, to set `path` aside under."""
    return next(free for n in itertools.count(1) if not (free := path.with_name(f"{path.name}.{n}")).exists())
