"""An evaluator's run of an experiment: the checkpoints of the job that trains, evaluated one after the other."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from jdist.checkpoint.evaluator import new_checkpoints
from jdist.cluster.stop import preemption
from jdist.core.strategy import Strategy
from jdist.experiment.config import Config
from jdist.experiment.load import Document
from jdist.experiment.prepare import make_eval_step, prepare, state_maker
from jdist.experiment.record import RunFolder
from jdist.loop.evaluate import measure
from jdist.report.metrics_file import MetricsFile, read_rows
from jdist.report.progress import figures
from jdist.strategies.by_name import make_strategy
from jdist.support.file_lock import is_held

_TIMEOUT_S = 300.0  # as long as processes may take to come together
_POLL_S = 1.0


def follow(config: Config, document: Document, *, console: Console | None = None) -> int:
    """Evaluates each checkpoint of a running job into its eval.jsonl; returns the exit code."""
    # The job never waits for this. It ends with the evaluation of the run's last step (0), on a
    # signal (130, 143), or when nobody has trained for five minutes. `config` was checked and its
    # `platform` applied.
    console = console or Console(soft_wrap=True)
    parts = prepare(config, document, make=_of_one_process)
    folder = RunFolder(Path(config.log.folder) / config.name)
    strategy, task, total = parts.strategy, parts.task, parts.total_steps
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(preemption())
        like = strategy.init(*state_maker(config, parts))
        eval_set = strategy.distribute_dataset(task.eval_data(parts.eval_batch))
        eval_step = make_eval_step(parts)
        file: MetricsFile | None = None
        for restored in new_checkpoints(
            folder.checkpoints,
            like,
            final_step=total,
            is_alive=lambda: is_held(folder.lock),
            is_over=lambda: stop.reason is not None,
            timeout_s=_TIMEOUT_S,
            poll_s=_POLL_S,
            known=[row["step"] for row in read_rows(folder.evaluations)],
        ):
            measured = measure(eval_step, restored.state, eval_set, metrics=task.metrics)
            if file is None:  # not before there is a checkpoint: the folder is the job's to make
                file = MetricsFile.open(folder.evaluations, step=sys.maxsize)
                stack.callback(file.close)
            file.write(restored.step, measured)
            line = f"step {restored.step}/{total}  evaluation: {figures(measured)}"
            console.print(line, markup=False, highlight=False, emoji=False)
            del restored  # not kept while the next is read
        return stop.exit_code


def _of_one_process(name: str, **options: Any) -> Strategy:
    """Makes the evaluator's strategy: of its own devices, also where the job runs on those of many processes."""
    return make_strategy("mirrored") if name == "multi_worker" else make_strategy(name, **options)
