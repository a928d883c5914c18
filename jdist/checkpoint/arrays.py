"""The arrays of a checkpoint on the disk, by orbax: the only importer of it.

Whole leaves lie in `arrays/` as an orbax checkpoint of {"0": array, "1": array, ...}, which process 0 writes: orbax has no
other write numpy arrays. What several processes hold of a leaf is in pieces; see checkpoint_pieces.py.

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

from jdist.checkpoint import folder as disk
from jdist.checkpoint import leaves as codec
from jdist.checkpoint.folder import Damaged
from jdist.checkpoint.pieces import Piece


def _is_news(record: logging.LogRecord) -> bool:
    # Orbax logs an error's traceback once a thread that it passes through, pages of it, and then raises it.
    return "_SignalingThread.run() raised an exception" not in record.getMessage()


@contextlib.contextmanager
def _orbax(**options: Any) -> Iterator[Any]:  # Any: its methods are annotated with etils' Path; pathlib's does as well
    import orbax.checkpoint as ocp  # a quarter of a second: for those who save or restore

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
    import orbax.checkpoint as ocp

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
    import orbax.checkpoint as ocp

    leaves, files = body["leaves"], body["files"]
    stored = {
        str(i): ocp.RestoreArgs(restore_type=np.ndarray)
        for i, leaf in enumerate(leaves)
        if "pieces" not in leaf and 0 not in leaf["stored"]["shape"]
    }
    tree: dict[str, np.ndarray] = {}
    try:
        # Before orbax sees them: it may read garbage as lengths, and fails in threads that nobody listens to.
        for name, (_, crc32) in files.items():
            if disk.file_crc32(path / name) != crc32:
                raise Damaged(f"{path / name}: its checksum does not match")
        if stored:
            with _orbax() as handler:
                tree = handler.restore(path / "arrays", args=ocp.args.PyTreeRestore(restore_args=stored))
    except Damaged:
        raise
    except Exception as error:
        raise Damaged(f"{path / 'arrays'}: cannot be read: {disk.reason(error)}") from error
    arrays: list[np.ndarray] = []
    for i, leaf in enumerate(leaves):
        if "pieces" in leaf:
            arrays.append(codec.empty(leaf))
            for piece in leaf["pieces"]:
                Piece(**piece).put_into(arrays[-1], path)
            continue
        arrays.append(codec.as_saved(leaf, tree.get(str(i))))
        if codec.crc32(arrays[-1]) != leaf["crc32"]:
            raise Damaged(f"{path / 'arrays'}: the checksum of leaf {leaf['path']} does not match")
    return arrays
