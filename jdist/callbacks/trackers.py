"""The trackers that jdist knows: MLflow, TensorBoard, Trackio, Weights & Biases."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jdist.callbacks.callback import Callback
from jdist.callbacks.tracker import TIMEOUT_S, Started, Status, check_options, track
from jdist.errors import ConfigError
from jdist.support import checks
from jdist.support.signature import dotted, leaves


def _imported(name: str, *, extra: str | None = None) -> Any:
    """Imports a tracker's package, of an extra of its name unless `extra` says another."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        raise ConfigError(f"{extra or name}: {name} is not installed: pip install 'jdist[{extra or name}]'") from exc


def _picture(png: bytes) -> Any:
    return importlib.import_module("PIL.Image").open(io.BytesIO(png))


@dataclass
class _WandB:
    """Weights & Biases, by the functions that Trackio has too."""

    service: Any
    options: Mapping[str, Any]
    run: Any = None

    def start(self, run_id: str, config: Mapping[str, Any], *, resumed: bool) -> Started:
        name = self.options.get("id") or run_id
        # Several trackers and runs of one process go side by side.
        beginning = {"reinit": "create_new", "allow_val_change": True} | dict(self.options)
        self.run = self.service.init(**beginning | {"id": name, "resume": "allow", "config": dict(config)})
        return Started()

    def log(self, step: int, scalars: Mapping[str, float], images: Mapping[str, bytes]) -> None:
        values: dict[str, Any] = dict(scalars)
        for name, png in images.items():
            values[name] = self.service.Image(_picture(png))
        self.run.log(values, step=step)

    def finish(self, status: Status) -> None:
        self.run.finish(exit_code=0 if status == "finished" else 1)


def trackio(
    project: str = "jdist", *, config: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S, **options: Any
) -> Callback:
    """Logs each row to Trackio, with confusion matrices and curves as images.

    Args:
        project: where the run appears; `trackio show --project NAME` opens it.
        config: hyperparameters.
        timeout_s: how long the end of the run waits for what is not delivered yet.
        **options: for `trackio.init`: `name`, `group`, `space_id`, `server_url`, ...

    Raises:
        ConfigError: trackio is not installed: `pip install 'jdist[trackio]'`; or it has no such option.
    """
    service = _imported("trackio")
    check_options("trackio", service.init, options, own=("project", "resume"))
    return track(_Trackio(service, options, project=project), name="trackio", config=config, timeout_s=timeout_s)


@dataclass(kw_only=True)
class _Trackio(_WandB):
    project: str

    def start(self, run_id: str, config: Mapping[str, Any], *, resumed: bool) -> Started:
        options = {"embed": False} | dict(self.options) | {"project": self.project, "config": dict(config)}
        name, _, number = run_id.rpartition("/")
        if not resumed or not name:
            self.run = self.service.init(**options)
            return Started(run_id=f"{self.run.name}/{self.run.id}")
        # "allow": one that was killed before Trackio wrote its first row, half a second after it was given, is not there.
        self.run = self.service.init(**options | {"name": name, "resume": "allow"})
        logged = self._last_steps(name, number)
        # Trackio finds the newest run of a name; two of one name are told apart by their number.
        if self.run.id != number and logged != {}:
            self.run.finish()
            raise LookupError(f"another run is called {name!r} by now; give each run its own `name`")
        return Started(run_id=f"{name}/{self.run.id}", logged=logged)

    def finish(self, status: Status) -> None:
        self.run.finish()

    def _last_steps(self, name: str, number: str) -> dict[str, int] | None:
        """Reads the last step of each metric, where the run is on this machine."""
        if self.options.get("space_id") or self.options.get("server_url"):
            return None
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        steps: dict[str, int] = {}
        for row in storage.get_logs(self.project, name, run_id=number):
            steps |= {key: max(row["step"], steps.get(key, -1)) for key in row.keys() - {"step", "timestamp"}}
        return steps


_MODES = ("online", "offline", "disabled", "shared")


def wandb(*, config: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S, **options: Any) -> Callback:
    """Logs each row to Weights & Biases, with confusion matrices and curves as images.

    A run that goes on has the id that it had. In offline mode it leaves a folder for each process, which `wandb sync` puts
    together by that id.

    Args:
        config: hyperparameters.
        timeout_s: how long the end of the run waits for what is not delivered yet.
        **options: for `wandb.init`: `project`, `name`, `dir`, `mode="offline"`, ...

    Raises:
        ConfigError: wandb is not installed: `pip install 'jdist[wandb]'`; or it has no such option or mode.
    """
    service = _imported("wandb")
    check_options("wandb", service.init, options, own=("resume", "resume_from", "fork_from"))
    if options.get("mode") is not None:
        checks.choice("mode", options["mode"], _MODES, ConfigError, call="wandb")
    return track(_WandB(service, options), name="wandb", config=config, timeout_s=timeout_s)


