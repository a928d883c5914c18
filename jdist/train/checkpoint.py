"""Checkpoints: written behind the run's back, there whole or not at all, checked when read. The only importer of orbax.

    DIRECTORY/step_00000500_save_00003/manifest.json    step, data position, metrics; each leaf and file, with crc32
    DIRECTORY/step_00000500_save_00003/arrays/          the leaves, an orbax checkpoint of {"0": array, "1": array, ...}
    DIRECTORY/.saving_...  .deleting_...                what a killed process left half done; removed by the next one

A save is written under a hidden name, flushed to the disk, and only then renamed: the name is the commit. Saves are
numbered, so a step saved again replaces nothing before its successor is whole, and "newest" means saved last.

Orbax's managers are not used: their asynchronous save leaves views of CPU buffers that hinder the next step's donation,
patches a running event loop (`nest_asyncio`) and may name an uncommitted step the latest. Its array handler alone is
used, on a thread of its own, over host copies.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import operator
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

from jdist.errors import CheckpointError
from jdist.train import checkpoint_codec as codec
from jdist.train import checkpoint_disk as disk
from jdist.train.checkpoint_disk import Damaged
from jdist.train.job import Job
from jdist.transforms.spread import is_spread

PyTree = Any


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over, or a folder left alone that looks like one."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint held.

    Attributes:
        step: the step it was saved at.
        state: the state, laid out as `like` was.
        data: the data position it was saved with.
        metrics: the metrics it was saved with.
        metadata: the other facts it was saved with.
    """

    step: int
    state: PyTree
    data: dict[str, Any] | None
    metrics: dict[str, float]
    metadata: dict[str, Any]


