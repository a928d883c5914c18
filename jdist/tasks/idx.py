"""Reader of the IDX format: a magic number, the dimensions, then the values, all big-endian.

Source: the format's description at the end of https://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from jdist.errors import ConfigError
from jdist.tasks.options import OptionError, near

_UNSIGNED_BYTE = 0x08
_AGAIN = "Fetch the file again, or make it anew."


def find(folder: Path, stem: str, *, rank: int) -> Path:
    """The IDX file of a data set, whichever of its usual names it has.

    Args:
        folder: where to look.
        stem: beginning of the name, such as "train-images".
        rank: number of dimensions, which is part of the name.

    Returns:
        The first that is there of `STEM-idxN-ubyte`, `STEM.idxN-ubyte`, and both with `.gz`.

    Raises:
        OptionError: none of them is there.
    """
    plain = (f"{stem}-idx{rank}-ubyte", f"{stem}.idx{rank}-ubyte")
    candidates = [folder / f"{name}{suffix}" for suffix in ("", ".gz") for name in plain]
    for path in candidates:
        if path.is_file():
            return path
    if not folder.is_dir():
        raise OptionError(
            "folder", f"there is no folder {folder.resolve()} with the four IDX files", remedy=near(folder)
        )
    # No nearest name here: to a comparison of letters the labels are near to the images.
    alike = sorted(path.name for path in folder.iterdir() if path.name.lower().startswith(stem))
    raise OptionError(
        "folder",
        f"{folder.resolve()} does not hold {plain[0]}; looked for {', '.join(path.name for path in candidates)}",
        remedy=f" Rename or unpack {', '.join(alike[:3])}." if alike else "",
    )


def read(path: Path, *, rank: int) -> np.ndarray:
    """Reads an IDX file of unsigned bytes, plain or, if its name ends in `.gz`, compressed.

    Args:
        path: the file.
        rank: number of dimensions it must have: 3 for images, 1 for labels.

    Returns:
        uint8 array of the shape that the file declares.

    Raises:
        ConfigError: it cannot be read, is cut short or too long, or is no such IDX file. The message names
            the file.
    """
    content = _content(path)
    header_bytes = 4 + 4 * rank
    if len(content) < header_bytes:
        raise ConfigError(f"{path}: truncated: {len(content)} bytes, but the header alone has {header_bytes}. {_AGAIN}")
    magic, *shape = struct.unpack(f">{1 + rank}I", content[:header_bytes])
    expected = (_UNSIGNED_BYTE << 8) | rank
    if magic != expected:
        raise ConfigError(
            f"{path}: the magic number is {magic:#010x}, but an IDX file of unsigned bytes with {rank} "
            f"dimension(s) starts with {expected:#010x}. It may be another file under this name, or "
            "compressed without `.gz`."
        )
    size = math.prod(shape)
    if len(content) != header_bytes + size:
        what = "truncated" if len(content) < header_bytes + size else "too long"
        raise ConfigError(
            f"{path}: {what}: the header declares {' x '.join(map(str, shape))} = {size} bytes of values, "
            f"but {len(content) - header_bytes} follow it. {_AGAIN}"
        )
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return file.read()
    except EOFError as error:
        raise ConfigError(f"{path}: truncated: the compressed stream ends too early. {_AGAIN}") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path}: not a sound gzip file ({error}). {_AGAIN}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from error
