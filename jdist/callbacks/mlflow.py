"""MLflow."""

from __future__ import annotations

import importlib
import io
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from jdist.callbacks.callback import Callback
from jdist.callbacks.tracker import TIMEOUT_S, Started, Status, flatten, track
from jdist.errors import ConfigError

_STATUS: Mapping[Status, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_TAG = "jdist.run_id"  # finds a run again of which a kill has left no more than that
_IMAGE = re.compile(r"images/(?P<name>[^%]+)%step%(?P<step>\d+)%.*\.png")  # of MLflow's log_image
_PARAMS_AT_ONCE = 100  # of MLflow's log_batch
_LONGEST_PARAM = 6000


def mlflow(
    *,
    tracking_uri: str | None = None,
    experiment: str | None = None,
    run_name: str | None = None,
    tags: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Callback:
    """Logs each row to MLflow, with confusion matrices and curves as images and hyperparameters as params.

    A run that goes on keeps the params that it began with. A row's "epoch" is the metric "epochs".

    Args:
        tracking_uri: a server or a database, such as "http://host:5000" or "sqlite:///mlflow.db"; None: MLflow's own choice,
            MLFLOW_TRACKING_URI first.
        experiment: made if there is none of that name; None: MLFLOW_EXPERIMENT_NAME, else "Default".
        run_name: None: one that MLflow makes up.
        tags: of the run.
        config: hyperparameters, with dots between the names of levels.
        timeout_s: how long the end of the run waits for what is not delivered yet.

    Returns:
        The callback.

    Raises:
        ConfigError: mlflow is not installed: `pip install 'jdist[mlflow]'`; or `tracking_uri` is none that it knows.

    Warns:
        TrackerWarning: while training: it cannot be reached, or refuses.
    """
    try:
        service = importlib.import_module("mlflow")
    except ModuleNotFoundError as exc:
        raise ConfigError("mlflow: it is not installed: pip install 'jdist[mlflow]'") from exc
    try:
        client = service.MlflowClient(tracking_uri=tracking_uri)
    except service.MlflowException as exc:
        raise ConfigError(f"mlflow: `tracking_uri` is {tracking_uri!r}: {exc}") from exc
    tracker = _Client(service, client, experiment=experiment, run_name=run_name, tags=tags)
    return track(tracker, name="mlflow", config=config, timeout_s=timeout_s)


class _Client:
    def __init__(
        self,
        service: Any,
        client: Any,
        *,
        experiment: str | None,
        run_name: str | None,
        tags: Mapping[str, str] | None,
    ):
        self._service = service
        self._client = client
        self._experiment = experiment
        self._run_name = run_name
        self._tags = tags
        self._run_id = ""

    def start(self, run_id: str, config: Mapping[str, Any], *, resumed: bool) -> Started:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        if resumed and (there := self._client.search_runs([number], f"tags.`{_TAG}` = '{run_id}'")):
            self._run_id = there[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            if not there[0].data.params:  # a kill came before them
                self._log_params(config)
            return Started(logged=self._last_steps())
        run = self._client.create_run(number, run_name=self._run_name, tags={**(self._tags or {}), _TAG: run_id})
        self._run_id = run.info.run_id
        self._log_params(config)
        return Started()

    def _log_params(self, config: Mapping[str, Any]) -> None:
        param = self._service.entities.Param
        params = [param(key, str(value)[:_LONGEST_PARAM]) for key, value in flatten(config).items()]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[first : first + _PARAMS_AT_ONCE])

    def log(self, step: int, scalars: Mapping[str, float], images: Mapping[str, bytes]) -> None:
        now_ms = int(time.time() * 1000)
        metric = self._service.entities.Metric
        if scalars:
            # The file store keeps a metric as a file, and "epoch" cannot be both that and the folder of "epoch/loss".
            scalars = {"epochs" if name == "epoch" else name: value for name, value in scalars.items()}
            values = [metric(name, value, now_ms, step) for name, value in scalars.items()]
            self._client.log_batch(self._run_id, metrics=values)
        for name, png in images.items():
            picture = importlib.import_module("PIL.Image").open(io.BytesIO(png))
            self._client.log_image(self._run_id, picture, key=name, step=step)

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._run_id, status=_STATUS[status])

    def _last_steps(self) -> dict[str, int]:
        names = self._client.get_run(self._run_id).data.metrics
        histories = {name: self._client.get_metric_history(self._run_id, name) for name in names}
        steps = {
            "epoch" if name == "epochs" else name: max(each.step for each in points)
            for name, points in histories.items()
            if points
        }
        for file in self._client.list_artifacts(self._run_id, "images"):
            if found := _IMAGE.fullmatch(file.path):
                name = found["name"].replace("#", "/")
                steps[name] = max(int(found["step"]), steps.get(name, -1))
        return steps
