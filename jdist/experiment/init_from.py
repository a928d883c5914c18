"""The weights that a run begins with, where its config names some."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jdist.checkpoint import Checkpointer, CheckpointWarning
from jdist.checkpoint.folder import list_committed
from jdist.checkpoint.leaves import flatten
from jdist.core.step_state import pack
from jdist.core.strategy import Strategy
from jdist.errors import CheckpointError, ConfigError
from jdist.experiment.config import InitSection
from jdist.experiment.load import Document, Key
from jdist.experiment.prepare import import_function
from jdist.experiment.validate import refusal
from jdist.support.signature import Problem
from jdist.weights.files import has_files
from jdist.weights.load import load_part

PyTree = Any
_KEY: Key = ("init_from",)
_MOST_NAMED = 5
_OPTION = re.compile(r"`(only|rename|skip_mismatch|rules)`")


def check_init_from(section: InitSection | None, document: Document) -> None:
    """Raises a `ConfigError` if what a run is to begin with is not there, or options of another kind are given."""
    if section is None:
        return
    path, problems = Path(section.path).expanduser(), []
    checkpoints = _checkpoints_in(path)
    if checkpoints is None and not has_files(path):
        text = f"{path.absolute()} has no checkpoint of a run and no safetensors, or is not there"
        problems.append(Problem(key=(*_KEY, "path"), text=text))
    elif checkpoints is None and section.rename is not None:
        text = "is for checkpoints; of safetensors `rules` say which tensor is which leaf"
        problems.append(Problem(key=(*_KEY, "rename"), text=text))
    elif checkpoints is not None and section.rules is not None:
        text = f"is for safetensors, and {path} holds checkpoints; for these there is `rename`"
        problems.append(Problem(key=(*_KEY, "rules"), text=text))
    if section.rules is not None:
        try:
            import_function(section.rules)
        except (ConfigError, ImportError) as exc:
            problems.append(Problem(key=(*_KEY, "rules"), text=str(exc)))
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
    """Returns the state with what is loaded, and the paths of its leaves that are new."""
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
    """Finds the folder of checkpoints in a run folder, or that this is itself; None if there is none."""
    folders = [folder for folder in (path / "checkpoints", path) if folder.is_dir()]
    return next((folder for folder in folders if list_committed(folder)), None)
