"""TensorBoard: rows as scalars, pictures, hyperparameters."""

from __future__ import annotations

import importlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jdist.callbacks.callback import Callback
from jdist.callbacks.tracker import TIMEOUT_S, Started, Status, flatten, track
from jdist.errors import ConfigError


def tensorboard(
    folder: str | os.PathLike[str], *, config: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S
) -> Callback:
    """Writes every number of each logged row as a scalar, confusion matrices and curves as images.

    Args:
        folder: for `tensorboard --logdir`.
        config: hyperparameters, shown as a text and in the HParams tab.
        timeout_s: how long the end of the run waits for what is not written yet.

    Returns:
        The callback.

    Raises:
        ConfigError: tensorboardX is not installed: `pip install 'jdist[tensorboard]'`.

    Warns:
        TrackerWarning: while training: the files cannot be written.
    """
    try:
        service = importlib.import_module("tensorboardX")
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "tensorboard: tensorboardX, which writes its files, is not installed: pip install 'jdist[tensorboard]'"
        ) from exc
    return track(_Files(service, Path(folder)), name="tensorboard", config=config, timeout_s=timeout_s)


_CONFIG = "config/text_summary"  # what tensorboardX makes of the text "config"


class _Files:
    def __init__(self, service: Any, folder: Path):
        self._service = service
        self._folder = folder
        self._writer: Any = None

    def start(self, run_id: str, config: Mapping[str, Any], *, resumed: bool) -> Started:
        logged = last_steps(self._folder) if resumed else {}
        # A run that is killed has its rows but for the last second's: the writer's thread flushes as often, and its `flush`
        # does not wait for that thread.
        self._writer = self._service.SummaryWriter(os.fspath(self._folder), flush_secs=1)
        if config and _CONFIG not in logged:
            values = {
                name: value if isinstance(value, bool | int | float | str) else str(value)
                for name, value in flatten(config).items()
            }
            for summary in importlib.import_module("tensorboardX.summary").hparams(values, {}):
                self._writer.file_writer.add_summary(summary)
            # Last: where a kill tears the file between them, the resumed run writes both.
            self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```")
        return Started(logged=logged)

    def log(self, step: int, scalars: Mapping[str, float], images: Mapping[str, bytes]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        summary = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        for name, png in images.items():
            width, height = struct.unpack(">II", png[16:24])  # of the header that each PNG begins with
            image = summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
            self._writer.file_writer.add_summary(summary(value=[summary.Value(tag=name, image=image)]), step)

    def finish(self, status: Status) -> None:
        self._writer.close()


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
