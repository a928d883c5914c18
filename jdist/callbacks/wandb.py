"""Weights & Biases."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping
from typing import Any

from jdist.callbacks.callback import Callback
from jdist.callbacks.tracker import TIMEOUT_S, Started, Status, check_options, track
from jdist.errors import ConfigError

_MODES = ("online", "offline", "disabled", "shared")


def wandb(*, config: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S, **options: Any) -> Callback:
    """Logs each row to Weights & Biases, with confusion matrices and curves as images.

    A run that goes on has the id that it had. In offline mode it leaves a folder for each process, which `wandb sync` puts
    together by that id.

    Args:
        config: hyperparameters.
        timeout_s: how long the end of the run waits for what is not delivered yet.
        **options: for `wandb.init`: `project`, `name`, `dir`, `mode="offline"`, ...

    Returns:
        The callback.

    Raises:
        ConfigError: wandb is not installed: `pip install 'jdist[wandb]'`; or it has no such option or mode.

    Warns:
        TrackerWarning: while training: it cannot be reached, or does not know the user.
    """
    try:
        service = importlib.import_module("wandb")
    except ModuleNotFoundError as exc:
        raise ConfigError("wandb: it is not installed: pip install 'jdist[wandb]'") from exc
    check_options("wandb", service.init, options, own=("resume", "resume_from", "fork_from"))
    if options.get("mode") not in (None, *_MODES):
        raise ConfigError(f"wandb: `mode` is {options['mode']!r}; allowed are {', '.join(_MODES)}.")
    return track(_Service(service, options), name="wandb", config=config, timeout_s=timeout_s)


class _Service:
    def __init__(self, service: Any, options: Mapping[str, Any]):
        self._service = service
        self._options = options
        self._run: Any = None

    def start(self, run_id: str, config: Mapping[str, Any], *, resumed: bool) -> Started:
        name = self._options.get("id") or run_id
        # Several trackers and runs of one process go side by side.
        beginning = {"reinit": "create_new", "allow_val_change": True} | dict(self._options)
        self._run = self._service.init(**beginning | {"id": name, "resume": "allow", "config": dict(config)})
        return Started()

    def log(self, step: int, scalars: Mapping[str, float], images: Mapping[str, bytes]) -> None:
        values: dict[str, Any] = dict(scalars)
        for name, png in images.items():
            picture = importlib.import_module("PIL.Image").open(io.BytesIO(png))
            values[name] = self._service.Image(picture)
        self._run.log(values, step=step)

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
