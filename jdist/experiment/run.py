"""One experiment from a checked config to its results; reads top to bottom."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jdist.checkpoint import Checkpointer, CheckpointWarning
from jdist.cluster.environment import ATTEMPT
from jdist.cluster.runtime import alone, together
from jdist.cluster.stop import preemption
from jdist.data.sources.arrays import ArraySource
from jdist.data.sources.protocol import write_state
from jdist.errors import NonFiniteError
from jdist.experiment.check_best import check_best
from jdist.experiment.checksums import checksums
from jdist.experiment.config import Config
from jdist.experiment.due import Due
from jdist.experiment.environment import environment
from jdist.experiment.load import Document
from jdist.experiment.prepare import prepare
from jdist.experiment.record import RunFolder, open_folder, set_aside
from jdist.experiment.render import describe
from jdist.experiment.repeatable import Result, Start, differences_from, write_result, write_start
from jdist.experiment.resume import check_same_run, position_of
from jdist.experiment.sources import changed_sources
from jdist.experiment.step import make_eval_step, make_train_step, state_maker
from jdist.experiment.summary import arithmetic, non_finite_advice, results
from jdist.loop.data import has_to_fill_up
from jdist.loop.evaluation import measure
from jdist.loop.metric_totals import MetricTotals
from jdist.report.curves import plot_curves
from jdist.report.files import write_atomically
from jdist.report.metrics_file import MetricsFile, Row
from jdist.report.progress import Meter, figures, numbers, open_report

_PREPARE_S = 3600.0  # data may be fetched first; a process that is lost meanwhile is noticed anyway


def run(
    config: Config,
    document: Document,
    *,
    command: str,
    fresh: bool = False,
    original: Sequence[Start] = (),
    console: Console | None = None,
) -> int:
    """Train, evaluate, log, save and plot what a config describes; goes on where the run folder left off.

    Every process of a cluster calls it. Process 0, the chief, reports, writes metrics and plots; a step, an evaluation, a
    save and the wish to stop are everyone's.

    Args:
        config: the checked config; its `platform` has been applied.
        document: what the config was read from.
        command: the command line that starts this run, for messages.
        fresh: set an existing run folder aside and start again.
        original: the starts of a run that this one repeats; what is not as it was then is said first.
        console: where to report; standard output if None.

    Returns:
        The exit code: 0 at the end of the run, 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        JDistError: the config, the data, the run folder or a checkpoint is not right, or training failed.
    """
    # Everything that the config names, and the config as it was understood.
    with together("preparing the run", _PREPARE_S):
        parts = prepare(config, document)
    task, strategy, train, total = parts.task, parts.strategy, config.train, parts.total_steps
    cluster = strategy.cluster or alone()
    resolved = describe(parts.values, document, derived=parts.derived)
    with contextlib.ExitStack() as stack:
        if not cluster.is_chief:
            console = Console(file=stack.enter_context(open(os.devnull, "w", encoding="utf-8")))
        console = console or Console(soft_wrap=True)

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, emoji=False)

        say(resolved)
        # A signal is a wish from here on: an exception in the midst of a compilation by XLA ends the process in a crash.
        stop = stack.enter_context(preemption(cluster))
        say(arithmetic(config, parts))
        here = environment(parts, config.task.make)
        if original:
            say(differences_from(original, here))

        # The run folder, held by the chief until it ends.
        path = Path(config.log.folder) / config.name
        folder = RunFolder(path)
        with together("opening the run folder", _PREPARE_S, cluster):
            if cluster.is_chief:
                anew = fresh and os.environ.get(ATTEMPT, "0") == "0"  # the launcher's next attempts go on
                if anew and (aside := set_aside(path)) is not None:
                    say(f"the run that was in {path} is now in {aside}")
                stack.enter_context(open_folder(path))
                check_same_run(folder, parts.values, document)
                if not folder.config.exists():
                    write_atomically(folder.config, resolved)  # before all else: it marks the folder as a run

        # State, data and steps, all laid out by the strategy.
        state = strategy.init(*state_maker(config, parts))
        train_set = strategy.distribute_dataset(parts.train_data, steps_per_call=train.steps_per_call)
        eval_set = strategy.distribute_dataset(task.eval_data(parts.eval_batch))
        train_step = make_train_step(config, parts)
        if isinstance(parts.train_data, ArraySource):
            train_step.verify_next(train.verify, pads=has_to_fill_up(parts.train_data, strategy, total))
        eval_step = make_eval_step(parts)

        # Where an earlier process of this run left off. A checkpoint also holds what compressed gradients left out.
        state = train_step.prepare(state, train_set.element_spec)
        checkpoints = stack.enter_context(
            Checkpointer(
                folder.checkpoints,
                keep=config.checkpoint.keep,
                best_metric=config.checkpoint.best,
                best_mode=config.checkpoint.mode or "max",  # without a best it means nothing
                check=strategy.check,
                cluster=cluster,
            )
        )
        with warnings.catch_warnings(record=True) as damaged:
            warnings.simplefilter("always", CheckpointWarning)
            restored = checkpoints.restore(state)
        for warning in damaged:
            say(f"warning: {warning.message}")
        step = saved = 0
        if restored is not None:
            position = position_of(restored, folder, config, document, total=total)
            state, step = restored.state, restored.step
            saved = step
            train_set.restore(position)
            say(f"going on from step {step:,} of {total:,}, saved in {folder.checkpoints}")
            if changed := changed_sources(config.task.make, folder.source):
                those = "steps from here on are its" if step < total else "--fresh begins anew with it"
                say(f"warning: the task's source has changed since then, and {those}: {', '.join(changed)}")
        cluster.at_step(step)
        metrics_file = MetricsFile(folder.metrics)
        with together("opening the metrics", _PREPARE_S, cluster):
            if cluster.is_chief:
                write_atomically(folder.config, resolved)
                if step < total:
                    write_start(folder, Start(step=step, total_steps=total, config=parts.values, environment=here))
                metrics_file = MetricsFile.open(folder.metrics, step=step)
        stack.callback(metrics_file.close)

        # The best checkpoint needs a metric that one batch shows to be there, before time is spent on training.
        if config.checkpoint.best is not None:
            one_batch = iter(strategy.distribute_dataset(task.eval_data(parts.eval_batch), prefetch=0))
            evaluated = MetricTotals(task.metrics)
            with cluster.blocked():
                evaluated.note(eval_step(state, next(one_batch)))
                check_best(config, evaluated.newest(), document)

        # The loop. Steps run asynchronously: it waits for them only where it reports, evaluates or saves.
        earlier_s = metrics_file.rows[-1].get("time_s", 0.0) if metrics_file.rows else 0.0
        meter = Meter(step=step, total=total, global_batch=train.global_batch, earlier_s=earlier_s)
        batches = iter(train_set)
        first = step
        tally = MetricTotals(task.metrics, steps_per_call=train.steps_per_call)
        if step < total:
            say("compiling the train step")
        report = stack.enter_context(contextlib.closing(open_report(console, step=step, total=total)))
        try:
            while step < total and not stop.stops_after(step):
                now = Due(before=step, step=step + train.steps_per_call, total=total)
                state, metrics = train_step(state, next(batches))
                step = now.step
                tally.note(metrics)
                if now.before == first:  # holds the compilation: a lap of its own
                    train_step.wait()
                    meter.lap(step)
                log, save = now(config.log.every), now(config.checkpoint.every)
                hold_out = now(config.eval.every) or (save and config.checkpoint.best is not None)
                if not (log or save or hold_out):
                    continue
                train_step.wait()  # a step that was not finite is known now, before anything is written
                row: Row = {}
                if log:
                    with cluster.blocked():
                        row |= tally.newest()
                    report.train(step, row, meter.lap(step))
                train_s = meter.train_s
                with meter.stopped():
                    measured = measure(eval_step, state, eval_set, cluster, task.metrics) if hold_out else {}
                    if hold_out:
                        report.note(f"step {step}/{total}  evaluation: {figures(measured)}")
                        row |= {f"eval/{name}": value for name, value in measured.items()}
                    if row and cluster.is_chief:
                        seen = {"examples": parts.examples(step, train.global_batch)}
                        metrics_file.write(step, seen | row | {"time_s": round(train_s, 3)})
                    if save:
                        checkpoints.save(step, state, data=train_set.state(), metrics=numbers(measured))
                        saved = step
            train_step.wait()
        except NonFiniteError as exc:
            good = first + exc.step
            if good > saved:
                data = write_state(parts.train_data, good)
                checkpoints.save(good, train_step.last_state, data=data, metrics={}, wait=True)
            raise NonFiniteError(non_finite_advice(exc, good), exc.leaf, good) from exc

        # The end, or a pause.
        report.close()
        if step > saved:
            checkpoints.save(step, state, data=train_set.state(), metrics={})
        checkpoints.wait()
        if step == 0:
            say(f"stopped before the first of {total:,} steps, nothing to save; start with: {command}")
            return stop.exit_code
        if cluster.is_chief:
            say(plot_curves(metrics_file.rows, folder.curves, title=config.name))
        if skipped := train_step.num_skipped:
            say(f"{skipped:,} of {step - first:,} steps were left out, as a gradient was NaN or infinite")
        if step < total:
            say(f"stopped at step {step:,} of {total:,} and saved; go on with: {command}")
            return stop.exit_code
        whole = strategy.fetch(state)
        if cluster.is_chief:
            write_result(folder, Result(step=step, state=checksums(whole)))
        say(f"finished: {total:,} steps, {parts.examples(total, train.global_batch):,} examples, {path}")
        say(results(metrics_file.rows, task.baselines() if task.baselines else {}))
        return 0
