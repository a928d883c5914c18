"""A run that can be killed at any moment and goes on."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Literal

from jdist.callbacks.callback import Callback, Moment, Resume
from jdist.callbacks.watched import check_evaluated, mode_of, value_of
from jdist.cluster.together import together
from jdist.errors import StepError
from jdist.remote import fetched, shapes_of
from jdist.report.files import first_free, writing
from jdist.train import Checkpointer, CheckpointWarning

PyTree = Any
_SET_ASIDE_S = 600.0


def checkpoint(
    directory: str | os.PathLike[str],
    *,
    every: int | None = 1000,
    keep: int = 3,
    best: str | None = None,
    mode: Literal["max", "min"] | None = None,
    resume: bool = True,
) -> Callback:
    """Saves state and data position, and goes on from the newest checkpoint where an earlier run left one.

    Args:
        directory: where to save; one for each run.
        every: how many steps lie between saves; None: only at the end, and with `best` after each evaluation. At the end
            always, also after an interrupt.
        keep: how many of the newest are kept.
        best: an evaluation's metric, such as "eval/accuracy": after each evaluation the state is saved, and the best is kept.
        mode: whether more ("max") or less ("min") of it is better; None: as the name says ("loss", "accuracy", "auc", ...).
        resume: False begins anew; a directory that is there is kept under another name, DIRECTORY.1.

    Returns:
        The callback. `jdist.train.Checkpointer(directory)` reads what it saved; where another callback keeps something with
        the state (`ema`), as {"state": ..., "callbacks": {name: ...}}.

    Raises:
        StepError: an argument is not allowed; while training: `best` was not measured.
        CheckpointError: while training: a checkpoint cannot be written, or does not fit the state.

    Source: `tf.keras.callbacks.ModelCheckpoint` and `BackupAndRestore`
    """
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise StepError(f"checkpoint: `every` is {every!r}; it must be a whole number of steps, 1 or more, or None.")
    if best is not None:
        check_evaluated("checkpoint", "best", best, ("eval/",))
    best_mode = "max" if best is None else mode_of("checkpoint", best, mode)
    opened: list[Checkpointer] = []
    saved = (0, 0)  # step and epochs

    def on_resume(moment: Moment) -> Resume | None:
        nonlocal saved
        saved = (0, 0)
        if not resume:
            with together("setting checkpoints aside", _SET_ASIDE_S, moment.strategy.cluster):
                if moment.is_chief and (old := Path(directory).absolute()).exists():
                    with writing(old):
                        old.rename(first_free(old))
        opened.append(
            Checkpointer(
                directory,
                keep=keep,
                best_metric=best,
                best_mode=best_mode,
                cluster=moment.strategy.cluster,
            )
        )
        kept = {name: each.get() for name, each in moment.kept.items()}
        restored = opened[0].restore(_joined(shapes_of(moment.state), kept))
        if restored is None:
            return None
        saved = (restored.step, int(restored.metadata.get("epoch", 0)))
        state = restored.state
        if kept:
            for name, each in moment.kept.items():
                each.put(state["callbacks"][name])
            state = state["state"]
        if restored.data is None:
            warnings.warn(
                f"{os.fspath(directory)}: step {restored.step} was saved without a position in the data, which a plain "
                "iterable does not have; the data begins anew.",
                CheckpointWarning,
                stacklevel=2,
            )
        return Resume(state=state, step=restored.step, data=restored.data, notes=restored.metadata)

    def save(moment: Moment, metrics: dict[str, float]) -> None:
        nonlocal saved
        saved = (moment.step, moment.epoch)
        kept = {name: each.get() for name, each in moment.kept.items()}
        moment.strategy.check(moment.state)
        state = _joined(fetched(moment.state), kept) if kept else moment.state
        opened[0].save(moment.step, state, data=moment.data(), metrics=metrics, metadata=moment.notes())

    def on_eval(moment: Moment) -> None:
        assert best is not None
        save(moment, {best: value_of("checkpoint", best, moment)})

    def on_step(moment: Moment) -> None:
        before = moment.step - moment.steps_in_call
        if every is not None and moment.step // every > before // every and moment.step > saved[0]:
            save(moment, {})

    def on_end(moment: Moment) -> None:
        if (moment.step, moment.epoch) > saved:
            save(moment, {})
        opened[0].wait()

    def close() -> None:
        while opened:
            opened.pop().close()

    return Callback(
        on_resume=on_resume,
        on_eval=None if best is None else on_eval,
        on_step=on_step,
        on_end=on_end,
        close=close,
        name="checkpoint",
        watches=() if best is None else (best,),
    )


def _joined(state: PyTree, kept: dict[str, PyTree]) -> PyTree:
    return {"state": state, "callbacks": kept} if kept else state
