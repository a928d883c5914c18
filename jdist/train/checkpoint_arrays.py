"""The arrays of a checkpoint on the disk, by orbax: the only importer of it.

A state's leaves lie in `arrays/` as an orbax checkpoint of {"0": array, "1": array, ...}. Of a leaf that is spread over
several processes each writes its own pieces, {"3_0": array, ...}; those of process 2 lie in `arrays_2/`.

Orbax's managers are not used: their asynchronous save leaves views of CPU buffers that hinder the next step's donation,
patches a running event loop (`nest_asyncio`) and may name an uncommitted step the latest. Its array handler alone is
used, on a thread of its own, over host copies.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jdist.train import checkpoint_codec as codec
from jdist.train import checkpoint_disk as disk
from jdist.train.checkpoint_disk import Damaged
from jdist.train.checkpoint_pieces import Piece, pieces_of


def _is_news(record: logging.LogRecord) -> bool:
    # Orbax logs an error's traceback once a thread that it passes through, pages of it, and then raises it.
    return "_SignalingThread.run() raised an exception" not in record.getMessage()


@contextlib.contextmanager
def _orbax(**options: Any) -> Iterator[Any]:  # Any: its methods are annotated with etils' Path; pathlib's does as well
    before = set(threading.enumerate())
    logger = logging.getLogger("absl")
    logger.addFilter(_is_news)
    try:
        with contextlib.closing(ocp.PyTreeCheckpointHandler(**options)) as handler:
            yield handler
    finally:
        logger.removeFilter(_is_news)
    # Orbax closes its event loops without waiting for their worker threads, which are about to end.
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("asyncio_"):
            thread.join(timeout=1.0)  # bounded: it may be somebody else's, born at the same time


def check_room(folder: Path, arrays: Iterable[np.ndarray]) -> None:
    """Refuse early: a save that fills the disk on its way to failing would take others' writes down with it."""
    needed_bytes, room = sum(array.nbytes for array in arrays), shutil.disk_usage(folder)
    if room.total and room.free < needed_bytes:  # some file systems report nothing at all
        text = f"{os.strerror(errno.ENOSPC)}: {needed_bytes:,} bytes needed, {room.free:,} free"
        raise OSError(errno.ENOSPC, text, str(folder))


def store(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by their keys into a new folder."""
    folder.mkdir()
    # Orbax refuses empty arrays; their shape says all there is to say. Not compressed: floats shrink by 8 % only.
    tree = {key: codec.bits(array) for key, array in arrays.items() if array.size}
    if tree:
        with _orbax(use_compression=False) as handler:
            handler.save(folder, args=ocp.args.PyTreeSave(item=tree))
            handler.finalize(folder)


def read(path: Path, body: dict[str, Any]) -> list[np.ndarray]:
    """The saved arrays in the manifest's order, each as it was saved to the bit.

    Args:
        path: the checkpoint.
        body: its manifest.

    Raises:
        Damaged: a file is not as it was written.
    """
    leaves = [(leaf, pieces_of(i, leaf)) for i, leaf in enumerate(body["leaves"])]
    wanted: dict[str, dict[str, ocp.RestoreArgs]] = {}
    for piece in (piece for _, pieces in leaves for piece in pieces if piece.is_stored):
        wanted.setdefault(piece.folder, {})[piece.key] = ocp.RestoreArgs(restore_type=np.ndarray)
    stored: dict[str, dict[str, np.ndarray]] = {}
    try:
        # Before orbax sees them: it may read garbage as lengths, and fails in threads that nobody listens to.
        for name, (_, crc32) in body["files"].items():
            if disk.file_crc32(path / name) != crc32:
                raise Damaged(f"{path / name}: its checksum does not match")
        for folder, tree in wanted.items():
            with _orbax() as handler:
                stored[folder] = handler.restore(path / folder, args=ocp.args.PyTreeRestore(restore_args=tree))
    except Damaged:
        raise
    except Exception as error:
        raise Damaged(f"{path / 'arrays'}: cannot be read: {disk.reason(error)}") from error
    return [_joined(path, leaf, pieces, stored) for leaf, pieces in leaves]


def _joined(
    path: Path, leaf: dict[str, Any], pieces: list[Piece], stored: dict[str, dict[str, np.ndarray]]
) -> np.ndarray:
    """A leaf from its pieces."""
    arrays = []
    for piece in pieces:
        array = codec.as_saved(leaf, piece.shape, stored.get(piece.folder, {}).get(piece.key))
        if codec.crc32(array) != piece.crc32:
            raise Damaged(f"{path / piece.folder}: the checksum of leaf {leaf['path']} does not match")
        arrays.append(array)
    if len(pieces) == 1:
        return arrays[0]
    whole = np.empty(tuple(leaf["stored"]["shape"]), arrays[0].dtype)
    for piece, array in zip(pieces, arrays, strict=True):
        whole[piece.index] = array
    return whole
