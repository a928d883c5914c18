"""Rows of a run, a JSON object a line (`metrics.jsonl`, `eval.jsonl`, `history.jsonl`), and the names of metrics."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from jdist.errors import ConfigError
from jdist.loop.report.files import write_atomically, writing

Row = dict[str, Any]
Mode = Literal["min", "max"]  # whether less or more of a metric is better
# The parts of a run's time, and the name in rows of each part's share of it.
STARTUP, COMPILE, STEPS, INPUT = "startup", "compile", "steps", "input"
EVALUATION, CHECKPOINT, OTHER = "evaluation", "checkpoint", "other"
SHARES: Mapping[str, str] = {
    STEPS: "steps_share",
    INPUT: "input_wait_share",
    EVALUATION: "evaluation_share",
    CHECKPOINT: "checkpoint_share",
    COMPILE: "compile_share",
    STARTUP: "startup_share",
    OTHER: "other_share",
}
TRAINING = (STEPS, INPUT, OTHER)  # the parts of a loop that goes round undisturbed
# Names in rows other than metrics, and the prefixes of metrics of an evaluation or an epoch.
OF_ROWS = ("step", "epoch", "time_s", "examples")
# Names of what a run costs, in rows next to metrics; no two runs have the same.
COSTS = (*SHARES.values(), "steps_per_s", "mfu", "peak_memory_bytes", "goodput")
EVAL, EPOCH = "eval/", "epoch/"
PREFIXES = (EVAL, EPOCH)
_OF_ROW = {"step": int}  # what a row must have
_TEXTS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # of what JSON lacks


@dataclass
class MetricsFile:
    """A file of rows, open for appending once `open` or `begin` has made it."""

    path: Path
    # every row up to now, each a dict with "step" first
    rows: list[Row] = field(default_factory=list)
    _handle: IO[str] | None = None

    @classmethod
    def open(cls, path: Path, *, step: int) -> MetricsFile:
        """Opens a file to continue after `step` (0: a new run), and drops later rows."""
        return cls.begin(path, [row for row in read_rows(path) if row["step"] <= step])

    @classmethod
    def begin(cls, path: Path, rows: list[Row]) -> MetricsFile:
        """Opens a file that holds these rows and no others."""
        text = "".join(to_line(row) for row in rows)
        with writing(path):
            unchanged = path.exists() and path.read_bytes() == text.encode()
            if not unchanged:
                write_atomically(path, text)
            return cls(path, rows, path.open("a", encoding="utf-8"))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one row; it is in the file, complete, when this returns."""
        # NaN and infinities are written as null, which JSON lacks.
        if self._handle is None:
            raise ConfigError(f"{self.path}: the metrics of this run are closed already.")
        row = to_row(step, values)
        with writing(self.path):
            self._handle.write(to_line(row))
            self._handle.flush()
        self.rows.append(row)

    def sync(self) -> None:
        """Flushes the file to the disk."""
        if self._handle is not None:
            with writing(self.path):
                os.fsync(self._handle.fileno())

    def close(self) -> None:
        """Flushes the file to the disk and closes it."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with writing(self.path), handle:
                os.fsync(handle.fileno())


def read_rows(path: Path, *, needs: Mapping[str, type] = _OF_ROW) -> list[Row]:
    """Reads the rows of a file, which may be missing; drops a last line torn by a kill."""
    # Each row is a JSON object that has `needs`, by their types.
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}.") from exc
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _row(line, needs)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            named = " and ".join(f'"{name}"' for name in needs)
            raise ConfigError(f"{path}:{number}: not a JSON object with {named}. Mend or delete that line.")
    return rows


def _row(line: str, needs: Mapping[str, type]) -> Row | None:
    try:
        row = json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and all(isinstance(row.get(n), kind) for n, kind in needs.items()) else None


def to_row(step: int, values: Mapping[str, Any]) -> Row:
    """Makes a row of what was measured; NaN and infinities become null, as JSON has neither."""
    return {"step": step} | to_plain(dict(values), not_finite=lambda _: None)


def to_line(row: Row) -> str:
    """Makes the line of a row, with its end."""
    return json.dumps(row, allow_nan=False) + "\n"


def to_plain(value: Any, *, not_finite: Callable[[float], Any] = str) -> Any:
    """Converts numbers, arrays, dicts and lists for `json.dumps`: arrays to lists, NaN and infinities to text."""
    # `from_plain` inverts it, except for arrays. `not_finite` converts NaN and infinities.
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: to_plain(each, not_finite=not_finite) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each, not_finite=not_finite) for each in value]
    return not_finite(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(value: Any) -> Any:
    """Inverts `to_plain`."""
    if isinstance(value, dict):
        return {name: from_plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [from_plain(each) for each in value]
    return _TEXTS.get(value, value) if isinstance(value, str) else value


def row_from_plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a row of the history; a list was an array."""
    return {name: np.asarray(x) if isinstance(x, list) else x for name, x in from_plain(dict(row)).items()}


_LESS_NAMES = (
    "loss losses logloss error errors err inaccuracy misclassification perplexity ppl bits bpb bpc bpd nats nll xent bce "
    "kl kld divergence brier crps ece eer mse rmse nrmse msle rmsle mae mape smape wer cer fpr fnr fid fvd kid lpips regret"
)
_MORE_NAMES = (
    "acc accuracy auc prauc rocauc auroc auprc f1 precision recall sensitivity specificity "
    "iou miou dice psnr ssim bleu rouge meteor chrf ndcg mrr r2 reward"
)
NAMES = tuple(f"{_LESS_NAMES} {_MORE_NAMES}".split())


def _words(words: str) -> re.Pattern[str]:
    """Matches any of these as a whole word: letters next to it make another word ("stop"); `_`, `-` and digits do not."""
    return re.compile(rf"(?<![a-z])({'|'.join(words.split())})(?![a-z])")


_LESS = _words(rf"{_LESS_NAMES} cross_?entropy")
_MORE = _words(rf"{_MORE_NAMES} top[_-]?\d+ top[_-]?k")
# These reverse the others, or measure something else: neg_mean_squared_error, loss_scale.
_REVERSED = _words("neg negative minus inverse drop gap reduction improvement scale weight")


def better(metric: str) -> Mode | None:
    """Finds by its name whether less or more of a metric is better; a "score" may be either."""
    name = metric.rpartition("/")[2].lower()
    less, more = _LESS.search(name) is not None, _MORE.search(name) is not None
    return None if less == more or _REVERSED.search(name) else "min" if less else "max"
