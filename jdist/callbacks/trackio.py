"""Trackio."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping
from typing import Any

from jdist.callbacks.callback import Callback
from jdist.callbacks.tracker import TIMEOUT_S, Started, Status, check_options, track
from jdist.errors import ConfigError


def trackio(
    project: str = "jdist", *, config: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S, **options: Any
) -> Callback:
    """Logs each row to Trackio, with confusion matrices and curves as images.

    Args:
        project: where the run appears; `trackio show --project NAME` opens it.
        config: hyperparameters.
        timeout_s: how long the end of the run waits for what is not delivered yet.
        **options: for `trackio.init`: `name`, `group`, `space_id`, `server_url`, ...

    Returns:
        The callback.

    Raises:
        ConfigError: trackio is not installed: `pip install 'jdist[trackio]'`; or it has no such option.

    Warns:
        TrackerWarning: while training: it cannot be reached, or refuses.
    """
    try:
        service = importlib.import_module("trackio")
    except ModuleNotFoundError as exc:
        raise ConfigError("trackio: it is not installed: pip install 'jdist[trackio]'") from exc
    check_options("trackio", service.init, options, own=("project", "resume"))
    return track(_Service(service, project, options), name="trackio", config=config, timeout_s=timeout_s)


class _Service:
    def __init__(self, service: Any, project: str, options: Mapping[str, Any]):
        self._service = service
        self._project = project
        self._options = options
        self._run: Any = None

    def start(self, run_id: str, config: Mapping[str, Any], *, resumed: bool) -> Started:
        options = {"embed": False} | dict(self._options) | {"project": self._project, "config": dict(config)}
        name, _, number = run_id.rpartition("/")
        if not resumed or not name:
            self._run = self._service.init(**options)
            return Started(run_id=f"{self._run.name}/{self._run.id}")
        # "allow": one that was killed before Trackio wrote its first row, half a second after it was given, is not there.
        self._run = self._service.init(**options | {"name": name, "resume": "allow"})
        logged = self._last_steps(name, number)
        # Trackio finds the newest run of a name; two of one name are told apart by their number.
        if self._run.id != number and logged != {}:
            self._run.finish()
            raise LookupError(f"another run is called {name!r} by now; give each run its own `name`")
        return Started(run_id=f"{name}/{self._run.id}", logged=logged)

    def log(self, step: int, scalars: Mapping[str, float], images: Mapping[str, bytes]) -> None:
        values: dict[str, Any] = dict(scalars)
        for name, png in images.items():
            picture = importlib.import_module("PIL.Image").open(io.BytesIO(png))
            values[name] = self._service.Image(picture)
        self._run.log(values, step=step)

    def finish(self, status: Status) -> None:
        self._run.finish()

    def _last_steps(self, name: str, number: str) -> dict[str, int] | None:
        """Reads the last step of each metric, where the run is on this machine."""
        if self._options.get("space_id") or self._options.get("server_url"):
            return None
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        steps: dict[str, int] = {}
        for row in storage.get_logs(self._project, name, run_id=number):
            steps |= {key: max(row["step"], steps.get(key, -1)) for key in row.keys() - {"step", "timestamp"}}
        return steps
