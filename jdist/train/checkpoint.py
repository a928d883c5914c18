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
import hashlib
import json
import logging
import math
import operator
import os
import re
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jdist.errors import CheckpointError, DonatedStateError

PyTree = Any

_FORMAT = 1
_NAME = re.compile(r"step_(\d{8,})_save_(\d{5,})")
_UNFINISHED = re.compile(r"\.(?:saving|deleting)_" + _NAME.pattern)
_SCALARS = (bool, int, float, complex)


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over, or a folder left alone that looks like one."""


class _Damaged(CheckpointError):
    """This checkpoint cannot be read; an older one may do."""


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
        self._saving: tuple[int, _Job] | None = None
        self._closed = False
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self._directory}: cannot be made: {_reason(error)}") from error
        strangers = _sweep(self._directory)
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
            "data": None if data is None else _plain("data", data),
            "metrics": {str(name): float(value) for name, value in (metrics or {}).items()},
            "metadata": _plain("metadata", metadata or {}),
        }
        leaves = _flatten(state)
        self.wait()
        for path, leaf in leaves.items():
            _check_savable(path, leaf)
        body["leaves"] = [_described(path, leaf) for path, leaf in leaves.items()]
        if self._check is not None:
            self._check(state)
        copying = _Job(lambda: [_host_copy(leaf) for leaf in leaves.values()])
        arrays = copying.result(self._timeout_s, f"copying step {step} to the host for {self._directory}")
        self._saving = step, _Job(lambda: self._write(body, arrays))
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
                and shardings, so another number of devices than at the save is no matter; its values are not read.
            step: read this step and no other.

        Returns:
            The checkpoint; None if the directory has none.

        Raises:
            CheckpointError: `like` does not fit, no checkpoint can be read, or `step` is not there.
        """
        self.wait()
        wanted = _flatten(like)
        # Validated first, so that a tree of the wrong kind is not mistaken for a damaged checkpoint.
        described = [_described(path, leaf) for path, leaf in wanted.items()]
        paths = _committed(self._directory)
        if step is not None:
            found = sorted({_step(path) for path in paths})
            paths = [path for path in paths if _step(path) == step]
            if not paths:
                raise CheckpointError(f"{self._directory}: step {step} is not saved here; there are {found}")
        problems: list[str] = []
        for path in reversed(paths):
            try:
                body = _manifest(path)
                order = _fit(path, body["leaves"], described)
                reading = _Job(lambda path=path, body=body: _read_arrays(path, body))
                arrays = reading.result(self._timeout_s, f"reading {path}")
            except _Damaged as error:
                problems.append(str(error))
                self._damaged.add(path.name)
                continue
            values = [
                _placed(name, arrays[i], body["leaves"][i].get("key"), leaf)
                for i, (name, leaf) in zip(order, wanted.items(), strict=True)
            ]
            for problem in problems:
                text = f"{problem}. Going on from step {body['step']} instead."
                warnings.warn(text, CheckpointWarning, stacklevel=2)
            return Restored(
                step=body["step"],
                state=jax.tree.unflatten(jax.tree.structure(like), values),
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
            with _only_writer(self._directory, self._timeout_s):
                path = self._directory / f"{path.name}_save_{_next_number(self._directory):05d}"
                part = path.with_name(f".saving_{path.name}")
                part.mkdir()
                for leaf, array in zip(body["leaves"], arrays, strict=True):
                    leaf["stored"] = {"shape": list(array.shape), "dtype": str(array.dtype)}
                    leaf["crc32"] = _crc32(array)
                _check_room(part, arrays)
                _store_arrays(part / "arrays", arrays)
                _write_manifest(part, body)
                _commit(part, path)
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
            raise CheckpointError(f"{path}: {text}: {_reason(error)}. Free or mend the disk.") from error

    def _whole(self) -> list[tuple[Path, dict[str, Any]]]:
        """What looks readable, the last save of each step, in the order of saving."""
        whole: dict[int, tuple[Path, dict[str, Any]]] = {}
        for path in _committed(self._directory):
            with contextlib.suppress(_Damaged):  # `restore` reports it; here it only does not count
                if path.name not in self._damaged:
                    body = _manifest(path)
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
        for path in _committed(self._directory):
            # A damaged one newer than what is kept stays: someone may want to look at it.
            old = _number(path) < max(_number(newest[0]), _number(last.get(_step(path), path)))
            if old and path not in kept:
                _remove(path)


class _Job:
    """A function on a thread of its own, so that a wait for it ends in time and runs in no event loop.

    The thread is a daemon: a disk that never answers must not keep the process from ending.
    """

    def __init__(self, work: Callable[[], Any]):
        self._future: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name="jdist-checkpoint", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - not swallowed: raised in the thread that asks for the result
            self._future.set_exception(error)
        else:
            self._future.set_result(result)

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float, what: str) -> Any:
        try:
            result = self._future.result(timeout_s)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise CheckpointError(f"{what}: not done after {timeout_s:g} s (`timeout_s`); it goes on") from error
        finally:
            if self._future.done():
                self._thread.join()
        return result


