"""Saves and restores by all processes of a job: each writes and reads its share, and process 0 commits.

No process takes a checkpoint that another finds damaged.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdist.checkpoint import folder as disk
from jdist.checkpoint import leaves as codec
from jdist.checkpoint.bucket import BucketError
from jdist.checkpoint.fit import Fit, Selection, check_has_values, fit
from jdist.checkpoint.folder import Damaged, Place
from jdist.checkpoint.job import Job
from jdist.checkpoint.locks import only_writer
from jdist.checkpoint.pieces import LocalLeaf, read_leaves, write_pieces
from jdist.cluster import failpoints
from jdist.cluster.failpoints import Point
from jdist.cluster.runtime import Runtime, together
from jdist.errors import CheckpointError


def save_together(
    directory: Place,
    body: dict[str, Any],
    leaves: list[LocalLeaf],
    *,
    cluster: Runtime,
    name: str,
    timeout_s: float,
    prune: Callable[[], None],
) -> None:
    """Writes a checkpoint, which is committed once all processes have written their part."""
    # Every process calls this, with the same `body`, without the leaves' pieces. `prune` removes
    # older checkpoints after the commit.
    path: Place = directory / f"step_{body['step']:08d}"
    part: Place | None = None
    committed = False
    try:
        with contextlib.ExitStack() as stack:
            with together(f"{name}: beginning to save", timeout_s, cluster):
                if cluster.is_chief:
                    stack.enter_context(only_writer(directory, timeout_s))
                    path = directory / disk.next_name(directory, body["step"])
                    part = disk.begin(path)
            # From process 0: the others' view of the folder may be old.
            path = directory / cluster.exchange(f"{name}: the name", path.name, timeout_s)[0]
            hidden = disk.part_of(path)
            with together(f"{name}: writing", timeout_s, cluster):
                local = _write_local(hidden, leaves, cluster.process_index)
            failpoints.reached(Point.IN_SAVE)
            notes = cluster.exchange(f"{name}: who wrote", local["note"], timeout_s)
            with together(f"{name}: committing", timeout_s, cluster):
                if cluster.is_chief:
                    others = [note for note in notes if note is not None]
                    disk.write_manifest(hidden, _complete(hidden, body, leaves, local, others))
                    disk.commit(hidden, path)
                    committed = True
                    prune()
        failpoints.reached(Point.AFTER_SAVE)
    except Exception as error:
        unreachable = isinstance(error, BucketError)
        if not committed and part is not None and not unreachable:
            disk.discard(part)  # else the next process removes it
        if isinstance(error, CheckpointError) and not unreachable:
            raise
        text = "cannot be written; the checkpoints saved before are untouched"
        if committed:
            text = "cannot remove leftovers of this or an older checkpoint; the save itself is complete"
        remedy = "Free or mend the disk" if isinstance(path, Path) else "Mend the bucket or the way to it"
        raise CheckpointError(f"{path}: {text}: {disk.describe_error(error)}. {remedy}.") from error


def _write_local(part: Place, leaves: list[LocalLeaf], process: int) -> dict[str, Any]:
    """Writes this process's pieces; processes other than 0 also write a note for process 0."""
    # Returns JSON values: the pieces of each leaf, the size of each file in bytes, and the note's
    # name.
    disk.check_room(part, sum(box.values.nbytes for leaf in leaves for box in leaf.boxes))
    file = part / f"pieces_{process}.bin"
    pieces = [[asdict(piece) for piece in each] for each in write_pieces(file, leaves)]
    written = {"pieces": pieces, "files": {file.name: disk.size_of(file)} if any(pieces) else {}}
    note = f"part_{process}.json" if process and written["files"] else None
    if note is not None:
        disk.write_json(part / note, written)
    return {**written, "note": note}


