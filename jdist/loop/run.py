"""The training loop of `jdist.fit` and `jdist run`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from jdist.callbacks.callback import Callback, Event, Moment, Resume, Return, Stop
from jdist.checkpoint import CheckpointWarning
from jdist.cluster.stop import Preemption
from jdist.core.strategy import Strategy
from jdist.errors import DatasetError, StepError
from jdist.loop.costs import Costs, ideal_step_s
from jdist.loop.data import Feed
from jdist.loop.evaluate import Evaluation
from jdist.loop.memory import raise_out_of_memory
from jdist.loop.metric_totals import Measured, Metrics, MetricTotals
from jdist.loop.report.history import History
from jdist.loop.report.metrics_file import CHECKPOINT, EVALUATION, OTHER, row_from_plain, to_plain
from jdist.loop.report.progress import Meter
from jdist.loop.steps import keeps_by_name
from jdist.step.base import Distributed
from jdist.support.arrays import tree_to_host
from jdist.support.xla import COMPILED, compiled_in
from jdist.typing import PyTree


class Snapshot(NamedTuple):
    """A run after a step, on the host."""

    step: int  # -1: not begun
    trees: Mapping[str, PyTree]  # the state, and what callbacks keep
    data: Mapping[str, Any] | None = None  # the position
    notes: Mapping[str, Any] | None = None  # of the run, as a checkpoint has them; None: not begun


@dataclass(kw_only=True, eq=False)
class Run:
    """A run of `jdist.fit` or `jdist run`."""

    strategy: Strategy
    train_step: Distributed
    feed: Feed
    metrics: Metrics  # as for `MetricTotals`
    callbacks: Sequence[Callback]  # called in this order
    steps: int | None  # None: as many as `passes` have
    passes: int | None = None  # over the data; None: as `steps` needs, or until the data ends
    log_every: int
    evaluate: Evaluation | None  # None: no evaluation data
    eval_every: Sequence[int]  # multiples of these steps; empty: the end of each epoch
    measures_epochs: bool = True  # logs a row of means and metrics for each epoch
    compilation_cache: bool = False  # in the folder of the run's checkpoints
    length: str = "`steps`"  # the argument that sets the number of steps, for errors
    begun: float  # seconds of `time.monotonic`
    state: PyTree = field(init=False, default=None)
    step: int = field(init=False, default=0)  # steps done
    epoch: int = field(init=False, default=0)  # epochs ended
    first: int | None = field(init=False, default=None)  # the step at which `train` began or resumed
    history: History = field(init=False, default_factory=History)

    def __post_init__(self) -> None:
        options = self.train_step.options
        self._total = self.steps if self.steps is not None else self.feed.num_steps
        self._per_call, self._donates = options.steps_per_call, options.donates_state
        self._resumed_per_call: int | None = None  # of the run that this one goes on with
        skips = options.non_finite == "skip" or options.loss_scaling is not None
        self._totals = MetricTotals(self.metrics, steps_per_call=self._per_call, skips=skips)
        self._moves = False  # whether it goes on in another world
        self.after_step: Callable[[], object] = lambda: None  # called where the run goes on after a step
        self.kept = keeps_by_name(self.callbacks)
        self._folder = next((each.folder for each in self.callbacks if each.folder is not None), None)
        events: tuple[Event, ...] = get_args(Event)
        self._functions = {e: [f for c in self.callbacks if (f := getattr(c, f"on_{e}")) is not None] for e in events}
        self.stop: Preemption  # `train` sets it, and the next
        self.costs: Costs
        self._before = 0  # steps done before the newest call
        self._evaluated: int | None = None
        self._reason: str | None = None
        self._interrupted = False
        self._meter = Meter(step=0, total=None)

    def start(self, ends: contextlib.ExitStack, depth: int) -> None:
        """Begins with the state, or where a callback resumes an earlier run."""
        self._moves = self.first is not None
        self._resume(depth + 1)
        self._begin()
        if self.compilation_cache and isinstance(self._folder, Path):
            ends.enter_context(compiled_in(self._folder / COMPILED, is_chief=self.strategy.cluster.is_chief))
        left = 0 if self.steps is None else max(self.steps - self.step, 0)
        # A pass may have ended in a shorter call, behind which a run goes on as one that was not interrupted does.
        is_begun = self._resumed_per_call == self._per_call and (self.steps or 0) % self._per_call == 0
        if left % self._per_call and not is_begun:
            raise StepError(
                f"{self.length} is {self.steps}, and {left} of these are left: not a multiple of "
                f"steps_per_call={self._per_call}. Choose another number of steps, or another `steps_per_call`."
            )
        self.first = self.step

    def go_round(self) -> None:
        """Goes round until the run is over."""
        while not self._is_over():
            for batch in self._until_stopped():
                self._call(batch)
                if self._is_over():
                    break
                self.after_step()
            else:
                if not self._is_over():
                    self.feed.end_pass()
                    if self.feed.steps_per_epoch is None:  # each pass is an epoch
                        self._before = self.step  # callbacks are called once for each step
                        self._after_call((self.epoch,))

    def capture(self) -> Snapshot:
        """Copies the run to the host."""
        notes = self._notes() | {"reason": self._reason}
        return Snapshot(self.step, tree_to_host(self.live()), self.feed.state(), notes)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes on from a copy, in a world of other processes."""
        self.state, self.step, self._evaluated = snapshot.trees["state"], max(snapshot.step, 0), None
        self._before, self.first = self.step, None
        if snapshot.notes is None:
            self.epoch = 0
            self.history.rows.clear()
            self._totals.restore({})
            return
        self._reason = snapshot.notes["reason"]
        for name, keeps in self.kept.items():
            keeps.put(snapshot.trees[name])
        self._totals.begin(self.train_step.count_left_out(self.state))
        self.feed.restore(snapshot.data)
        self._restore_notes(snapshot.notes, 1)
        self.history.steps = self.first = self.step
        self.strategy.cluster.at_step(self.step)

    def _until_stopped(self) -> Iterator[PyTree]:
        """Yields the batches of a pass; after a signal to stop, a data error is a warning."""
        try:
            yield from self.costs.waits(self.feed.one_pass())
        except Exception as exc:
            # A terminal sends Ctrl-C to every process, also to readers of data, which end before
            # this one.
            if not self.stop.stops_after(self.step):
                raise
            # No one needs the batch: said, as it may be another error than that of a process which was told to end.
            warnings.warn(
                f"the data ended behind {self.stop.reason}: {type(exc).__name__}: {exc}", RuntimeWarning, stacklevel=1
            )

    def _is_over(self) -> bool:
        return self.is_complete or self.stop.stops_after(self.step)

    @property
    def was_ended(self) -> bool:
        """Returns whether a callback has ended the run."""
        return self._reason is not None

    @property
    def is_complete(self) -> bool:
        """Returns whether no further pass over the data is wanted."""
        if self._reason is not None:  # a callback has ended the run
            return True
        if self.steps is not None:
            return self.step >= self.steps
        if self.feed.steps_per_epoch is not None:
            return self.feed.num_steps is not None and self.step >= self.feed.num_steps
        return self.passes is not None and self.epoch >= self.passes

    def _resume(self, depth: int) -> None:
        for function in self._functions["resume"]:
            answer = function(self._moment("resume", None))
            if isinstance(answer, Resume) and not self._moves:
                self.state, self.step, self._before = answer.state, answer.step, answer.step
                try:
                    self.feed.restore(answer.data)
                except DatasetError as exc:
                    exc.add_note(
                        "jdist.fit found a checkpoint to go on from. Give `data`, `global_batch` and `shuffle_seed` as they "
                        "were then, and no fewer `epochs`; or begin again, in another directory or with "
                        "`checkpoint(directory, resume=False)`."
                    )
                    raise
                self._restore_notes(answer.notes, depth + 1)
            elif not isinstance(answer, Resume):
                self._act_on("resume", answer)

    def _begin(self) -> None:
        """Begins to measure, and calls `on_start`."""
        self.history.steps = self.step
        self._totals.begin(self.train_step.count_left_out(self.state))
        earlier_s = self.history.rows[-1].get("time_s", 0.0) if self.history.rows else 0.0
        self._meter = Meter(step=self.step, total=self._total, earlier_s=earlier_s)
        ideal_s = ideal_step_s(self.train_step, self.state, self.feed.batches.element_spec)
        self.costs.begin(self.step, self._folder, ideal_step_s=ideal_s, trains=not self.is_complete)
        self._call_back("start", None)
        self.strategy.cluster.at_step(self.step)

    def _restore_notes(self, notes: Mapping[str, Any], depth: int) -> None:
        """Restores what `_notes` has saved."""
        before, now = notes.get("steps_per_epoch"), self.feed.steps_per_epoch
        self.epoch = int(notes.get("epoch", self.step // now if now else 0))
        self._resumed_per_call = notes.get("steps_per_call")
        if "steps_per_epoch" in notes and before != now:
            were, are = ("a pass" if each is None else f"{each} steps" for each in (before, now))
            warnings.warn(
                f"the resumed run had epochs of {were}; from step {self.step} on epochs are of {are}, and jdist counts "
                "as if all had had that length. To count on, give the same `data`, `global_batch` and `steps_per_epoch`.",
                CheckpointWarning,
                stacklevel=depth + 1,
            )
        self.history.rows[:] = [row_from_plain(row) for row in notes.get("rows", [])]
        if self.history.rows and any(name.startswith("eval/") for name in self.history.rows[-1]):
            self._evaluated = self.history.rows[-1]["step"]
        self._totals.restore(notes.get("tally", {}), self.strategy.cluster)

    def live(self) -> dict[str, PyTree]:
        """Collects the trees that the run keeps on the devices, by name."""
        return {"state": self.state, **{name: keeps.get() for name, keeps in self.kept.items()}}

    def _notes(self) -> dict[str, Any]:
        self.train_step.wait()  # a step that was not finite is known before anything is written
        return {
            "epoch": self.epoch,
            "steps_per_epoch": self.feed.steps_per_epoch,
            "steps_per_call": self._per_call,
            "rows": to_plain(self.history.rows),
            "tally": self._totals.notes(self.strategy.cluster),
        }

    def _call(self, batch: PyTree) -> None:
        """Makes the steps of one call, and what is due after it."""
        count = 1 if self._per_call == 1 else np.shape(jax.tree.leaves(batch)[0])[0]
        before = self.state
        try:
            self.state, measured = self.train_step(before, batch)
        except jax.errors.JaxRuntimeError as exc:
            raise_out_of_memory(exc, {**self.live(), "batch": batch})
            raise
        self._before, self.step = self.step, self.step + count
        self.history.steps = self.step
        self.costs.called(self.train_step.newest_token, self.step, before if self._donates else None)
        del before
        ended: Sequence[int] = ()
        per_epoch = self.feed.steps_per_epoch
        if self.measures_epochs:
            epochs = [self.epoch if per_epoch is None else i // per_epoch for i in range(self._before, self.step)]
            self._totals.add(measured, batch, epochs, self.train_step.count_left_out(self.state))
            if per_epoch is not None:
                ended = range(self._before // per_epoch, self.step // per_epoch)
        else:
            self._totals.note(measured)
            self.epoch = self.epoch if per_epoch is None else self.step // per_epoch
        self._after_call(ended)

    def end(self) -> None:
        """Evaluates the last state unless that is done, and calls `on_end`."""
        self.history.stopped = self._reason if self.stop.reason is None else f"by {self.stop.reason}"
        self._interrupted = self.stop.reason is not None
        self.train_step.wait()
        if self.evaluate is not None and self.history.stopped is None and self._evaluated != self.step:
            self._before = self.step
            if (measured := self._evaluate_state()) is None:
                self._interrupted, self.history.stopped = True, f"by {self.stop.reason}"
            else:
                self._report(None, [("eval", measured)])
        moment = self._moment("end", None)
        for callback in self.callbacks:
            if callback.on_end is not None:
                saves = callback.on_save is not None
                with self.costs.during(CHECKPOINT, self.step) if saves else self.costs.clock.during(OTHER):
                    self._act_on("end", callback.on_end(moment))

    def _after_call(self, ended: Sequence[int]) -> None:
        """Does what is due after a call, or at the end of a pass, which has ended these epochs."""
        for epoch in ended[:-1]:  # of a call that spans several
            self._log_earlier_epoch(epoch)
        is_last = self._total is not None and self.step >= self._total and self.step > self._before
        row = self._make_step_row() if is_last or self._is_due(self.log_every) else None
        due: list[tuple[Event, Measured]] = []
        is_due = any(map(self._is_due, self.eval_every)) if self.eval_every else bool(ended)
        if self.evaluate is not None and is_due and (measured := self._evaluate_state()) is not None:
            due.append(("eval", measured))
        for epoch in ended[-1:]:
            self.epoch = epoch + 1
            due.append(("epoch", self._totals.take(epoch, self.strategy.cluster)[0]))
        self._report(row, due)

    def _report(self, row: dict[str, Any] | None, due: Sequence[tuple[Event, Measured]]) -> None:
        """Adds results to the row, and calls the callbacks that they are for, then those of the step, the row and the save."""
        for event, measured in due:  # whole before anyone sees it, or saves it
            row = self._add_to_row(row, event, measured)
        if row is not None:
            row.update(self.costs.row(self.step))
        for event, measured in due:
            self._call_back(event, row, measured)
        if self.step > self._before:
            self._call_back("step", row)
        if row is not None:
            self._call_back("row", row)
        if self._functions["save"]:
            with self._meter.stopped(), self.costs.during(CHECKPOINT, self.step):
                self._call_back("save", row)

    def _make_step_row(self) -> dict[str, Any]:
        """Makes a row of the newest step's metrics."""
        if self.strategy.coordinator is None:  # workers are not kept waiting for each other
            self.train_step.wait()  # a step that was not finite is known before its row is written
        with self.strategy.cluster.blocked():
            return self._make_row(self._totals.newest())

    def _evaluate_state(self) -> Measured | None:
        """Evaluates the state; None if all are to stop meanwhile, as a machine that is taken away leaves no time for it."""
        assert self.evaluate is not None
        self.train_step.wait()
        goes_on = self.strategy.cluster.goes_on  # those that go on bring the evaluation to its end
        with self._meter.stopped(), self.costs.during(EVALUATION, self.step):
            measured = self.evaluate(self.state, lambda part: self.stop.stops_after(self.step, part) and not goes_on())
        if measured is not None:
            self._evaluated = self.step
        return measured

    def _log_earlier_epoch(self, epoch: int) -> None:
        """Logs an epoch that has ended within a call, which goes on in a later one, in a row of its own."""
        self.epoch = epoch + 1
        measured, _ = self._totals.take(epoch, self.strategy.cluster)
        row = self._add_to_row(None, "epoch", measured)
        row["step"] = self.epoch * (self.feed.steps_per_epoch or 0)
        self._call_back("epoch", row, measured)
        self._call_back("row", row)

    def _is_due(self, every: int) -> bool:
        return self.step // every > self._before // every

    def _make_row(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        row = {"step": self.step, "epoch": self.epoch, "time_s": round(self._meter.train_s, 3), **measured}
        self.history.rows.append(row)
        return row

    def _add_to_row(self, row: dict[str, Any] | None, event: Event, measured: Measured) -> dict[str, Any]:
        """Adds what was measured to the row, or to a new one."""
        row = self._make_row({}) if row is None else row
        row["epoch"] = self.epoch
        row.update({f"{event}/{name}": value for name, value in measured.items()})
        return row

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
            strategy=self.strategy,
            history=self.history,
            row=row,
            reason=self.history.stopped,
            interrupted=self._interrupted,
            resumes=bool(self._functions["resume"]),
            moves=self._moves,
            data=self.feed.state,
            notes=self._notes,
            kept=self.kept,
            folder=self._folder,
            clock=lambda: self._meter.train_s,
            measure=self._totals.newest if measured is None else lambda: measured,
            spend=self.costs.spent,
        )