# ---- names and files -------------------------------------------------------------------------------------------------


def _step(path: Path) -> int:
    return int(path.name.split("_")[1])


def _number(path: Path) -> int:
    return int(path.name.split("_")[3])


def _committed(directory: Path) -> list[Path]:
    """Committed checkpoints in the order of saving."""
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=_number)


def _next_number(directory: Path) -> int:
    found = (_NAME.search(path.name) for path in directory.iterdir())
    return 1 + max((int(match[2]) for match in found if match), default=0)


def _is_ours_alone(path: Path) -> bool:
    """Whether nothing is lost to a person if this folder goes."""
    inside = {"arrays", "manifest.json"}
    return path.is_dir() and not path.is_symlink() and inside.issuperset(p.name for p in path.iterdir())


def _remove(path: Path) -> None:
    """Remove a checkpoint: unnamed first, so that a kill half way leaves no half checkpoint."""
    if _is_ours_alone(path):
        shutil.rmtree(path.rename(path.with_name(f".deleting_{path.name}")))


def _sweep(directory: Path) -> list[Path]:
    """Remove what killed processes left; returns what looks like it but holds something else."""
    strangers: list[Path] = []
    # Another process may be saving right now, or the disk be read-only: either way there is nothing to clean up.
    with contextlib.suppress(OSError, CheckpointError), _only_writer(directory, timeout_s=0.0):
        for path in sorted(directory.iterdir()):
            if _UNFINISHED.fullmatch(path.name):
                if _is_ours_alone(path):
                    shutil.rmtree(path)
                else:
                    strangers.append(path)
    return strangers


@contextlib.contextmanager
def _only_writer(directory: Path, timeout_s: float) -> Iterator[None]:
    """Hold the directory's lock: a folder under a hidden name is then known to be no live writer's."""
    import fcntl  # POSIX only: imported here so that checkpoints can be read anywhere

    deadline_s = time.monotonic() + timeout_s
    with (directory / ".lock").open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the system however the process ends
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline_s:
                    text = f"{directory}: another process saves here and did not end within {timeout_s:g} s"
                    raise CheckpointError(text) from error
                time.sleep(0.02)
        yield


def _flush(tree: Path) -> dict[str, list[int]]:
    """Have the disk hold all of a tree; returns the size in bytes and the crc32 of each file."""
    files: dict[str, list[int]] = {}
    for folder, _, names in os.walk(tree):
        for path in [Path(folder) / name for name in sorted(names)]:
            _fsync(path)
            files[path.relative_to(tree).as_posix()] = [path.stat().st_size, _file_crc32(path)]
        _fsync(Path(folder))
    return files


def _file_crc32(path: Path) -> int:
    crc32 = 0
    with path.open("rb", buffering=0) as handle:
        while block := handle.read(1 << 20):
            crc32 = zlib.crc32(block, crc32)
    return crc32


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _commit(part: Path, path: Path) -> None:
    part.rename(path)
    _fsync(path.parent)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    text = str(error).strip()
    if code := re.search(r"os_error_code='(\d+)'", text):  # tensorstore's way to say it, at the end of a long story
        return os.strerror(int(code[1]))
    return f"{type(error).__name__}: {text if len(text) <= 400 else f'{text[:200]} ... {text[-200:]}'}"


# ---- the manifest ----------------------------------------------------------------------------------------------------