_STATUS: Mapping[Status, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_TAG = "jdist.run_id"  # finds a run again after a kill has left no more than that
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
        experiment: made if it does not exist; None: MLFLOW_EXPERIMENT_NAME, else "Default".
        run_name: None: one that MLflow makes up.
        tags: of the run.
        config: hyperparameters, with dots between the names of levels.
        timeout_s: how long the end of the run waits for what is not delivered yet.

    Raises:
        ConfigError: mlflow is not installed: `pip install 'jdist[mlflow]'`; or does not know `tracking_uri`.
    """
    service = _imported("mlflow")
    try:
        client = service.MlflowClient(tracking_uri=tracking_uri)
    except service.MlflowException as exc:
        raise ConfigError(f"mlflow: `tracking_uri` is {tracking_uri!r}: {exc}") from exc
    tracker = _MLflow(service=service, client=client, experiment=experiment, run_name=run_name, tags=tags)
    return track(tracker, name="mlflow", config=config, timeout_s=timeout_s)


@dataclass(kw_only=True)
class _MLflow:
    service: Any
    client: Any
    experiment: str | None
    run_name: str | None
    tags: Mapping[str, str] | None
    run_id: str = ""

    def start(self, run_id: str, config: Mapping[str, Any], *, resumed: bool) -> Started:
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = self.client.get_experiment_by_name(name)
        number = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        if resumed and (there := self.client.search_runs([number], f"tags.`{_TAG}` = '{run_id}'")):
            self.run_id = there[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
            if not there[0].data.params:  # a kill came before them
                self._log_params(config)
            return Started(logged=self._last_steps())
        run = self.client.create_run(number, run_name=self.run_name, tags={**(self.tags or {}), _TAG: run_id})
        self.run_id = run.info.run_id
        self._log_params(config)
        return Started()

    def _log_params(self, config: Mapping[str, Any]) -> None:
        param = self.service.entities.Param
        params = [param(dotted(key), str(value)[:_LONGEST_PARAM]) for key, value in leaves(config)]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self.client.log_batch(self.run_id, params=params[first : first + _PARAMS_AT_ONCE])

    def log(self, step: int, scalars: Mapping[str, float], images: Mapping[str, bytes]) -> None:
        now_ms = int(time.time() * 1000)
        metric = self.service.entities.Metric
        if scalars:
            # The file store keeps a metric as a file, and "epoch" cannot be both that and the folder of "epoch/loss".
            scalars = {"epochs" if name == "epoch" else name: value for name, value in scalars.items()}
            values = [metric(name, value, now_ms, step) for name, value in scalars.items()]
            self.client.log_batch(self.run_id, metrics=values)
        for name, png in images.items():
            self.client.log_image(self.run_id, _picture(png), key=name, step=step)

    def finish(self, status: Status) -> None:
        self.client.set_terminated(self.run_id, status=_STATUS[status])

    def _last_steps(self) -> dict[str, int]:
        names = self.client.get_run(self.run_id).data.metrics
        histories = {name: self.client.get_metric_history(self.run_id, name) for name in names}
        steps = {
            "epoch" if name == "epochs" else name: max(each.step for each in points)
            for name, points in histories.items()
            if points
        }
        for file in self.client.list_artifacts(self.run_id, "images"):
            if found := _IMAGE.fullmatch(file.path):
                name = found["name"].replace("#", "/")
                steps[name] = max(int(found["step"]), steps.get(name, -1))
        return steps


def tensorboard(
    folder: str | os.PathLike[str], *, config: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S
) -> Callback:
    """Writes every number of each logged row as a scalar, confusion matrices and curves as images.

    Args:
        folder: for `tensorboard --logdir`.
        config: hyperparameters, shown as a text and in the HParams tab.
        timeout_s: how long the end of the run waits for what is not written yet.

    Raises:
        ConfigError: tensorboardX is not installed: `pip install 'jdist[tensorboard]'`.
    """
    return track(
        _Files(_imported("tensorboardX", extra="tensorboard"), Path(folder)),
        name="tensorboard",
        config=config,
        timeout_s=timeout_s,
    )


_CONFIG = "config/text_summary"  # what tensorboardX makes of the text "config"


@dataclass
class _Files:
    service: Any
    folder: Path
    writer: Any = None

    def start(self, run_id: str, config: Mapping[str, Any], *, resumed: bool) -> Started:
        logged = last_steps(self.folder) if resumed else {}
        # A run that is killed has its rows but for the last second's: the writer's thread flushes as often, and its `flush`
        # does not wait for that thread.
        self.writer = self.service.SummaryWriter(os.fspath(self.folder), flush_secs=1)
        if config and _CONFIG not in logged:
            values = {
                dotted(key): value if isinstance(value, bool | int | float | str) else str(value)
                for key, value in leaves(config)
            }
            for summary in importlib.import_module("tensorboardX.summary").hparams(values, {}):
                self.writer.file_writer.add_summary(summary)
            # Last: where a kill tears the file between them, the resumed run writes both.
            self.writer.add_text("config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```")
        return Started(logged=logged)

    def log(self, step: int, scalars: Mapping[str, float], images: Mapping[str, bytes]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        summary = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        for name, png in images.items():
            width, height = struct.unpack(">II", png[16:24])  # of the header that each PNG begins with
            image = summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
            self.writer.file_writer.add_summary(summary(value=[summary.Value(tag=name, image=image)]), step)

    def finish(self, status: Status) -> None:
        self.writer.close()


def last_steps(folder: Path) -> dict[str, int]:
    """Reads the last step of everything in the event files of a folder, also where a kill has torn a file's end."""
    event = importlib.import_module("tensorboardX.proto.event_pb2").Event
    steps: dict[str, int] = {}
    for path in sorted(folder.glob("*tfevents*")):
        for record in _records(path):
            read = event.FromString(record)
            for value in read.summary.value:
                steps[value.tag] = max(read.step, steps.get(value.tag, -1))
    return steps


def _records(path: Path) -> Iterator[bytes]:
    """Reads the records of a file in TFRecord's format: a length, its checksum, the bytes, their checksum."""
    with path.open("rb") as file:
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            record = file.read(length)
            if len(record) < length or len(file.read(4)) < 4:
                return
            yield record
