"""Text files as two runs of bytes, one to train on and one held out, split by file."""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jdist.errors import ConfigError

SEPARATOR = b"\0"  # ends every file; no text holds it
_HELD_OUT_OF = 10  # one file in so many is held out


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """The bytes of a set of files."""

    train: np.ndarray  # the training files, each followed by a zero byte, uint8 [n]
    held_out: np.ndarray  # the same of the held-out files
    train_files: tuple[str, ...]  # their paths, relative to the folder that the pattern starts from, in order
    held_out_files: tuple[str, ...]


def load(patterns: Sequence[str] | None) -> Corpus:
    """Reads the files that patterns match, in order of their relative paths, and splits them."""
    # Whether a file is held out depends on its path below the pattern's start folder, never on that
    # folder's place: one in ten by hash, and if that leaves a side empty, the one file with the next
    # hash. None reads the `.py` files of the standard library.
    if patterns is not None and not patterns:
        raise ConfigError("no patterns are given; give one at least, or null for the standard library.")
    contents: dict[str, bytes] = {}
    seen: set[Path] = set()
    for pattern in [None] if patterns is None else patterns:
        for name, path in _standard_library() if pattern is None else _matches(pattern):
            resolved = path.resolve()
            if resolved in seen:
                continue
            seen.add(resolved)
            content = _read(path)
            if content:
                contents[name if name not in contents else str(path)] = content + SEPARATOR
    if len(contents) < 2:
        raise ConfigError(
            f"{_show(patterns)} gives {len(contents)} file(s) that are not empty; at least 2 are needed, since whole "
            "files are held out. Name more files, or cut the one into parts."
        )
    held_out = held_out_names(contents)
    sides = {side: sorted(n for n in contents if (n in held_out) is side) for side in (False, True)}
    train, test = (np.frombuffer(b"".join(contents[name] for name in sides[side]), np.uint8) for side in (False, True))
    return Corpus(train=train, held_out=test, train_files=tuple(sides[False]), held_out_files=tuple(sides[True]))


def held_out_names(names: Iterable[str]) -> frozenset[str]:
    """Picks the paths with a hash divisible by ten; at least one, never all of several."""
    by_hash = sorted((_hash(name) % _HELD_OUT_OF, _hash(name), name) for name in names)
    divisible = sum(remainder == 0 for remainder, _, _ in by_hash)
    count = min(max(divisible, 1), len(by_hash) - 1)
    return frozenset(name for _, _, name in by_hash[:count])


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _standard_library() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    installed = {"site-packages", "dist-packages"}
    paths = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    return sorted((name.as_posix(), path) for name, path in paths if not installed.intersection(name.parts))


def _matches(pattern: str) -> list[tuple[str, Path]]:
    parts = Path(pattern).expanduser().parts
    plain = 0
    while plain < len(parts) - 1 and not glob.has_magic(parts[plain]):
        plain += 1
    root = Path(*parts[:plain])
    paths = map(Path, glob.glob(str(Path(*parts)), recursive=True))
    files = sorted((path.relative_to(root).as_posix(), path) for path in paths if path.is_file())
    if not files:
        raise ConfigError(
            f"the pattern {pattern!r} matches no file below {root.resolve()}. "
            "Check the folder and the wildcards: `*` stays in one folder, `**` goes to any depth."
        )
    return files


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error


def _show(patterns: Sequence[str] | None) -> str:
    return "the standard library" if patterns is None else ", ".join(map(repr, patterns))
