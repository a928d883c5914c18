"""The beginning of a run: the checkpoints of its own folder, or weights that its config names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jdist.callbacks import Resume
from jdist.checkpoint import Checkpointer, CheckpointWarning
from jdist.checkpoint.folder import list_committed
from jdist.checkpoint.leaves import flatten
from jdist.cluster.runtime import Runtime
from jdist.core.step_state import pack
from jdist.core.strategy import Strategy
from jdist.errors import CheckpointError, ConfigError
from jdist.experiment.config import Config, InitSection
from jdist.experiment.load import Document, differences, flow, leaves, load
from jdist.experiment.prepare import import_function
from jdist.experiment.record import RunFolder
from jdist.experiment.validate import refusal, validate
from jdist.support.checks import largest_divisor
from jdist.support.signature import Key, Problem, dotted
from jdist.typing import PyTree
from jdist.weights.files import has_files
from jdist.weights.load import load_part

# What may change from one start of a run to the next: where and on what it runs, how often it reports and
# saves, and how long it goes on. All else decides which parameters a step leads to.
FREE = (
    *("name", "strategy", "eval", "checkpoint", "callbacks", "log", "platform"),
    *("train.steps", "train.epochs", "train.accumulate", "train.steps_per_call"),
    *("train.non_finite", "train.check_replicas", "train.verify"),
)

_INIT: Key = ("init_from",)
_MOST_NAMED = 5
_OPTION = re.compile(r"`(only|rename|skip_mismatch|rules)`")


def check_same_run(folder: RunFolder, values: Mapping[str, Any], document: Document) -> None:
    """Refuses to continue a run folder if its config describes another run."""
    # A folder without a checkpoint or a row of metrics may take any config.
    if not folder.config.exists() or not (folder.has_checkpoints() or folder.has_rows()):
        return
    there = validate(load(folder.config)).model_dump()
    different = [
        f"  {dotted(key)}: {flow(then)} there, {flow(now)} now ({document.origin(key)})"
        for key, (then, now) in differences(there, values, missing="not set").items()
        if not any(f"{dotted(key)}.".startswith(f"{free}.") for free in FREE)
    ]
    if not different:
        return
    lengths = [line for line in different if "_steps:" in line and "learning_rate" in line]
    remedy = "Go on with the old config, choose another name, or start again with --fresh, which keeps the old folder."
    if lengths:
        remedy += " A schedule follows the length of the run unless its own length is given: give its old length."
    raise ConfigError("\n".join([f"{folder.path}: holds a run with a different config:", *different, remedy]))


def check_same_config(values: Mapping[str, Any], cluster: Runtime, timeout_s: float) -> None:
    """Refuses a job with processes that were started with different configs; `platform` may differ."""
    texts = {dotted(key): flow(value) for key, value in leaves(values) if key[0] != "platform"}
    first, *others = cluster.exchange("the config", texts, timeout_s)
    for process, other in enumerate(others, 1):
        different = [
            f"{dotted(key)} is {there} on process 0, and {here} on process {process}"
            for key, (there, here) in differences(first, other).items()
        ]
        if different:
            raise ConfigError(
                f"the configs of the processes differ: {'; '.join(different[:_MOST_NAMED])}. Start all processes with one "
                "config and the same overrides."
            )


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


def check_init_from(section: InitSection | None, document: Document) -> None:
    """Raises a `ConfigError` if what a run is to begin with is not there, or options of another kind are given."""
    if section is None:
        return
    path, problems = Path(section.path).expanduser(), []
    checkpoints = _checkpoints_in(path)
    if checkpoints is None and not has_files(path):
        text = f"{path.absolute()} has no checkpoint of a run and no safetensors, or is not there"
        problems.append(Problem(key=(*_INIT, "path"), text=text))
    elif checkpoints is None and section.rename is not None:
        text = "is for checkpoints; for safetensors use `rules`, which map tensors to leaves"
        problems.append(Problem(key=(*_INIT, "rename"), text=text))
    elif checkpoints is not None and section.rules is not None:
        text = f"is for safetensors, and {path} holds checkpoints; for these use `rename`"
        problems.append(Problem(key=(*_INIT, "rules"), text=text))
    if section.rules is not None:
        try:
            import_function(section.rules)
        except (ConfigError, ImportError) as exc:
            problems.append(Problem(key=(*_INIT, "rules"), text=str(exc)))
    if problems:
        raise refusal(document, problems)


def init_from(section: InitSection, state: PyTree, strategy: Strategy, say: Callable[[str], None]) -> PyTree:
    """Replaces leaves of a new state by a checkpoint's or safetensors'; all processes call it."""
    # `state` is laid out by the strategy. `say` prints a line about leaves that keep their values.
    path = Path(section.path).expanduser()
    with warnings.catch_warnings(record=True) as passed_over:
        warnings.simplefilter("always", CheckpointWarning)
        try:
            loaded, new = _load(section, path, state, strategy)
        except CheckpointError as error:
            error.args = ("init_from: " + _OPTION.sub(r"`init_from.\1`", str(error)),)
            raise
    for warning in passed_over:
        say(f"warning: {warning.message}")
    count = len(flatten(pack(loaded)))
    named = ", ".join(new[:_MOST_NAMED]) + (f" and {len(new) - _MOST_NAMED} more" if len(new) > _MOST_NAMED else "")
    say(f"begins with {count - len(new)} of {count} leaves from {path}; new are {named or 'none'}")
    return loaded


def _load(section: InitSection, path: Path, state: PyTree, strategy: Strategy) -> tuple[PyTree, tuple[str, ...]]:
    """Returns the state with the loaded leaves, and the paths of the new ones."""
    # All by a pattern: None stands for a run that goes on.
    options: Any = {"only": ".*" if section.only is None else section.only, "skip_mismatch": section.skip_mismatch}
    checkpoints = _checkpoints_in(path)
    if checkpoints is None and has_files(path):
        rules = None if section.rules is None else import_function(section.rules)()
        return load_part(path, state, rules, cluster=strategy.cluster, **options)
    restored = None
    if checkpoints is not None:
        with Checkpointer(checkpoints, cluster=strategy.cluster) as reader:
            restored = reader.restore(state, rename=section.rename, **options)
    if restored is None:
        raise CheckpointError(
            f"{path}: had checkpoints when this run began, and has none now. Keep them until it trains."
        )
    return restored.state, restored.not_restored


def _checkpoints_in(path: Path) -> Path | None:
    """Finds the folder of checkpoints in a run folder, or that this is itself, or returns None."""
    folders = [folder for folder in (path / "checkpoints", path) if folder.is_dir()]
    return next((folder for folder in folders if list_committed(folder)), None)
