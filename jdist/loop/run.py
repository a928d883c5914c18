"""The training loop of `jdist.fit` and `jdist run`."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np

from jdist.callbacks.callback import Callback, Event, Keeps, Moment, Resume, Return, Stop
from jdist.checkpoint import CheckpointWarning
from jdist.cluster.stop import Preemption
from jdist.core.strategy import Strategy
from jdist.data.dataset import DistributedDataset
from jdist.errors import DatasetError, StepError
from jdist.loop import peaks
from jdist.loop.costs import Costs
from jdist.loop.data import Feed
from jdist.loop.evaluate import Evaluation
from jdist.loop.metric_totals import Measured, Metrics, MetricTotals
from jdist.loop.out_of_memory import naming_leaves, raise_out_of_memory
from jdist.loop.preflight import check_resumes, check_returned, check_watched, names_of
from jdist.report.history import History
from jdist.report.part_clock import CHECKPOINT, EVALUATION, OTHER
from jdist.report.plain import from_plain, to_plain
from jdist.report.progress import Meter
from jdist.report.times_file import Outcome
from jdist.step.base import Distributed
from jdist.step.options import Verify

PyTree = Any


class Run:
    """A run of `jdist.fit` or `jdist run`."""

    def __init__(
        self,
        *,
        strategy: Strategy,
        train_step: Distributed,
        feed: Feed,
        metrics: Metrics,  # as for `MetricTotals`
        callbacks: Sequence[Callback],  # called in this order
        steps: int | None,  # None: as many as `passes` have
        passes: int | None = None,  # over the data; None: as `steps` needs, or until the data ends
        log_every: int,
        evaluate: Evaluation | None,  # None: no evaluation data
        eval_every: Sequence[int],  # multiples of these steps; empty: the end of each epoch
        measures_epochs: bool = True,  # logs a row of means and metrics for each epoch
        length: str = "`steps`",  # the argument that sets the number of steps, for errors
        begun: float | None = None,  # seconds of `time.monotonic`; None: now
    ):
        self._strategy = strategy
        self._cluster = strategy.cluster
        self._train_step = train_step
        self._feed = feed
        self._metrics = metrics
        self._callbacks = callbacks
        self._steps = steps
        self._passes = passes
        self._total = steps if steps is not None else feed.num_steps
        self._log_every = log_every
        self._evaluate = evaluate
        self._eval_every = eval_every
        self._measures_epochs = measures_epochs
        self._length = length
        self._per_call = train_step.options.steps_per_call
        self._donates = train_step.options.donates_state
        self._resumed_per_call: int | None = None  # of the run that this one goes on with
        skips = train_step.options.non_finite == "skip" or train_step.options.loss_scaling is not None
        self._totals = MetricTotals(metrics, steps_per_call=self._per_call, skips=skips)
        self._kept = _keeps_by_name(callbacks)
        self._folder = next((each.folder for each in callbacks if each.folder is not None), None)
        self._functions: dict[Event, list[Any]] = {
            event: [f for c in callbacks if (f := getattr(c, f"on_{event}")) is not None] for event in get_args(Event)
        }
        self.state: PyTree = None
        # Steps done and epochs ended.
        self.step = self.epoch = self._before = 0
        # The step at which `train` began or resumed.
        self.first: int | None = None
        self._evaluated: int | None = None
        self.history = History()
        self._reason: str | None = None
        self._interrupted = False
        self._meter = Meter(step=0, total=None)
        self._begun = time.monotonic() if begun is None else begun

    def train(self, state: PyTree, *, stop: Preemption, verify: Verify, depth: int) -> None:
        """Trains to the end, from a state (consumed) or from an earlier process's checkpoint."""
        # `depth` counts the calls up to the user's own, for the location of warnings.
        self._stop = stop
        with contextlib.ExitStack() as ends:
            self._costs = Costs(self._strategy, begun=self._begun)
            ends.callback(self._costs.close)
            for callback in self._callbacks:
                if callback.close is not None:
                    ends.callback(callback.close)
            if isinstance(self._feed.batches, DistributedDataset):
                ends.callback(self._feed.batches.close)
            state = self._train_step.prepare(state, self._feed.batches.element_spec)
            tell = functools.partial(print, file=sys.stderr) if self._cluster.is_chief else None
            self._train_step.verify_next(verify, pads=self._feed.pads, tell=tell)
            if self._evaluate is not None:
                self._evaluate.step.verify_next(verify, pads=self._evaluate.feed.pads, tell=tell)
            self._preflight(state, depth + 1)
            outcome: Outcome = "failed"
            try:
                self._start(state, depth + 1)
                left = 0 if self._steps is None else max(self._steps - self.step, 0)
                # A pass may have ended in a shorter call, behind which a run goes on as one that was not interrupted does.
                is_begun = self._resumed_per_call == self._per_call and (self._steps or 0) % self._per_call == 0
                if left % self._per_call and not is_begun:
                    raise StepError(
                        f"{self._length} is {self._steps}, of which {left} are left: no multiple of "
                        f"steps_per_call={self._per_call}. Choose another number of steps, or another `steps_per_call`."
                    )
                self.first = self.step
                with naming_leaves(self._live):
                    self._go_round(stop)
                outcome = _outcome(self._reason, stop)
            finally:
                self._costs.end(outcome, self.step)

    def _go_round(self, stop: Preemption) -> None:
        """Goes round until the run is over, and ends it."""
        while not self._is_over(stop):
            for batch in self._until_stopped(stop):
                self._call(batch)
                if self._is_over(stop):
                    break
            else:
                if not self._is_over(stop):
                    self._end_pass()
        self.history.stopped = self._reason if stop.reason is None else f"by {stop.reason}"
        self._end(interrupted=stop.reason is not None)

    def _until_stopped(self, stop: Preemption) -> Iterator[PyTree]:
        """Yields the batches of a pass; after a signal to stop, a data error is a warning."""
        try:
            yield from self._costs.waits(self._feed.one_pass())
        except Exception as exc:
            # A terminal sends Ctrl-C to every process, also to readers of data, which end before
            # this one.
            if not stop.stops_after(self.step):
                raise
            # No one needs the batch: said, as it may be another error than that of a process which was told to end.
            warnings.warn(
                f"the data ended behind {stop.reason}: {type(exc).__name__}: {exc}", RuntimeWarning, stacklevel=1
            )

    def _preflight(self, state: PyTree, depth: int) -> None:
        """Checks the run against the traced steps, before anything is compiled."""
        trained = names_of(self._train_step, state, self._feed, self._metrics, depth=depth + 1)
        evaluated = frozenset() if self._evaluate is None else self._evaluate.names(state, depth=depth + 1)
        check_returned(self._metrics, trained, evaluated)
        check_resumes(self._callbacks, self._feed, depth=depth + 1)
        check_watched(self._callbacks, trained=trained, evaluated=evaluated, evaluates=self._evaluate is not None)

    def _is_over(self, stop: Preemption) -> bool:
        return self._reason is not None or self._is_complete() or stop.stops_after(self.step)

    def _is_complete(self) -> bool:
        """Whether no further pass over the data is wanted."""
        if self._steps is not None:
            return self.step >= self._steps
        if self._feed.steps_per_epoch is not None:
            return self._feed.num_steps is not None and self.step >= self._feed.num_steps
        return self._passes is not None and self.epoch >= self._passes

    def _start(self, state: PyTree, depth: int) -> None:
        """Begins with a state, or where a callback resumes an earlier run."""
        self.state = state
        for keeps in self._kept.values():
            keeps.begin(state)
        for function in self._functions["resume"]:
            answer = function(self._moment("resume", None))
            if isinstance(answer, Resume):
                self.state, self.step, self._before = answer.state, answer.step, answer.step
                self._restore_position(answer.data)
                self._restore_notes(answer.notes, depth + 1)
            else:
                self._act_on("resume", answer)
        self.history.steps = self.step
        self._totals.begin(self._train_step.count_left_out(self.state))
        earlier_s = self.history.rows[-1].get("time_s", 0.0) if self.history.rows else 0.0
        self._meter = Meter(step=self.step, total=self._total, earlier_s=earlier_s)
        ideal_step_s = peaks.ideal_step_s(self._train_step, self.state, self._feed.batches.element_spec)
        trains = self._reason is None and not self._is_complete()
        self._costs.begin(self.step, self._folder, ideal_step_s=ideal_step_s, trains=trains)
        self._call_back("start", None)
        self._cluster.at_step(self.step)

    def _restore_position(self, position: dict[str, Any] | None) -> None:
        try:
            self._feed.restore(position)
        except DatasetError as exc:
            exc.add_note(
                "jdist.fit found a checkpoint to go on from. Give `data`, `global_batch` and `shuffle_seed` as they were then, "
                "and no fewer `epochs`; or begin anew, in another directory or with `checkpoint(directory, resume=False)`."
            )
            raise

    def _restore_notes(self, notes: Mapping[str, Any], depth: int) -> None:
        """Restores what `_notes` has saved."""
        before, now = notes.get("steps_per_epoch"), self._feed.steps_per_epoch
        self.epoch = int(notes.get("epoch", self.step // now if now else 0))
        self._resumed_per_call = notes.get("steps_per_call")
        if "steps_per_epoch" in notes and before != now:
            were, are = ("a pass" if each is None else f"{each} steps" for each in (before, now))
            warnings.warn(
                f"the run that this one goes on with had epochs of {were}; from step {self.step} on they are of {are}, "
                "and are counted as if all had been. Give `data`, `global_batch` and `steps_per_epoch` as they were then to "
                "count on.",
                CheckpointWarning,
                stacklevel=depth + 1,
            )
        self.history.rows[:] = [_row_from_plain(row) for row in notes.get("rows", [])]
        if self.history.rows and any(name.startswith("eval/") for name in self.history.rows[-1]):
            self._evaluated = self.history.rows[-1]["step"]
        self._totals.restore(notes.get("tally", {}), self._cluster)

    def _live(self) -> dict[str, PyTree]:
        """Collects the trees that the run keeps on the devices, by name."""
        return {"state": self.state, **{name: keeps.get() for name, keeps in self._kept.items()}}

    def _notes(self) -> dict[str, Any]:
        self._train_step.wait()  # a step that was not finite is known before anything is written
        return {
            "epoch": self.epoch,
            "steps_per_epoch": self._feed.steps_per_epoch,
            "steps_per_call": self._per_call,
            "rows": to_plain(self.history.rows),
            "tally": self._totals.notes(self._cluster),
        }

    def _call(self, batch: PyTree) -> None:
        """Makes the steps of one call, and what is due after it."""
        count = 1 if self._per_call == 1 else np.shape(jax.tree.leaves(batch)[0])[0]
        before = self.state
        try:
            self.state, measured = self._train_step(before, batch)
        except jax.errors.JaxRuntimeError as exc:
            raise_out_of_memory(exc, {**self._live(), "batch": batch})
            raise
        self._before, self.step = self.step, self.step + count
        self.history.steps = self.step
        self._costs.called(self._train_step.newest_token, self.step, before if self._donates else None)
        del before
        per_epoch = self._feed.steps_per_epoch
        if not self._measures_epochs:
            self._totals.note(measured)
            self.epoch = self.epoch if per_epoch is None else self.step // per_epoch
            self._after_call(())
            return
        left_out = self._train_step.count_left_out(self.state)
        if per_epoch is None:
            self._totals.add(measured, batch, (self.epoch,) * count, left_out)
            self._after_call(())
        else:
            epochs = [i // per_epoch for i in range(self._before, self.step)]
            self._totals.add(measured, batch, epochs, left_out)
            self._after_call(range(self._before // per_epoch, self.step // per_epoch))

    def _end_pass(self) -> None:
        """Ends a pass over the data, and the epoch where each pass is one."""
        self._feed.end_pass()
        if self._feed.steps_per_epoch is None:
            self._before = self.step  # callbacks are called once for each step
            self._after_call((self.epoch,))

    def _end(self, *, interrupted: bool) -> None:
        """Evaluates the last state unless that is done, and calls `on_end`."""
        self._interrupted = interrupted
        self._train_step.wait()
        if self._evaluate is not None and self.history.stopped is None and self._evaluated != self.step:
            self._before = self.step
            if (measured := self._evaluate_state()) is None:
                self._interrupted, self.history.stopped = True, f"by {self._stop.reason}"
            else:
                row = self._add_to_row(None, "eval", measured)
                row.update(self._costs.row(self.step))
                self._call_back("eval", row, measured)
                self._log(row)
                self._save(row)
        moment = self._moment("end", None)
        for callback in self._callbacks:
            if callback.on_end is not None:
                saves = callback.on_save is not None
                with self._costs.during(CHECKPOINT, self.step) if saves else self._costs.clock.during(OTHER):
                    self._act_on("end", callback.on_end(moment))

    def _after_call(self, ended: Sequence[int]) -> None:
        """Does what is due after a call, or at the end of a pass, which has ended these epochs."""
        for epoch in ended[:-1]:  # of a call that spans several
            self._log_earlier_epoch(epoch)
        is_last = self._total is not None and self.step >= self._total and self.step > self._before
        row = self._make_step_row() if is_last or self._is_due(self._log_every) else None
        due: list[tuple[Event, Measured]] = []
        is_due = any(map(self._is_due, self._eval_every)) if self._eval_every else bool(ended)
        if self._evaluate is not None and is_due and (measured := self._evaluate_state()) is not None:
            due.append(("eval", measured))
        for epoch in ended[-1:]:
            self.epoch = epoch + 1
            due.append(("epoch", self._totals.take(epoch, self._cluster)[0]))
        for event, measured in due:  # whole before anyone sees it, or saves it
            row = self._add_to_row(row, event, measured)
        if row is not None:
            row.update(self._costs.row(self.step))
        for event, measured in due:
            self._call_back(event, row, measured)
        if self.step > self._before:
            self._call_back("step", row)
        self._log(row)
        self._save(row)

    def _make_step_row(self) -> dict[str, Any]:
        """Makes a row of the newest step's metrics."""
        if self._strategy.coordinator is None:  # workers are not kept waiting for each other
            self._train_step.wait()  # a step that was not finite is known before its row is written
        with self._cluster.blocked():
            return self._make_row(self._totals.newest())

    def _evaluate_state(self) -> Measured | None:
        """Evaluates the state; None if all are to stop meanwhile, as a machine that is taken away leaves no time for it."""
        assert self._evaluate is not None
        self._train_step.wait()
        with self._meter.stopped(), self._costs.during(EVALUATION, self.step):
            measured = self._evaluate(self.state, functools.partial(self._stop.stops_after, self.step))
        if measured is not None:
            self._evaluated = self.step
        return measured

    def _log_earlier_epoch(self, epoch: int) -> None:
        """Logs an epoch that has ended within a call, which goes on in a later one, in a row of its own."""
        self.epoch = epoch + 1
        measured, _ = self._totals.take(epoch, self._cluster)
        row = self._add_to_row(None, "epoch", measured)
        row["step"] = self.epoch * (self._feed.steps_per_epoch or 0)
        self._call_back("epoch", row, measured)
        self._log(row)

    def _is_due(self, every: int) -> bool:
        return self.step // every > self._before // every

    def _make_row(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        row = {"step": self.step, "epoch": self.epoch, "time_s": round(self._meter.train_s, 3), **measured}
        self.history.rows.append(row)
        return row

    def _add_to_row(self, row: dict[str, Any] | None, event: Event, measured: Measured) -> dict[str, Any]:
        """Adds what was measured to the row, a new one if there is none yet."""
        row = self._make_row({}) if row is None else row
        row["epoch"] = self.epoch
        row.update({f"{event}/{name}": value for name, value in measured.items()})
        return row

    def _log(self, row: dict[str, Any] | None) -> None:
        if row is not None:
            self._call_back("row", row)

    def _save(self, row: dict[str, Any] | None) -> None:
        if self._functions["save"]:
            with self._meter.stopped(), self._costs.during(CHECKPOINT, self.step):
                self._call_back("save", row)

    def _call_back(self, event: Event, row: dict[str, Any] | None, measured: Measured | None = None) -> None:
        if self._functions[event]:
            moment = self._moment(event, row, measured)
            for function in self._functions[event]:
                self._act_on(event, function(moment))

    def _act_on(self, event: Event, answer: Any) -> None:
        if isinstance(answer, Stop):
            self._reason = self._reason or answer.reason
        elif isinstance(answer, Return) and event == "end":
            self.state = answer.state
        elif answer is not None:
            raise StepError(
                f"a callback returned {answer!r:.80}; it returns nothing, or `jdist.callbacks.Stop(reason)` to end training."
            )

    def _moment(self, event: Event, row: dict[str, Any] | None, measured: Measured | None = None) -> Moment:
        return Moment(
            event=event,
            step=self.step,
            steps_in_call=self.step - self._before,
            total_steps=self._total,
            epoch=self.epoch,
            state=self.state,
            strategy=self._strategy,
            history=self.history,
            row=row,
            reason=self.history.stopped,
            interrupted=self._interrupted,
            resumes=bool(self._functions["resume"]),
            data=self._feed.state,
            notes=self._notes,
            kept=self._kept,
            folder=self._folder,
            clock=lambda: self._meter.train_s,
            measure=self._totals.newest if measured is None else lambda: measured,
            spend=self._costs.spent,
        )


def _outcome(reason: str | None, stop: Preemption) -> Outcome:
    if stop.reason is not None:
        return "interrupted" if stop.reason == "SIGINT" else "preempted"
    return "finished" if reason is None else "stopped"


def _row_from_plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a row of the history; a list was an array."""
    return {name: np.asarray(x) if isinstance(x, list) else x for name, x in from_plain(dict(row)).items()}


def _keeps_by_name(callbacks: Sequence[Callback]) -> dict[str, Keeps]:
    keeps: dict[str, Keeps] = {}
    for callback in callbacks:
        if callback.keeps is not None:
            if callback.name in keeps:
                raise StepError(f"two callbacks of the name {callback.name!r} keep something; give one another `name`.")
            keeps[callback.name] = callback.keeps
    return keeps
