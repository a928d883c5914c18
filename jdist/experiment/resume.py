"""Checks that a run may go on from a folder's checkpoints with a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdist.callbacks import Resume
from jdist.errors import ConfigError
from jdist.experiment.config import Config
from jdist.experiment.load import Document, Key, dotted, leaves, load
from jdist.experiment.record import RunFolder
from jdist.experiment.render import flow
from jdist.experiment.validate import refusal, validate
from jdist.support.checks import largest_divisor
from jdist.support.signature import Problem

# What may change from one start of a run to the next: where and on what it runs, how often it reports and
# saves, and how long it goes on. All else decides which parameters a step leads to.
FREE: tuple[Key, ...] = (
    ("name",),
    ("strategy",),
    ("train", "steps"),
    ("train", "epochs"),
    ("train", "accumulate"),
    ("train", "steps_per_call"),
    ("train", "non_finite"),
    ("train", "check_replicas"),
    ("train", "verify"),
    ("eval",),
    ("checkpoint",),
    ("callbacks",),
    ("log",),
    ("platform",),
)
_ABSENT = object()


def check_same_run(folder: RunFolder, values: Mapping[str, Any], document: Document) -> None:
    """Refuses to continue a run folder if its config describes another run."""
    # A folder without a checkpoint or a row of metrics may take any config.
    if not folder.config.exists() or not (folder.has_checkpoints() or folder.has_rows()):
        return
    there = validate(load(folder.config)).model_dump()  # fills in keys that are newer than the run
    then, now = dict(leaves(there)), dict(leaves(values))
    different = [
        f"  {dotted(key)}: {_text(then.get(key, _ABSENT))} there, {_text(now.get(key, _ABSENT))} now "
        f"({document.origin(key)})"
        for key in {**now, **then}
        if then.get(key, _ABSENT) != now.get(key, _ABSENT) and not any(key[: len(f)] == f for f in FREE)
    ]
    if not different:
        return
    lengths = [line for line in different if "_steps:" in line and "learning_rate" in line]
    remedy = (
        "Go on with the config as it was, take another name, or start again with --fresh, which keeps the old folder."
    )
    if lengths:
        remedy += " A schedule follows the length of the run unless its own length is given: give it as it was."
    raise ConfigError("\n".join([f"{folder.path}: holds a run with a different config:", *different, remedy]))


def check_goes_on(restored: Resume, folder: RunFolder, config: Config, document: Document, *, total: int) -> None:
    """Refuses a checkpoint from which a run of `total` steps cannot continue."""
    step, per_call = restored.step, config.train.steps_per_call
    if step > total:
        raise ConfigError(
            f"{folder.path}: this run has come to step {step:,} already, past the {total:,} steps asked for "
            f"({document.origin(('train', 'steps' if config.train.steps else 'epochs'))}). Ask for more, "
            "take another name, or start again with --fresh."
        )
    if (total - step) % per_call:
        text = f"{per_call} does not divide the {total - step:,} steps that are left"
        fits = largest_divisor(total - step, per_call)
        remedy = f" Say train.steps_per_call={fits}; a run that goes on may have another."
        raise refusal(document, [Problem(key=("train", "steps_per_call"), text=text, remedy=remedy)])
    if restored.data is None:
        raise ConfigError(
            f"{folder.checkpoints}: step {step:,} was saved without a data position, so not by `jdist run`. "
            "Take another name, or start again with --fresh."
        )


def _text(value: Any) -> str:
    return "not set" if value is _ABSENT else flow(value)