class Checkpointer:
    """Saves state and data position in a directory, and finds the newest that can be read.

    Use it as a context manager, or call `close`: a save still in flight when the interpreter exits is lost (the
    checkpoint before it is not). Any number of readers and one writing run can share a directory.

    Args:
        directory: where to save, on a mounted file system; made if need be.
        keep: how many of the checkpoints saved last are kept; more than one, so that a damaged one has a successor.
        best_metric: the metric whose best checkpoint is kept too; None for none.
        best_mode: whether the best is the greatest ("max") or the least ("min").
        check: called with the state before each save; raises to prevent it. Pass `strategy.check`: saving reads
            one replica's copy, which would hide that replicas have diverged.
        timeout_s: the longest that any call waits for devices, disk or another writer, in seconds.

    Raises:
        CheckpointError: an argument is not valid, or the directory cannot be made.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> state = {"w": jnp.arange(3.0)}
        >>> with Checkpointer(tempfile.mkdtemp()) as checkpoints:
        ...     checkpoints.save(10, state, data={"position": 640})
        ...     restored = checkpoints.restore(state)
        >>> restored.step, restored.data, restored.state["w"].tolist()
        (10, {'position': 640}, [0.0, 1.0, 2.0])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        best_metric: str | None = None,
        best_mode: Literal["max", "min"] = "max",
        check: Callable[[PyTree], None] | None = None,
        timeout_s: float = 600.0,
    ):
        if "://" in str(directory):
            raise CheckpointError(f"`directory`: {directory} is not on a mounted file system; give a local path")
        if keep < 1:
            raise CheckpointError(f"`keep` is {keep}: at least 1 checkpoint must be kept")
        if best_mode not in ("max", "min"):
            raise CheckpointError(f"`best_mode` is {best_mode!r}: it must be 'max' or 'min'")
        if not timeout_s > 0:
            raise CheckpointError(f"`timeout_s` is {timeout_s}: it must be more than 0 seconds")
        self._directory = Path(directory).expanduser().absolute()
        self._keep, self._best_metric, self._best_mode = keep, best_metric, best_mode
        self._check, self._timeout_s = check, timeout_s
        self._damaged: set[str] = set()
        self._saving: tuple[int, Job] | None = None
        self._closed = False
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self._directory}: cannot be made: {disk.reason(error)}") from error
        strangers = disk.sweep(self._directory)
        if strangers:
            text = f"left alone, it is not jdist's alone although it is named so: {', '.join(map(str, strangers))}"
            warnings.warn(text, CheckpointWarning, stacklevel=2)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> None:
        """Save; returns once the state is copied to the host, so it may be donated at once. The rest goes on behind.

        Args:
            step: the number of updates in `state`. A step saved before is saved anew, then the old one removed.
            state: any pytree of arrays, PRNG keys and numbers.
            data: where the data is, as `dataset.state()` gives it: plain JSON values.
            metrics: scalars by name, among them `best_metric` where it was measured; NaN is never the best.
            metadata: other facts to keep with the state: plain JSON values.
            wait: return only when the checkpoint is committed.

        Raises:
            CheckpointError: the save before this one failed, or an argument cannot be saved; with `wait`, this one.
            DonatedStateError: `state` was donated already.
            Exception: whatever `check` raises.
        """
        if self._closed:
            raise CheckpointError(f"{self._directory}: this Checkpointer is closed; make another to save again")
        if (step := operator.index(step)) < 0:
            raise CheckpointError(f"`step` is {step}: it must be 0 or more")
        body = {
            "step": step,
            "data": None if data is None else disk.plain("data", data),
            "metrics": {str(name): float(value) for name, value in (metrics or {}).items()},
            "metadata": disk.plain("metadata", metadata or {}),
        }
        leaves = codec.flatten(state)
        self.wait()
        for path, leaf in leaves.items():
            codec.check_savable(path, leaf)
        body["leaves"] = [codec.described(path, leaf) for path, leaf in leaves.items()]
        if self._check is not None:
            self._check(state)
        copying = Job(lambda: [codec.host_copy(leaf) for leaf in leaves.values()])
        arrays = copying.result(self._timeout_s, f"copying step {step} to the host for {self._directory}")
        self._saving = step, Job(lambda: self._write(body, arrays))
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the save in flight, if there is one, is committed.

        Raises:
            CheckpointError: it failed (said once), or did not end in time (it goes on).
        """
        if self._saving is not None:
            step, job = self._saving
            try:
                job.result(self._timeout_s, f"saving step {step} in {self._directory}")
            finally:
                if job.done():
                    self._saving = None

    def close(self) -> None:
        """Wait for the save in flight and refuse further ones; closing twice changes nothing.

        Raises:
            CheckpointError: as `wait`.
        """
        self._closed = True
        self.wait()

    def steps(self) -> list[int]:
        """The steps that are saved whole, as far as can be told without reading the arrays; ascending."""
        return sorted({body["step"] for _, body in self._whole()})

    @property
    def best_step(self) -> int | None:
        """The step with the best `best_metric`, the earlier of equals; None if none was saved with it."""
        best = self._best(self._whole())
        return None if best is None else best["step"]

    def restore(self, like: PyTree, *, step: int | None = None) -> Restored | None:
        """Read the checkpoint saved last; one that is damaged is passed over, with a warning, for the one before.

        Args:
            like: the tree to fill, of arrays or `jax.ShapeDtypeStruct`: the restored leaves take its shapes, dtypes
                and shardings, so another number of devices than at the save is no matter; its values are not read, but
                for residuals of compressed gradients that the checkpoint does not have for as many replicas.
            step: read this step and no other.

        Returns:
            The checkpoint; None if the directory has none.

        Raises:
            CheckpointError: `like` does not fit, no checkpoint can be read, or `step` is not there.
        """
        self.wait()
        wanted = codec.flatten(like)
        # Validated first, so that a tree of the wrong kind is not mistaken for a damaged checkpoint.
        described = [codec.described(path, leaf) for path, leaf in wanted.items()]
        paths = disk.committed(self._directory)
        if step is not None:
            found = sorted({disk.step(path) for path in paths})
            paths = [path for path in paths if disk.step(path) == step]
            if not paths:
                raise CheckpointError(f"{self._directory}: step {step} is not saved here; there are {found}")
        problems: list[str] = []
        for path in reversed(paths):
            try:
                body = disk.manifest(path)
                order = codec.fit(path, body["leaves"], described)
                reading = Job(lambda path=path, body=body: _read_arrays(path, body))
                arrays = reading.result(self._timeout_s, f"reading {path}")
            except Damaged as error:
                problems.append(str(error))
                self._damaged.add(path.name)
                continue
            values = [
                leaf if i is None else codec.placed(name, arrays[i], body["leaves"][i].get("key"), leaf)
                for i, (name, leaf) in zip(order, wanted.items(), strict=True)
            ]
            for problem in problems:
                text = f"{problem}. Going on from step {body['step']} instead."
                warnings.warn(text, CheckpointWarning, stacklevel=2)
            return Restored(
                step=body["step"],
                state=jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_spread), values),
                data=body["data"],
                metrics=body["metrics"],
                metadata=body["metadata"],
            )
        if problems:
            raise CheckpointError(f"{self._directory}: no checkpoint can be read:\n  " + "\n  ".join(problems))
        return None

    def _write(self, body: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """All of a save that happens behind the run's back."""
        path = self._directory / f"step_{body['step']:08d}"
        part: Path | None = None
        try:
            with disk.only_writer(self._directory, self._timeout_s):
                path = self._directory / f"{path.name}_save_{disk.next_number(self._directory):05d}"
                part = path.with_name(f".saving_{path.name}")
                part.mkdir()
                for leaf, array in zip(body["leaves"], arrays, strict=True):
                    leaf["stored"] = {"shape": list(array.shape), "dtype": str(array.dtype)}
                    leaf["crc32"] = codec.crc32(array)
                _check_room(part, arrays)
                _store_arrays(part / "arrays", arrays)
                disk.write_manifest(part, body)
                disk.commit(part, path)
                part = None
                self._prune()
        except CheckpointError:
            raise
        except Exception as error:
            if part is not None:
                shutil.rmtree(part, ignore_errors=True)  # a full disk is not left fuller; else the next process sweeps
                text = "cannot be written; the checkpoints saved before are untouched"
            else:
                text = "this or an older checkpoint cannot be tidied up, though the save itself may be whole"
            raise CheckpointError(f"{path}: {text}: {disk.reason(error)}. Free or mend the disk.") from error

    def _whole(self) -> list[tuple[Path, dict[str, Any]]]:
        """What looks readable, the last save of each step, in the order of saving."""
        whole: dict[int, tuple[Path, dict[str, Any]]] = {}
        for path in disk.committed(self._directory):
            with contextlib.suppress(Damaged):  # `restore` reports it; here it only does not count
                if path.name not in self._damaged:
                    body = disk.manifest(path)
                    whole.pop(body["step"], None)
                    whole[body["step"]] = path, body
        return list(whole.values())

    def _best(self, whole: list[tuple[Path, dict[str, Any]]]) -> dict[str, Any] | None:
        sign = 1 if self._best_mode == "max" else -1
        scored = [body for _, body in whole if not math.isnan(body["metrics"].get(self._best_metric, math.nan))]
        return max(scored, key=lambda b: (sign * b["metrics"][self._best_metric], -b["step"]), default=None)

    def _prune(self) -> None:
        whole = self._whole()
        best = self._best(whole)
        newest = [path for path, _ in whole[-self._keep :]]
        if not newest:
            return
        kept = {*newest, *(path for path, body in whole if body is best)}
        last = {body["step"]: path for path, body in whole}
        for path in disk.committed(self._directory):
            # A damaged one newer than what is kept stays: someone may want to look at it.
            old = disk.number(path) < max(disk.number(newest[0]), disk.number(last.get(disk.step(path), path)))
            if old and path not in kept:
                disk.remove(path)


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


def _check_room(folder: Path, arrays: list[np.ndarray]) -> None:
    """Refuse early: a save that fills the disk on its way to failing would take others' writes down with it."""
    needed_bytes, room = sum(array.nbytes for array in arrays), shutil.disk_usage(folder)
    if room.total and room.free < needed_bytes:  # some file systems report nothing at all
        text = f"{os.strerror(errno.ENOSPC)}: {needed_bytes:,} bytes needed, {room.free:,} free"
        raise OSError(errno.ENOSPC, text, str(folder))


def _store_arrays(folder: Path, arrays: list[np.ndarray]) -> None:
    folder.mkdir()
    # Orbax refuses empty arrays; their shape says all there is to say. Not compressed: floats shrink by 8 % only.
    tree = {str(i): codec.bits(array) for i, array in enumerate(arrays) if array.size}
    if tree:
        with _orbax(use_compression=False) as handler:
            handler.save(folder, args=ocp.args.PyTreeSave(item=tree))
            handler.finalize(folder)


def _read_arrays(path: Path, body: dict[str, Any]) -> list[np.ndarray]:
    """The saved arrays in the manifest's order, each as it was saved to the bit."""
    leaves, files = body["leaves"], body["files"]
    stored = {
        str(i): ocp.RestoreArgs(restore_type=np.ndarray)
        for i, leaf in enumerate(leaves)
        if 0 not in leaf["stored"]["shape"]
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
        arrays.append(codec.as_saved(leaf, tree.get(str(i))))
        if codec.crc32(arrays[-1]) != leaf["crc32"]:
            raise Damaged(f"{path / 'arrays'}: the checksum of leaf {leaf['path']} does not match")
    return arrays
