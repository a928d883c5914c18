"""The save of a checkpoint by all processes of a job: each writes its pieces, and process 0 commits them."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jdist.checkpoint import folder as disk
from jdist.checkpoint.pieces import LocalLeaf, write_pieces
from jdist.cluster import failpoints
from jdist.cluster.failpoints import Point
from jdist.cluster.runtime import Runtime, together
from jdist.errors import CheckpointError


def save_together(
    directory: Path,
    body: dict[str, Any],
    leaves: list[LocalLeaf],
    *,
    cluster: Runtime,
    name: str,
    timeout_s: float,
    prune: Callable[[], None],
) -> None:
    """Writes a checkpoint, which is committed once all processes, each of which calls this, have written their part.

    Args:
        directory: of the checkpoints.
        body: of the manifest, without the leaves' pieces; the same on all.
        leaves: what this process writes of each.
        cluster: the processes.
        name: of the values that they exchange.
        timeout_s: the longest wait for another writer or process.
        prune: removes older checkpoints after the commit.

    Raises:
        CheckpointError: it cannot be written, here or on another process; nothing is committed then.
    """
    path = directory / f"step_{body['step']:08d}"
    part: Path | None = None
    committed = False
    try:
        with contextlib.ExitStack() as stack:
            with together(f"{name}: beginning to save", timeout_s, cluster):
                if cluster.is_chief:
                    stack.enter_context(disk.only_writer(directory, timeout_s))
                    path = path.with_name(f"{path.name}_save_{disk.next_number(directory):05d}")
                    part = path.with_name(f".saving_{path.name}")
                    part.mkdir()
            # From process 0: the others' view of the folder may be old.
            path = directory / cluster.exchange(f"{name}: the name", path.name, timeout_s)[0]
            hidden = path.with_name(f".saving_{path.name}")
            with together(f"{name}: writing", timeout_s, cluster):
                local = _write_local(hidden, leaves, cluster.process_index)
            failpoints.reached(Point.IN_SAVE)
            wrote = cluster.exchange(f"{name}: who wrote", bool(local["files"]), timeout_s)
            with together(f"{name}: committing", timeout_s, cluster):
                if cluster.is_chief:
                    others = [process for process, has_written in enumerate(wrote) if has_written and process]
                    disk.write_manifest(hidden, _complete(hidden, body, leaves, local, others))
                    disk.commit(hidden, path)
                    committed = True
                    prune()
        failpoints.reached(Point.AFTER_SAVE)
    except CheckpointError:
        raise
    except Exception as error:
        text = "cannot be written; the checkpoints saved before are untouched"
        if committed:
            text = "this or an older checkpoint cannot be tidied up, though the save itself is whole"
        elif part is not None:
            shutil.rmtree(part, ignore_errors=True)  # else the next process removes it
        raise CheckpointError(f"{path}: {text}: {disk.describe_error(error)}. Free or mend the disk.") from error


def _write_local(part: Path, leaves: list[LocalLeaf], process: int) -> dict[str, Any]:
    """Writes this process's pieces; of processes other than 0 also a note for process 0.

    Returns:
        As JSON holds it: the pieces of each leaf, and the size of each file in bytes.
    """
    disk.check_room(part, sum(box.values.nbytes for leaf in leaves for box in leaf.boxes))
    file = part / f"pieces_{process}.bin"
    pieces = [[asdict(piece) for piece in each] for each in write_pieces(file, leaves)]
    written = {"pieces": pieces, "files": {file.name: file.stat().st_size} if any(pieces) else {}}
    if process and written["files"]:
        disk.write_json(_note(part, process), written)
    return written


def _note(part: Path, process: int) -> Path:
    return part / f"part_{process}.json"


def _complete(
    part: Path, body: dict[str, Any], leaves: list[LocalLeaf], local: dict[str, Any], others: list[int]
) -> dict[str, Any]:
    """Completes the manifest's body by what all processes have written."""
    written = [local]
    for process in others:  # by name: a listing of a shared folder may be old
        written.append(json.loads(_note(part, process).read_text()))
        _note(part, process).unlink()
    for number, (described, leaf) in enumerate(zip(body["leaves"], leaves, strict=True)):
        described["stored"] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        pieces = [piece for each in written for piece in each["pieces"][number]]
        described["pieces"] = sorted(pieces, key=lambda piece: list(piece["start"]))
    return {**body, "files": {name: size for each in written for name, size in each["files"].items()}}


class Job:
    """A function on a thread of its own, so that a wait for it is bounded and runs in no event loop.

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
        finally:
            del self  # an error holds its frames, and these would hold it

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float, what: str, since_s: float | None = None) -> Any:
        """Returns the function's result, or raises its error, at most `timeout_s` after `since_s` (None: now)."""
        left_s = timeout_s if since_s is None else max(0.0, since_s + timeout_s - time.monotonic())
        try:
            result = self._future.result(left_s)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise CheckpointError(f"{what}: not done after {timeout_s:g} s (`timeout_s`); it goes on") from error
        finally:
            if self._future.done():
                self._thread.join()
            del self  # as in `_run`
        return result