def _complete(
    part: Place, body: dict[str, Any], leaves: list[LocalLeaf], local: dict[str, Any], others: list[str]
) -> dict[str, Any]:
    """Completes the manifest's body by what all processes have written."""
    written = [local]
    for note in others:  # by name: a listing of a shared folder may be old
        written.append(json.loads((part / note).read_text()))
        (part / note).unlink()
    for number, (described, leaf) in enumerate(zip(body["leaves"], leaves, strict=True)):
        described["stored"] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        pieces = [piece for each in written for piece in each["pieces"][number]]
        described["pieces"] = sorted(pieces, key=lambda piece: list(piece["start"]))
    return {**body, "files": {name: size for each in written for name, size in each["files"].items()}}


def agree_on_paths(directory: Place, step: int | None, *, cluster: Runtime, name: str, timeout_s: float) -> list[Place]:
    """Lists the checkpoints to restore from, as process 0 sees them, in the order of saving; of `step` alone if given."""
    with together(f"{name}: listing", timeout_s, cluster):
        committed = [path.name for path in disk.list_committed(directory)] if cluster.is_chief else []
    answers = cluster.exchange(f"{name}: what there is", [committed, step], timeout_s)
    if any(each[1] != step for each in answers):
        listed = ", ".join(f"process {i}: {each[1]}" for i, each in enumerate(answers))
        raise CheckpointError(
            f"{directory}: the processes ask for different steps ({listed}). Give all of them the same `step`."
        )
    # By process 0: what others see of a shared folder may be older.
    paths = [directory / each for each in answers[0][0]]
    if step is None:
        return paths
    chosen = [path for path in paths if disk.step_of(path) == step]
    if not chosen:
        steps = sorted({disk.step_of(path) for path in paths})
        raise CheckpointError(f"{directory}: step {step} is not saved here; there are {steps}")
    return chosen


def read_together(
    paths: list[Place],
    like: dict[str, Any],
    problems: dict[str, str],
    *,
    selection: Selection,
    cluster: Runtime,
    name: str,
    timeout_s: float,
) -> tuple[dict[str, Any], list[Any], Fit] | None:
    """Reads the last checkpoint in which no process finds damage; all processes call this."""
    # Returns the manifest's body, the leaves, and the filled ones; None if no checkpoint can be
    # read. `problems` is filled with the faults of skipped checkpoints, by name. `paths` are the
    # same on all processes, in the order of saving.
    # First, so that a tree of the wrong kind is not mistaken for a damaged checkpoint.
    described = [codec.describe_leaf(path, leaf) for path, leaf in like.items()]
    for path in reversed(paths):
        found, problem = None, None
        with together(f"{name}: reading", timeout_s, cluster):
            try:
                found = _read(path, like, described, selection, timeout_s)
            except Damaged as error:
                problem = str(error)
        failpoints.reached(Point.IN_RESTORE)
        met = cluster.exchange(f"{name}: damage", problem, timeout_s)
        first = next((f"process {i}: {text}" for i, text in enumerate(met) if text is not None), None)
        if first is None:
            return found
        problems[path.name] = problem or first
    return None


def _read(
    path: Place, like: dict[str, Any], described: list[dict[str, Any]], selection: Selection, timeout_s: float
) -> tuple[dict[str, Any], list[Any], Fit]:
    """Reads a checkpoint onto the devices leaf by leaf: of whole leaves the host holds one at a time."""
    body = disk.read_manifest(path)
    fitted = fit(path, body["leaves"], described, selection)
    names, leaves = list(like), list(like.values())
    check_has_values(
        path, like, {name for name, number in zip(names, fitted.numbers, strict=True) if number is not None}
    )
    places = {number: i for i, number in enumerate(fitted.numbers) if number is not None}
    reading = read_leaves(path, body, {number: codec.needed(leaves[i]) for number, i in places.items()})
    placed: list[Any] = []

    def read_on() -> dict[int, np.ndarray] | None:
        jax.block_until_ready(placed)  # the host's arrays are kept until then
        placed.clear()
        return next(reading, None)

    begun_s = time.monotonic()
    while (arrays := Job(read_on).result(timeout_s, f"reading {path}", begun_s)) is not None:
        while arrays:
            number, array = arrays.popitem()
            i, key = places[number], body["leaves"][number].get("key")
            leaves[i] = codec.place(names[i], array, key, leaves[i])
            placed.append(leaves[i])
            del array  # not kept while the next is read
    return body, leaves, fitted
