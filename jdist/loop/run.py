"""A training run under way: where it is, what it has measured, and what it tells its callbacks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jdist.callbacks.callback import Callback, Keeps, Moment, Resume, Return, Stop
from jdist.checkpoint import CheckpointWarning
from jdist.core.strategy import Strategy
from jdist.errors import DatasetError, StepError
from jdist.loop.data import Feed
from jdist.loop.metric_totals import Measured, Metrics, MetricTotals
from jdist.report.history import History
from jdist.report.plain import from_plain, to_plain
from jdist.step.base import Distributed

PyTree = Any
Event = Literal["resume", "start", "step", "eval", "epoch", "row", "save", "end"]


class Run:
    """A run of `jdist.fit`.

    Args:
        strategy: where it trains.
        train_step: makes the steps.
        feed: gives the batches.
        metrics: which of the step's results are contributions of metrics, as for `MetricTotals`.
        callbacks: whom to tell.
        total: how many steps there will be; None: not known.
        log_every: how many steps lie between logged rows.
        evaluate: `(state) -> what was measured`; None: there is nothing to evaluate on.
        eval_every: how many steps lie between evaluations; None: an epoch.

    Attributes:
        state: the newest state.
        step: steps done.
        epoch: epochs ended.
        history: what was measured.
        reason: why a callback wants it to end; None if none does.
    """

    def __init__(
        self,
        *,
        strategy: Strategy,
        train_step: Distributed,
        feed: Feed,
        metrics: Metrics,
        callbacks: Sequence[Callback],
        total: int | None,
        log_every: int,
        evaluate: Callable[[PyTree], Measured] | None,
        eval_every: int | None,
    ):
        self._strategy, self._train_step, self._feed, self._total = strategy, train_step, feed, total
        self._log_every, self._evaluate, self._eval_every = log_every, evaluate, eval_every
        self._per_call = train_step.options.steps_per_call
        skips = train_step.options.non_finite == "skip" or train_step.options.loss_scaling is not None
        self._tally = MetricTotals(metrics, steps_per_call=self._per_call, skips=skips)
        self._keeps = _by_name(callbacks)
        events: tuple[Event, ...] = ("resume", "start", "step", "eval", "epoch", "row", "save", "end")
        self._told = {event: [f for c in callbacks if (f := getattr(c, f"on_{event}")) is not None] for event in events}
        self.state: PyTree = None
        self.step = self.epoch = self._before = 0
        self._evaluated: int | None = None
        self.history = History()
        self.reason: str | None = None
        self._interrupted = False
        self._start_s = time.monotonic()

    def start(self, state: PyTree) -> None:
        """Begins with a state, or where a callback says that an earlier run left off."""
        self.state = state
        for keeps in self._keeps.values():
            keeps.begin(state)
        for function in self._told["resume"]:
            answer = function(self._moment("resume", None))
            if isinstance(answer, Resume):
                self.state, self.step, self._before = answer.state, answer.step, answer.step
                self._restore_feed(answer.data)
                self._go_on(answer.notes)
            else:
                self._heed("resume", answer)
        self._tally.begin(self._train_step.count_left_out(self.state))
        self._tell("start", None)
        if self._strategy.cluster is not None:
            self._strategy.cluster.at_step(self.step)

    def _restore_feed(self, position: dict[str, Any] | None) -> None:
        try:
            self._feed.restore(position)
        except DatasetError as exc:
            exc.add_note(
                "jdist.fit found a checkpoint to go on from. Give `data`, `global_batch` and `shuffle_seed` as they were then, "
                "and no fewer `epochs`; or begin anew, in another directory or with `checkpoint(directory, resume=False)`."
            )
            raise

    def _go_on(self, notes: Mapping[str, Any]) -> None:
        """Takes up what `Moment.notes` has noted."""
        self.epoch = int(notes.get("epoch", 0))
        before, now = notes.get("steps_per_epoch"), self._feed.steps_per_epoch
        if "steps_per_epoch" in notes and before != now:
            told = ["a pass" if each is None else f"{each} steps" for each in (before, now)]
            warnings.warn(
                f"the run that this one goes on with had epochs of {told[0]}; from step {self.step} on they are of {told[1]}, "
                "and are counted as if all had been. Give `data`, `global_batch` and `steps_per_epoch` as they were then to "
                "count on.",
                CheckpointWarning,
                stacklevel=4,
            )
        self.history.rows[:] = [_row_from_plain(row) for row in notes.get("rows", [])]
        if self.history.rows and any(name.startswith("eval/") for name in self.history.rows[-1]):
            self._evaluated = self.history.rows[-1]["step"]
        self._tally.restore(notes.get("tally", {}), self._strategy.cluster)

    def _notes(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "steps_per_epoch": self._feed.steps_per_epoch,
            "rows": to_plain(self.history.rows),
            "tally": self._tally.notes(self._strategy.cluster),
        }

    def call(self, batch: PyTree) -> None:
        """Makes the step, or the steps, of one call, and whatever is due after it."""
        count = 1 if self._per_call == 1 else np.shape(jax.tree.leaves(batch)[0])[0]
        self.state, measured = self._train_step(self.state, batch)
        left_out = self._train_step.count_left_out(self.state)
        self._before, self.step = self.step, self.step + count
        per_epoch = self._feed.steps_per_epoch
        if per_epoch is None:
            self._tally.add(measured, batch, (self.epoch,) * count, left_out)
            self._settle(())
        else:
            epochs = [i // per_epoch for i in range(self._before, self.step)]
            self._tally.add(measured, batch, epochs, left_out)
            self._settle(range(self._before // per_epoch, self.step // per_epoch))

    def end_pass(self) -> None:
        """The data has come to its end; where each pass is an epoch, so has that."""
        self._feed.end_pass()
        if self._feed.steps_per_epoch is None:
            self._before = self.step  # no step is told of twice
            self._settle((self.epoch,))

    def end(self, *, interrupted: bool) -> None:
        """Evaluates what is left to evaluate, and tells the callbacks that it is over."""
        self._interrupted = interrupted
        self._train_step.wait()
        if self._evaluate is not None and self.history.stopped is None and self._evaluated != self.step:
            self._before = self.step
            measured = self._evaluate(self.state)
            row = self._with(None, "eval", measured)
            self._tell("eval", row, measured)
            self._tell_row(row)
            self._tell("save", row)
        self._tell("end", None)

    def _settle(self, ended: Sequence[int]) -> None:
        """What is due after a call, or at the end of a pass."""
        for epoch in ended[:-1]:  # of a call that spans several
            self._end_early(epoch)
        is_last = self._total is not None and self.step >= self._total and self.step > self._before
        row = self._row(self._tally.newest()) if is_last or self._is_due(self._log_every) else None
        told: list[tuple[Event, Measured]] = []
        if self._evaluate is not None and (bool(ended) if self._eval_every is None else self._is_due(self._eval_every)):
            self._evaluated = self.step
            told.append(("eval", self._evaluate(self.state)))
        for epoch in ended[-1:]:
            self.epoch = epoch + 1
            told.append(("epoch", self._tally.take(epoch, self._strategy.cluster)[0]))
        for event, measured in told:  # whole before anyone sees it, or saves it
            row = self._with(row, event, measured)
        for event, measured in told:
            self._tell(event, row, measured)
        if self.step > self._before:
            self._tell("step", row)
        self._tell_row(row)
        self._tell("save", row)

    def _end_early(self, epoch: int) -> None:
        """An epoch has ended within a call, which goes on in a later one: it has a row of its own."""
        self.epoch = epoch + 1
        measured, _ = self._tally.take(epoch, self._strategy.cluster)
        row = self._with(None, "epoch", measured)
        row["step"] = self.epoch * (self._feed.steps_per_epoch or 0)
        self._tell("epoch", row, measured)
        self._tell_row(row)

    def _is_due(self, every: int) -> bool:
        return self.step // every > self._before // every

    def _row(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        row = {"step": self.step, "epoch": self.epoch, "time_s": round(time.monotonic() - self._start_s, 3), **measured}
        self.history.rows.append(row)
        return row

    def _with(self, row: dict[str, Any] | None, event: Event, measured: Measured) -> dict[str, Any]:
        """The row, a new one if there is none yet, with what was measured."""
        row = self._row({}) if row is None else row
        row["epoch"] = self.epoch
        row.update({f"{event}/{name}": value for name, value in measured.items()})
        return row

    def _tell_row(self, row: dict[str, Any] | None) -> None:
        if row is not None:
            self._tell("row", row)

    def _tell(self, event: Event, row: dict[str, Any] | None, measured: Measured | None = None) -> None:
        if self._told[event]:
            moment = self._moment(event, row, measured)
            for function in self._told[event]:
                self._heed(event, function(moment))

    def _heed(self, event: Event, answer: Any) -> None:
        if isinstance(answer, Stop):
            self.reason = self.reason or answer.reason
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
            resumes=bool(self._told["resume"]),
            data=self._feed.state,
            notes=self._notes,
            kept=self._keeps,
            measure=self._tally.newest if measured is None else lambda: measured,
        )


def _row_from_plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the history; a list was an array."""
    return {name: np.asarray(x) if isinstance(x, list) else x for name, x in from_plain(dict(row)).items()}


def _by_name(callbacks: Sequence[Callback]) -> dict[str, Keeps]:
    found: dict[str, Keeps] = {}
    for callback in callbacks:
        if callback.keeps is not None:
            if callback.name in found:
                raise StepError(f"two callbacks of the name {callback.name!r} keep something; give one another `name`.")
            found[callback.name] = callback.keeps
    return found
