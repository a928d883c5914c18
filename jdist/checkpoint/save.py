"""The save of a checkpoint by all processes of a job: each writes its pieces, and process 0 commits them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jdist.checkpoint import folder as disk
from jdist.checkpoint.bucket import BucketError
from jdist.checkpoint.folder import Place
from jdist.checkpoint.locks import only_writer
from jdist.checkpoint.pieces import LocalLeaf, write_pieces
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
            text = "this or an older checkpoint cannot be tidied up, though the save itself is whole"
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
