"""One experiment from a checked config to its results; reads top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jdist.callbacks import Callback, Moment, Resume
from jdist.callbacks.checkpoint import saving
from jdist.callbacks.rows import reporting
from jdist.checkpoint import Checkpointer, CheckpointWarning
from jdist.checkpoint.evaluator import new_checkpoints
from jdist.cluster.environment import ATTEMPT
from jdist.cluster.runtime import together
from jdist.cluster.stop import preemption
from jdist.core.strategy import Strategy
from jdist.data.position import write_state
from jdist.data.sources.protocol import RandomAccessSource
from jdist.errors import NonFiniteError
from jdist.experiment.callbacks import check_watched, make_callbacks, watches_evaluation
from jdist.experiment.config import Config
from jdist.experiment.load import Document, describe
from jdist.experiment.prepare import Parts, make_eval_step, make_train_step, prepare, state_maker
from jdist.experiment.record import (
    Result,
    RunFolder,
    Start,
    changed_sources,
    checksums,
    differences_from,
    environment,
    open_folder,
    set_aside,
    write_result,
    write_start,
)
from jdist.experiment.resume import check_goes_on, check_init_from, check_same_config, check_same_run, init_from
from jdist.experiment.summary import arithmetic, non_finite_advice, results
from jdist.loop.data import open_feed
from jdist.loop.evaluate import Evaluation, measure
from jdist.loop.metric_totals import MetricTotals
from jdist.loop.report.curves import plot_curves
from jdist.loop.report.files import write_atomically
from jdist.loop.report.metrics_file import OF_ROWS, MetricsFile, Row, read_rows
from jdist.loop.report.progress import figures
from jdist.loop.run import Run
from jdist.loop.train import train as run_training
from jdist.strategies.by_name import make_strategy
from jdist.support.file_lock import is_held
from jdist.support.xla import compiled_in

_TOGETHER_S = 300.0  # as long as processes may take to come together
_POLL_S = 1.0
_PREPARE_S = 3600.0  # data may be fetched first; a process that is lost meanwhile is noticed anyway


def run(
    config: Config, document: Document, *, command: str, fresh: bool = False, original: Sequence[Start] = ()
) -> int:
    """Trains, evaluates, logs, saves and plots a config, or continues; returns the exit code."""
    # Every process of a cluster calls it. Process 0, the chief, reports, writes metrics and plots;
    # all make the steps, evaluate, save and stop together. `config` was checked and its `platform`
    # applied; `original` are the starts of a run that this one repeats; differences from it are
    # printed first.
    begun = time.monotonic()
    # What the config names, and the config with its defaults.
    with together("preparing the run", _PREPARE_S):
        parts = prepare(config, document)
        check_init_from(config.init_from, document)
    task, strategy, train, total = parts.task, parts.strategy, config.train, parts.total_steps
    cluster = strategy.cluster
    resolved = describe(parts.values, document, derived=parts.derived)
    with contextlib.ExitStack() as stack:
        file = None if cluster.is_chief else stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        console = Console(file=file, soft_wrap=True)

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, emoji=False)

        say(resolved)
        # From here on a signal is a wish: an exception while XLA compiles would crash the process.
        stop = stack.enter_context(preemption(cluster))
        say(arithmetic(config, parts))
        sources = {"training data": parts.train_data, "evaluation data": task.eval_data(parts.eval_batch)}
        here = environment(strategy, config.task.make, sources)
        if original:
            say(differences_from(original, here))
        folder = RunFolder(Path(config.log.folder) / config.name)
        callbacks = make_callbacks(config, parts.values, parts.learning_rate, document, folder.path)

        check_same_config(parts.values, cluster, _PREPARE_S)
        # The run folder, held by the chief until it ends.
        with together("opening the run folder", _PREPARE_S, cluster):
            if cluster.is_chief:
                is_first = fresh and os.environ.get(ATTEMPT, "0") == "0"  # the launcher's next attempts go on
                if is_first and (aside := set_aside(folder.path)) is not None:
                    say(f"moved the earlier run from {folder.path} to {aside}")
                stack.enter_context(open_folder(folder.path))
                check_same_run(folder, parts.values, document)
                if not folder.config.exists():
                    write_atomically(folder.config, resolved)  # first: it marks the folder as a run

        if config.platform.compilation_cache:
            stack.enter_context(compiled_in(folder.compiled, is_chief=cluster.is_chief))
        # State, data and steps, all laid out by the strategy.
        state = strategy.init(*state_maker(config, parts))
        if config.init_from is not None:
            # By process 0: what others see of a shared folder may be older.
            goes_on = cluster.exchange("whether the run goes on", folder.has_checkpoints(), _PREPARE_S)[0]
            state = state if goes_on else init_from(config.init_from, state, strategy, say)
        train_step, eval_step = make_train_step(config, parts), make_eval_step(parts)
        if watches_evaluation(config, callbacks):  # one batch shows what is measured, before training takes its time
            one_batch = iter(strategy.distribute_dataset(task.eval_data(parts.eval_batch), prefetch=0))
            evaluated = MetricTotals(task.metrics)
            with cluster.blocked():
                evaluated.note(eval_step(state, next(one_batch)))
                check_watched(config, callbacks, evaluated.newest(), document)

        # Training: the loop of `jdist.fit`, with the run folder as one of its callbacks.
        keep, best = config.checkpoint.keep, config.checkpoint.best
        mode = config.checkpoint.mode or "max"  # means nothing without `best`
        saves = saving(
            folder.checkpoints, every=config.checkpoint.every, keep=keep, best=best, best_mode=mode, of_run=True
        )
        record = _recording(saves, config, document, parts, folder, resolved=resolved, here=here, say=say)
        measures_epochs = any(callback.on_epoch is not None for callback in callbacks)
        evaluations = (config.eval.every, config.checkpoint.every if best else None, total)
        training = Run(
            strategy=strategy,
            train_step=train_step,
            feed=open_feed(
                parts.train_data,
                strategy,
                steps=total,
                steps_per_epoch=parts.steps_per_epoch,
                steps_per_call=train.steps_per_call,
            ),
            metrics=task.metrics,
            callbacks=[*callbacks, record, reporting(console, global_batch=train.global_batch)],
            steps=total,
            log_every=config.log.every,
            evaluate=Evaluation(
                step=eval_step,
                feed=open_feed(task.eval_data(parts.eval_batch), strategy),
                strategy=strategy,
                trained_by=strategy,
                metrics=task.metrics,
            ),
            eval_every=[every for every in evaluations if every is not None],
            measures_epochs=measures_epochs,
            begun=begun,
        )
        try:
            run_training(training, state, stop=stop, verify=train.verify, depth=0)
        except NonFiniteError as exc:
            good = (training.first or 0) + exc.step
            with Checkpointer(
                folder.checkpoints, keep=keep, best_metric=best, best_mode=mode, cluster=cluster
            ) as checkpoints:
                saved = max(checkpoints.steps(), default=0)
                # The state alone is that of this step: what callbacks keep, the totals of the epoch, and the place in data
                # that are not numbered have gone on.
                has_place = isinstance(parts.train_data, RandomAccessSource)
                keeps_nothing = not measures_epochs and all(callback.keeps is None for callback in callbacks)
                if good > saved and has_place and keeps_nothing:
                    data = write_state(parts.train_data, good)
                    checkpoints.save(good, train_step.last_state, data=data, wait=True)
                    saved = good
            length = {"total": parts.total_steps, "steps_per_call": train.steps_per_call}
            batch = parts.train_data.batch_at(good) if isinstance(parts.train_data, RandomAccessSource) else None
            advice = non_finite_advice(exc, good, saved, batch=batch, **length)
            raise NonFiniteError(advice, exc.leaf, good) from exc

        # The end, or a pause.
        step, first = training.step, training.first or 0
        if step == 0:
            say(f"stopped before the first of {total:,} steps, nothing to save; start with: {command}")
            return stop.exit_code
        rows = read_rows(folder.metrics) if cluster.is_chief else []
        if cluster.is_chief:
            say(plot_curves(rows, folder.curves, title=config.name))
        if skipped := train_step.num_skipped:
            say(f"{skipped:,} of {step - first:,} steps were left out, as a gradient was NaN or infinite")
        stopped = training.history.stopped if step < total else None
        if stopped is not None and stop.reason is not None:
            say(f"stopped at step {step:,} of {total:,} and saved; go on with: {command}")
            return stop.exit_code
        whole = strategy.fetch(training.state)
        if cluster.is_chief:
            write_result(folder, Result(step=step, state=checksums(whole), stopped=stopped))
        if stopped is not None:
            say(f"stopped at step {step:,} of {total:,}: {stopped}")
        say(f"finished: {step:,} steps, {parts.examples(step, train.global_batch):,} examples, {folder.path}")
        say(results(rows, task.baselines() if task.baselines else {}))
        return 0


def _recording(
    saves: Callback,
    config: Config,
    document: Document,
    parts: Parts,
    folder: RunFolder,
    *,
    resolved: str,
    here: dict[str, Any],
    say: Callable[[str], None],
) -> Callback:
    """Makes the callback that writes the run folder; `saves` handles its checkpoints."""
    total = parts.total_steps
    metrics = MetricsFile(folder.metrics)

    def on_resume(moment: Moment) -> Resume | None:
        assert saves.on_resume is not None
        with warnings.catch_warnings(record=True) as damaged:
            warnings.simplefilter("always", CheckpointWarning)
            restored = saves.on_resume(moment)
        for warning in damaged:
            say(f"warning: {warning.message}")
        if restored is None:
            return None
        step = restored.step
        check_goes_on(restored, folder, config, document, total=total)
        say(f"going on from step {step:,} of {total:,}, saved in {folder.checkpoints}")
        if changed := changed_sources(config.task.make, folder.source):
            those = "steps from here on are its" if step < total else "--fresh starts over with it"
            say(f"warning: the task's source has changed since then, and {those}: {', '.join(changed)}")
        rows = [_of_history(row, parts.steps_per_epoch) for row in read_rows(folder.metrics) if row["step"] <= step]
        return Resume(state=restored.state, step=step, data=restored.data, notes={**restored.notes, "rows": rows})

    def on_start(moment: Moment) -> None:
        nonlocal metrics
        step = moment.step
        with together("opening the metrics", _PREPARE_S, moment.strategy.cluster):
            if moment.is_chief:
                write_atomically(folder.config, resolved)
                if step < total:
                    write_start(folder, Start(step=step, total_steps=total, config=parts.values, environment=here))
                metrics = MetricsFile.open(folder.metrics, step=step)
        if step < total:
            say("compiling the train step")

    def on_row(moment: Moment) -> None:
        if moment.is_chief and moment.row is not None:
            step = moment.row["step"]
            examples = parts.examples(step, config.train.global_batch)
            measured = {name: value for name, value in moment.row.items() if name not in OF_ROWS}
            metrics.write(step, {"examples": examples, **measured, "time_s": moment.row["time_s"]})

    def close() -> None:
        try:
            if saves.close is not None:
                saves.close()
        finally:
            metrics.close()

    return dataclasses.replace(
        saves, on_resume=on_resume, on_start=on_start, on_row=on_row, close=close, folder=folder.path
    )


def _of_history(row: Row, steps_per_epoch: int | None) -> Row:
    """Converts a row of `metrics.jsonl` to one of the history."""
    epoch = 0 if steps_per_epoch is None else row["step"] // steps_per_epoch
    values = {name: math.nan if value is None else value for name, value in row.items() if name not in OF_ROWS}
    return {"step": row["step"], "epoch": epoch, "time_s": row.get("time_s", 0.0), **values}


def follow(config: Config, document: Document) -> int:
    """Evaluates each checkpoint of a running job into its eval.jsonl; returns the exit code."""
    # The job never waits for this. It ends with the evaluation of the run's last step (0), on a
    # signal (130, 143), or when nobody has trained for five minutes. `config` was checked and its
    # `platform` applied.
    console = Console(soft_wrap=True)
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
            timeout_s=_TOGETHER_S,
            poll_s=_POLL_S,
            known=[row["step"] for row in read_rows(folder.evaluations)],
        ):
            measured = measure(eval_step, restored.state, eval_set, metrics=task.metrics)
            assert measured is not None, "nothing stops it"
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
