"""The costs of a run, measured while it goes on: time by what it goes to, speed, memory, and use of the chip's peak."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jdist.checkpoint.folder import Place
from jdist.core.strategy import Strategy
from jdist.launcher.record import launch_of
from jdist.loop.device_watch import DeviceWatch
from jdist.loop.peaks import peak_memory_bytes
from jdist.report.part_clock import COMPILE, INPUT, OTHER, STEPS, TRAINING, PartClock, shares
from jdist.report.times_file import Earlier, Outcome, TimesFile

PyTree = Any
_COMPILING = "/jax/core/compile/"  # the durations of tracing, lowering and compiling
_SHORT_S = 0.001  # what is shorter has no line of its own in the file of times
_LINE_S = 1.0  # between two lines of a loop that goes round undisturbed, at least
_LINES = 5_000  # of a long attempt they are a part of its length apart: each start reads all of them
_TRAIN, _STARTUP = "train", "startup"


class Costs:
    """The costs of one run, measured from here to `close`."""

    def __init__(self, strategy: Strategy, *, begun: float) -> None:
        self._strategy = strategy
        self._watch: DeviceWatch | None = None
        if strategy.coordinator is None:
            self._watch = DeviceWatch(time.monotonic)
            self.clock = PartClock(begun=begun, idle_since=self._watch.idle_since)
        else:  # workers compute, and read batches: nothing is known of their time here
            self.clock = PartClock(begun=begun)
        self._input = OTHER if self._watch is None else INPUT
        self._thread = threading.get_ident()
        self._ideal_step_s: float | None = None
        self._is_training = False
        self._untimed_steps = 0  # that the first call made before it returned, which is no part of the speed
        self._since = (0, begun, dict(self.clock.seconds))  # step, time and seconds at the last row
        self._line = (_STARTUP, 0, begun, dict(self.clock.seconds))  # part, step, time and seconds of the next line
        self._file: TimesFile | None = None
        self._to_epoch_s = time.time() - time.monotonic()
        self._earlier = Earlier([], step=0, at=begun)
        self._consumed: PyTree = None
        jax.monitoring.register_event_duration_secs_listener(self._compiled)

    def begin(self, step: int, folder: Place | None, *, ideal_step_s: float | None, trains: bool = True) -> None:
        """Begins with a step, where an earlier attempt may have left off."""
        # `folder` keeps the run; None: the run cannot continue. In a bucket nothing can be
        # appended, so the record there would cover this attempt alone: none is kept. `ideal_step_s`
        # is the step's time at the chip's peak. `trains`: there are steps left to make.
        self._ideal_step_s = ideal_step_s
        self._since = (step, *self._since[1:])
        self._line = (_STARTUP, step, *self._line[2:])
        if not isinstance(folder, Path):
            return
        cluster, at = self._strategy.cluster, self.clock.begun + self._to_epoch_s
        devices = max(1, len(self._strategy.devices))
        about = {"processes": cluster.num_processes, "devices": devices, **launch_of(os.environ, folder)}
        self._file = TimesFile(folder, step=step, at=at, writes=cluster.is_chief, trains=trains, about=about)
        self._earlier = Earlier(self._file.earlier, step=step, at=at)

    def waits(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Yields batches, and counts the time until each is there."""
        iterator = iter(batches)
        while True:
            if self._is_training:
                self.clock.enter(self._input)
            self._consumed = None
            try:
                batch = next(iterator)
            except StopIteration:
                if self._is_training:
                    self.clock.enter(OTHER)
                return
            if self._is_training:
                self.clock.enter(STEPS)
            yield batch
            del batch  # as `Feed.one_pass` does

    def called(self, token: jax.Array | None, step: int, consumed: PyTree = None) -> None:
        """Notes that a call of the step has returned; `token` is ready once the call is over."""
        # `consumed` is the state whose buffers the call has taken. It is freed while the loop waits
        # for the next batch: JAX releases Python's lock with each freed array, and gets it back
        # late if threads that read want it, too.
        self._consumed = consumed
        self.clock.settle()
        if self._watch is not None:
            self._watch.add(token)
        self.clock.enter(OTHER)
        if not self._is_training:
            self._is_training = True
            runs_on = self._watch is not None and self._watch.idle_since() is None
            self._untimed_steps = 0 if runs_on else step - self._since[0]
            self._write_line(step)
        elif self._is_line_due(self.clock.now()):  # of a process that is killed the record says how far it came
            self._write_line(step)

    @contextlib.contextmanager
    def during(self, part: str, step: int) -> Iterator[None]:
        """Counts a block to a part; `step` steps are done."""
        begin, before = self.clock.settle(), dict(self.clock.seconds)
        with self.clock.during(part):
            yield
        if self.clock.now() - begin < _SHORT_S:
            return
        self._write_line(step, at=begin, seconds=before)
        self._line = (part, step, begin, before)
        self._write_line(step)

    def row(self, step: int) -> dict[str, float]:
        """Measures what the time since the last row went to; empty if no step was made since."""
        now, seconds = self.clock.settle(), dict(self.clock.seconds)
        step_before, _, before = self._since
        if step == step_before:
            return {}
        spent = {part: seconds[part] - before[part] for part in seconds}
        self._since = (step, now, seconds)
        if self._is_line_due(now):
            self._write_line(step)
        values = {name: round(share, 4) for name, share in shares(spent).items()}
        steps, self._untimed_steps = step - step_before - self._untimed_steps, 0
        training_s = sum(spent[part] for part in TRAINING)
        if steps and training_s > 0:
            values["steps_per_s"] = _four_digits(steps / training_s)
            if self._ideal_step_s is not None:
                values["mfu"] = _four_digits(self._ideal_step_s * steps / training_s)
        if (peak := peak_memory_bytes(self._strategy)) is not None:
            values["peak_memory_bytes"] = peak
        wall_s = self._earlier.wall_s + now - self.clock.begun
        values["goodput"] = round((self._earlier.steps_s + seconds[STEPS]) / wall_s, 4)
        if self._watch is None:
            del values["input_wait_share"]
        return values

    def spent(self) -> Mapping[str, float]:
        """Returns the seconds of each part up to now, of this attempt."""
        self.clock.settle()
        return dict(self.clock.seconds)

    def end(self, outcome: Outcome, step: int) -> None:
        """Writes the end of the attempt."""
        self._write_line(step)
        if self._file is not None:
            self._file.end(outcome, at=self.clock.now() + self._to_epoch_s, step=step)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._compiled)
        if self._watch is not None:
            self._watch.close()
        if self._file is not None:
            self._file.close()

    def _is_line_due(self, now: float) -> bool:
        return now - self._line[2] >= max(_LINE_S, (now - self.clock.begun) / _LINES)

    def _write_line(self, step: int, *, at: float | None = None, seconds: dict[str, float] | None = None) -> None:
        """Writes what the time up to now, or to `at`, went to, and begins anew."""
        part, first, begin, before = self._line
        if at is None or seconds is None:
            at, seconds = self.clock.settle(), dict(self.clock.seconds)
        if self._file is not None and at > begin:
            spent = {name: seconds[name] - before[name] for name in seconds}
            begin, end = begin + self._to_epoch_s, at + self._to_epoch_s
            self._file.add(part, begin=begin, end=end, first=first, step=step, seconds=spent)
        self._line = (_TRAIN if self._is_training else _STARTUP, step, at, seconds)

    def _compiled(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith(_COMPILING) and threading.get_ident() == self._thread:
            self.clock.carve(COMPILE, duration_secs)


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
