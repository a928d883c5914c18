"""Callbacks of a training run: checkpoints, early stopping, logs.

Start at `callback.Callback`, a value of plain functions, and `callback.Moment`, their argument. Other files make callbacks.
`tracker` has the protocol of experiment trackers, `trackers` those that jdist knows, and `delivery` the thread that rows reach
them by.

May import: checkpoint, report and what is below them.
"""

from typing import TYPE_CHECKING

from jdist.callbacks.callback import Callback as Callback
from jdist.callbacks.callback import Moment as Moment
from jdist.callbacks.callback import Resume as Resume
from jdist.callbacks.callback import Return as Return
from jdist.callbacks.callback import Stop as Stop
from jdist.callbacks.checkpoint import checkpoint as checkpoint
from jdist.callbacks.on_step import ema as ema
from jdist.callbacks.on_step import learning_rate_log as learning_rate_log
from jdist.callbacks.on_step import profiler as profiler
from jdist.callbacks.rows import csv as csv
from jdist.callbacks.rows import jsonl as jsonl
from jdist.callbacks.rows import progress as progress
from jdist.callbacks.stopping import early_stopping as early_stopping
from jdist.callbacks.stopping import nan_guard as nan_guard
from jdist.callbacks.tracker import Started as Started
from jdist.callbacks.tracker import Tracker as Tracker
from jdist.callbacks.tracker import TrackerWarning as TrackerWarning
from jdist.callbacks.tracker import track as track
from jdist.callbacks.trackers import mlflow as mlflow
from jdist.callbacks.trackers import tensorboard as tensorboard
from jdist.callbacks.trackers import trackio as trackio
from jdist.callbacks.trackers import wandb as wandb

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from jdist.support.tensorflow_names import unknown

        raise unknown("module 'jdist.callbacks'", name, globals())