def _plain(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The value as JSON would give it back; refused if that is another value."""
    value = dict(value)
    try:
        same = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"`{name}` cannot be saved as JSON: {error}. It is {value!r}") from error
    if same != value:
        text = "JSON would change it (a tuple to a list, a key to a string, or a NaN)"
        raise CheckpointError(f"`{name}` is not plain JSON: {text}. It is {value!r}")
    return same


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _write_manifest(part: Path, body: dict[str, Any]) -> None:
    body = {**body, "files": _flush(part)}
    text = json.dumps({"format": _FORMAT, "sha256": _digest(body), "body": body})
    (part / "manifest.json").write_text(text, encoding="ascii")
    _fsync(part / "manifest.json")
    _fsync(part)


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there in full length."""
    file = path / "manifest.json"
    try:
        whole = json.loads(file.read_text(encoding="ascii"))
        version, digest, body = whole["format"], whole["sha256"], whole["body"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damaged(f"{file}: cannot be read: {_reason(error)}") from error
    if version != _FORMAT:
        raise CheckpointError(
            f"{file}: has format {version!r}; this jdist reads {_FORMAT}. Use the jdist that saved it"
        )
    if digest != _digest(body):
        raise _Damaged(f"{file}: its checksum does not match")
    for name, (size_bytes, _) in body["files"].items():
        try:
            there_bytes = (path / name).stat().st_size
        except OSError as error:
            raise _Damaged(f"{path / name}: {_reason(error)}") from error
        if there_bytes != size_bytes:
            raise _Damaged(f"{path / name}: has {there_bytes:,} bytes of {size_bytes:,}")
    return body


# ---- leaves ----------------------------------------------------------------------------------------------------------


def _flatten(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise CheckpointError("two leaves of the tree have the same path; give its nodes distinct keys")
    return flat


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _described(path: str, leaf: Any) -> dict[str, Any]:
    """What a leaf is, for the manifest and for comparing: a number of Python's own has a dtype as "python int"."""
    if type(leaf) in _SCALARS:
        return {"path": path, "shape": [], "dtype": f"python {type(leaf).__name__}"}
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)):
        known = _is_key(leaf) or jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_
        if known:
            impl = {"key": str(jax.random.key_impl(leaf))} if _is_key(leaf) and isinstance(leaf, jax.Array) else {}
            return {"path": path, "shape": list(leaf.shape), "dtype": str(leaf.dtype), **impl}
    dtype = getattr(leaf, "dtype", "")
    raise CheckpointError(
        f"leaf {path} is a {type(leaf).__name__} {dtype}: only arrays, PRNG keys and numbers are saved"
    )


def _check_savable(path: str, leaf: Any) -> None:
    _described(path, leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise CheckpointError(f"leaf {path} is a ShapeDtypeStruct, which has no value to save")
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        raise CheckpointError(f"leaf {path} is {leaf}: an integer must fit in 64 bits")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise DonatedStateError(f"leaf {path} was donated to a step already: save the state that the step returned")
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            text = "is spread over processes, which cannot be saved yet: gather it, or keep it replicated"
            raise CheckpointError(f"leaf {path} {text}. Its sharding is {leaf.sharding}")


def _host_copy(leaf: Any) -> np.ndarray:
    """A copy that is nobody else's: a view of a CPU buffer would make the next step's donation copy instead."""
    if not isinstance(leaf, jax.Array):
        return np.array(leaf, order="C")
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    copy = np.empty(leaf.shape, leaf.dtype)
    if leaf.is_fully_replicated:
        copy[...] = np.asarray(leaf.addressable_data(0))
    else:
        shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        for shard in shards:
            shard.data.copy_to_host_async()
        for shard in shards:
            copy[shard.index] = np.asarray(shard.data)
    return copy


def _bits(array: np.ndarray) -> np.ndarray:
    """As orbax can store it: it does not know every one-byte type of JAX (uint4, some float8), so those as bytes."""
    return array.view(np.uint8) if array.dtype.kind == "V" and array.dtype.itemsize == 1 else array


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


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
    needed_bytes, disk = sum(array.nbytes for array in arrays), shutil.disk_usage(folder)
    if disk.total and disk.free < needed_bytes:  # some file systems report nothing at all
        text = f"{os.strerror(errno.ENOSPC)}: {needed_bytes:,} bytes needed, {disk.free:,} free"
        raise OSError(errno.ENOSPC, text, str(folder))


def _store_arrays(folder: Path, arrays: list[np.ndarray]) -> None:
    folder.mkdir()
    # Orbax refuses empty arrays; their shape says all there is to say. Not compressed: floats shrink by 8 % only.
    tree = {str(i): _bits(array) for i, array in enumerate(arrays) if array.size}
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
            if _file_crc32(path / name) != crc32:
                raise _Damaged(f"{path / name}: its checksum does not match")
        if stored:
            with _orbax() as handler:
                tree = handler.restore(path / "arrays", args=ocp.args.PyTreeRestore(restore_args=stored))
    except _Damaged:
        raise
    except Exception as error:
        raise _Damaged(f"{path / 'arrays'}: cannot be read: {_reason(error)}") from error
    arrays: list[np.ndarray] = []
    for i, leaf in enumerate(leaves):
        arrays.append(_as_saved(leaf, tree.get(str(i))))
        if _crc32(arrays[-1]) != leaf["crc32"]:
            raise _Damaged(f"{path / 'arrays'}: the checksum of leaf {leaf['path']} does not match")
    return arrays


def _as_saved(leaf: dict[str, Any], stored: np.ndarray | None) -> np.ndarray:
    dtype, shape = jnp.dtype(leaf["stored"]["dtype"]), tuple(leaf["stored"]["shape"])
    array = np.empty(shape, dtype) if stored is None else np.asarray(stored)
    array = array if array.dtype == dtype else array.view(dtype)
    if array.shape != shape:
        raise _Damaged(f"leaf {leaf['path']}: has shape {array.shape} instead of {shape}")
    return array


def _fit(path: Path, saved: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> list[int]:
    """Where each wanted leaf is among the saved ones; refuses a tree that is not the saved one."""
    places = {leaf["path"]: i for i, leaf in enumerate(saved)}
    names = {leaf["path"] for leaf in wanted}
    problems = [f"leaf {leaf['path']}: not in the checkpoint" for leaf in wanted if leaf["path"] not in places]
    problems += [f"leaf {name}: in the checkpoint, not in `like`" for name in places if name not in names]
    for leaf in wanted:
        there = saved[places[leaf["path"]]] if leaf["path"] in places else leaf
        shapes, dtypes = (there["shape"], leaf["shape"]), (there["dtype"], leaf["dtype"])
        # A counter that starts as Python's 0 comes back from the first step as an array: `_placed` converts it.
        number = shapes == ([], []) and any(d.startswith("python ") for d in dtypes) and "key<" not in "".join(dtypes)
        if shapes[0] != shapes[1] or (dtypes[0] != dtypes[1] and not number):
            problems.append(f"leaf {leaf['path']}: saved {dtypes[0]}{shapes[0]}, `like` has {dtypes[1]}{shapes[1]}")
    if problems:
        more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
        text = "\n  ".join([*problems[:5], *more])
        raise CheckpointError(f"{path}: does not fit `like`, which is left as it is:\n  {text}")
    return [places[leaf["path"]] for leaf in wanted]


def _placed(path: str, array: np.ndarray, key: str | None, like: Any) -> Any:
    """The saved value as a leaf like `like`."""
    if type(like) in _SCALARS:
        return type(like)(_cast(path, array, np.array(like).dtype).item())
    if key is not None:
        return jax.device_put(jax.random.wrap_key_data(jnp.asarray(array), impl=key), like.sharding)
    array = _cast(path, array, like.dtype)
    if isinstance(like, (np.ndarray, np.generic)):
        return array if isinstance(like, np.ndarray) else array[()]
    if like.weak_type and array.shape == ():
        # A Python number is the public way to a weak type; without it the resumed step compiles a second time.
        weak = jax.device_put(array.item(), like.sharding)
        if weak.dtype == like.dtype:
            return weak
    return jax.device_put(array, like.sharding)


def _cast(path: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Only a number of Python's own meets another dtype here; a float is rounded, as JAX does when it takes one."""
    cast = array.astype(dtype, copy=False)
    rounded = jnp.issubdtype(array.dtype, np.inexact) and jnp.issubdtype(dtype, np.inexact)
    if not rounded and cast.astype(array.dtype).tobytes() != array.tobytes():
        raise CheckpointError(f"leaf {path}: saved {array.dtype} {array}, which {dtype} cannot hold exactly")
    return cast
