"""Checkpoints of a run, from which it goes on after it was killed at any moment."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from jdist.callbacks.callback import Callback, Moment, Resume, Return
from jdist.callbacks.stopping import check_evaluated, mode_of, value_of
from jdist.checkpoint import Checkpointer, CheckpointWarning
from jdist.checkpoint.bucket import BucketPath, open_path
from jdist.checkpoint.checkpointer import Restored
from jdist.checkpoint.folder import Place
from jdist.checkpoint.locks import check_held
from jdist.cluster.runtime import together
from jdist.core.remote import fetched, shapes_of
from jdist.core.step_state import StepState, carrying
from jdist.errors import CheckpointError, StepError
from jdist.loop.report.files import first_free, writing
from jdist.loop.report.metrics_file import MetricsFile, Row, to_line, to_row
from jdist.loop.report.progress import numbers
from jdist.support import checks
from jdist.support.tracebacks import callers_level

_HISTORY = "history.jsonl"
_WAIT_S = 600.0


def checkpoint(
    directory: str | os.PathLike[str],
    *,
    every: int | None = 1000,
    keep: int = 3,
    best: str | None = None,
    mode: Literal["max", "min"] | None = None,
    restore_best: bool = False,
    resume: bool = True,
) -> Callback:
    """Saves state and data position, and goes on from the newest checkpoint of an earlier run.

    Args:
        directory: where to save, a folder or a bucket's URL (`s3://...`, `gs://...`); one for each run.
        every: how many steps lie between saves; None: only at the end, and with `best` after each evaluation. At the end
            always, also after an interrupt.
        keep: how many of the newest are kept.
        best: an evaluation's metric, such as "eval/accuracy": after each evaluation the state is saved, and the best is kept.
        mode: whether more ("max") or less ("min") of it is better; None: as the name says ("loss", "accuracy", "auc", ...).
        restore_best: at the end `jdist.fit` returns the state that is the best by `best`, read from its checkpoint; after an
            interrupt the newest. Under a parameter server it is on this process's host.
        resume: False starts over; an existing folder is kept under another name, DIRECTORY.1. A bucket has no other
            names: give another URL.

    Returns:
        The callback. `jdist.train.Checkpointer(directory)` reads what it saved. The rows of the run's history are next to
        the checkpoints, in `history.jsonl`.

    Raises:
        StepError: an argument is not allowed; while training: `best` was not measured.
        CheckpointError: while training: a checkpoint cannot be written, or does not fit the state.

    Source: `tf.keras.callbacks.ModelCheckpoint` and `BackupAndRestore`
    """
    if every is not None:
        every = checks.whole_number("every", every, StepError, unit="steps", call="checkpoint")
    keep = checks.whole_number("keep", keep, StepError, call="checkpoint")
    if best is not None:
        check_evaluated("checkpoint", "best", best, ("eval/",))
    best_mode = "max" if best is None else mode_of("checkpoint", best, mode)
    if restore_best and best is None:
        raise StepError("checkpoint: `restore_best` needs `best`, the name of a metric, such as best='eval/loss'.")
    return saving(
        directory,
        every=every,
        keep=keep,
        best=best,
        best_mode=best_mode,
        restore_best=restore_best,
        resume=resume,
    )


def saving(
    directory: str | os.PathLike[str],
    *,
    every: int | None,
    keep: int,
    best: str | None,
    best_mode: Literal["max", "min"],
    restore_best: bool = False,
    resume: bool = True,
    of_run: bool = False,
) -> Callback:
    """Makes the callback of `checkpoint` from checked arguments."""
    # `of_run`: the directory belongs to a `jdist run`: its history is in `metrics.jsonl`, an
    # evaluation alone saves nothing, and the last step is saved with its metrics.
    folder = open_path(directory, _WAIT_S)
    if isinstance(folder, BucketPath) and not resume:
        raise StepError(f"checkpoint: `resume=False` cannot rename {folder}, which is in a bucket; give another URL.")
    opened: list[Checkpointer] = []
    history: MetricsFile | _BucketHistory | None = None
    saved = (0, 0)  # step and epochs

    def on_resume(moment: Moment) -> Resume | None:
        nonlocal saved
        saved = (moment.step, moment.epoch) if moment.moves else (0, 0)
        cluster = moment.strategy.cluster
        if not resume and not moment.moves:
            with together("setting checkpoints aside", _WAIT_S, cluster):
                if moment.is_chief and isinstance(folder, Path) and folder.exists():
                    with writing(folder):
                        folder.rename(first_free(folder))
        checkpoints = Checkpointer(directory, keep=keep, best_metric=best, best_mode=best_mode, cluster=cluster)
        opened.append(checkpoints)
        checkpoints.claim()
        if moment.moves:
            begin_history(moment, moment.history.rows)
            return None
        kept = {name: each.get() for name, each in moment.kept.items()}
        try:
            restored = checkpoints.restore(carrying(shapes_of(moment.state), kept=kept))
        except CheckpointError as exc:
            if not of_run:
                exc.add_note(
                    "To start over, give `checkpoint` another directory, or `resume=False`, which renames this one."
                )
            raise
        notes: dict[str, Any] = {} if restored is None else dict(restored.metadata)
        if not of_run:
            notes["rows"] = rows = _rows_of(restored, folder / _HISTORY)
            begin_history(moment, rows)
        if restored is None:
            return None
        saved = (restored.step, int(restored.metadata.get("epoch", 0)))
        restored_kept = restored.state.kept
        has_beside = isinstance(moment.state, StepState)
        state = carrying(restored.state, kept=None) if has_beside else restored.state.user
        for name, each in moment.kept.items():
            # Leaves that a checkpoint lacks stay as given.
            pairs = zip(jax.tree.leaves(restored_kept[name]), jax.tree.leaves(kept[name]), strict=True)
            if any(leaf is given for leaf, given in pairs):
                text = f"step {restored.step} was saved without {name!r}, which begins with the state of that step."
                _warn(folder, text)
                each.begin(state)
            else:
                each.put(restored_kept[name])
        if restored.data is None and not of_run:
            _warn(folder, f"step {restored.step} was saved without a position in the data; the data starts over.")
        return Resume(state=state, step=restored.step, data=restored.data, notes=notes)

    def begin_history(moment: Moment, rows: list[Row]) -> None:
        nonlocal history
        if of_run:
            return
        with together("opening the history", _WAIT_S, moment.strategy.cluster):
            if moment.is_chief:
                place = folder / _HISTORY
                in_bucket = isinstance(place, BucketPath)
                history = _BucketHistory(place, rows) if in_bucket else MetricsFile.begin(place, rows)

    def save(moment: Moment) -> None:
        nonlocal saved
        saved = (moment.step, moment.epoch)
        state, notes = moment.state, moment.notes()
        moment.strategy.check(state)
        if moment.kept:
            state = carrying(fetched(state), kept={name: each.get() for name, each in moment.kept.items()})
        rows = notes.pop("rows")
        if not of_run:
            with together("saving the history", _WAIT_S, moment.strategy.cluster):
                if history is not None:  # of process 0
                    for row in rows[len(history.rows) :]:
                        history.write(row["step"], row)
                    history.sync()
            notes["rows"] = len(rows)
        evaluated = {name: value for name, value in (moment.row or {}).items() if name.startswith("eval/")}
        opened[0].save(moment.step, state, data=moment.data(), metrics=numbers(evaluated), metadata=notes)

    def on_save(moment: Moment) -> None:
        before = moment.step - moment.steps_in_call
        is_due = every is not None and moment.step // every > before // every
        if of_run and moment.step == moment.total_steps:
            is_due = True
        evaluates = best is not None and any(name.startswith("eval/") for name in moment.row or ())
        if best is not None and evaluates and (is_due or not of_run):
            value_of("checkpoint", best, moment)
            save(moment)
        elif is_due and moment.step > saved[0]:
            save(moment)

    def on_end(moment: Moment) -> Return | None:
        if (moment.step, moment.epoch) > saved:
            save(moment)
        opened[0].wait()
        if not restore_best or moment.interrupted or opened[0].best_step in (None, moment.step):
            return None
        best_save = opened[0].restore(shapes_of(moment.state), step=opened[0].best_step)
        return None if best_save is None else Return(best_save.state)

    def close() -> None:
        nonlocal history
        if history is not None:
            history.close()
            history = None
        while opened:
            opened.pop().close()

    return Callback(
        on_resume=on_resume,
        on_save=on_save,
        on_end=on_end,
        close=close,
        name="checkpoint",
        folder=folder,
        watches=() if best is None else (best,),
        logs=(),
    )


def _rows_of(restored: Restored | None, path: Place) -> list[Row]:
    """Reads the history's rows up to a checkpoint; of a damaged file those before the damage."""
    # After the damage, a line may not be the row that it counts as.
    if restored is None:
        return []
    count = int(restored.metadata.get("rows", 0))  # `jdist run` has its rows in metrics.jsonl
    rows: list[Row] = []
    for line in path.read_bytes().splitlines()[:count] if count and path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # no JSON, or no UTF-8
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    if len(rows) < count:
        _warn(path, f"has {len(rows):,} of the {count:,} rows up to step {restored.step}; the others are lost.")
    return rows


def _warn(path: Place, text: str) -> None:
    warnings.warn(f"{path}: {text}", CheckpointWarning, stacklevel=callers_level())


class _BucketHistory:
    """The rows of a run in a bucket, where nothing can be appended: the object is replaced at each checkpoint."""

    def __init__(self, path: BucketPath, rows: list[Row]):
        self._path = path
        self._written = 0
        self.rows = rows

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds a row."""
        self.rows.append(to_row(step, values))

    def sync(self) -> None:
        """Writes the rows, if there are new ones."""
        if self._written < len(self.rows):
            check_held(self._path.parent)
            self._path.write_text("".join(map(to_line, self.rows)))
            self._written = len(self.rows)

    def close(self) -> None:
        """Ends; rows that no checkpoint has counted would be dropped by the run that goes on."""
