"""The costs of a run, measured while it goes on: time by what it goes to, speed, memory, and use of the chip's peak."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jdist.checkpoint.folder import Place
from jdist.core.remote import shapes_of
from jdist.core.replica_mesh import Device
from jdist.core.sharded_leaf import map_leaves
from jdist.core.step_state import user_state
from jdist.core.strategy import Strategy
from jdist.jaxpr.flops import is_countable, products_of
from jdist.launcher.record import launch_of
from jdist.loop.memory import peak_memory_bytes
from jdist.loop.report.metrics_file import COMPILE, INPUT, OTHER, STEPS, TRAINING
from jdist.loop.report.times import Earlier, Outcome, PartClock, TimesFile, shares
from jdist.step.base import Distributed
from jdist.step.mesh_step import DistributedStep
from jdist.strategies.default import default
from jdist.support.chips import Chip, chip_of
from jdist.typing import PyTree

_COMPILING = "/jax/core/compile/"  # the durations of tracing, lowering and compiling
_SHORT_S = 0.001  # what is shorter has no line of its own in the file of times
_LINE_S = 1.0  # between two lines of a loop that goes round undisturbed, at least
_LINES = 5_000  # of a long attempt they are a part of its length apart: each start reads all of them
_TRAIN, _STARTUP = "train", "startup"
_CLOSE_TIMEOUT_S = 1.0


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
        self._untimed_steps = 0  # that the first call made before it returned, and that the speed leaves out
        self._since = (0, begun, dict(self.clock.seconds))  # step, time and seconds at the last row
        self._line = (_STARTUP, 0, begun, dict(self.clock.seconds))  # part, step, time and seconds of the next line
        self._file: TimesFile | None = None
        self._to_epoch_s = time.time() - time.monotonic()
        self._earlier = Earlier([], step=0, at=begun)
        self._consumed: PyTree = None
        strategy.cluster.follow(self, Costs._renew)
        jax.monitoring.register_event_duration_secs_listener(self._compiled)

    def _renew(self) -> None:
        """Lets go of the newest step, which was of another world."""
        if self._watch is not None:
            self._watch.add(None)
        if self._file is not None:
            self._file.close()
            self._file = None

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
        # `consumed` is the state that gave its buffers to the call. It is freed while the loop waits
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
        """Writes the use of the time up to now, or to `at`, and restarts the count."""
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


class DeviceWatch:
    """A thread that waits for the newest step, and notes its end."""

    # JAX returns from a call before the devices have made the step, and does not report its end.
    # The thread is woken only after they ran dry: while steps wait for the devices it sleeps
    # through them, so it costs only spare time. It is not woken for a step that was over when its
    # call returned. If other threads hold the interpreter, its notes may be some milliseconds late.

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._newest: jax.Array | None = None
        # The newest that is known to be over, and since when: as the thread has seen it, and the caller.
        self._over: tuple[jax.Array | None, float] = (None, 0.0)
        self._over_at_once: tuple[jax.Array | None, float] = (None, 0.0)
        self._sleeps = self._stops = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="jdist-device-watch")
        self._thread.start()

    def add(self, token: jax.Array | None) -> None:
        """Takes in an array that is ready once the newest step is over, and is never donated, if any."""
        self._newest = token
        if token is None:
            return
        array: Any = token  # the stubs of `jax.Array` lack `is_ready`
        if array.is_ready():
            self._over_at_once = token, self._clock()
        elif self._sleeps:
            self._wake.put(None)

    def idle_since(self) -> float | None:
        """Returns since when the devices have had nothing to do, as far as is known; None while they have."""
        newest = self._newest
        for over, since in (self._over_at_once, self._over):
            if over is newest:
                return since
        return None

    def close(self) -> None:
        """Ends the thread, which may not be in XLA when the interpreter goes; a step that hangs is not waited for."""
        self._stops = True
        self._wake.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stops:
            token = self._newest
            if token is None or self.idle_since() is not None:
                self._sleeps = True
                if self._newest is token and not self._stops:  # else the wake-up has been missed
                    self._wake.get()
                self._sleeps = False
                continue
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the loop raises it, where it waits for the step
                token.block_until_ready()
            self._over = token, self._clock()
            del token


def ideal_step_s(train_step: Distributed, state: PyTree, batch: PyTree) -> float | None:
    """Computes the time of a step's matrix products at the chips' peak; None if that is unknown."""
    # The step is traced as one replica that sees the full batch, as `jdist plan` counts it:
    # products that replicas repeat do not count, those that `jax.checkpoint` repeats do.
    devices = train_step.strategy.devices or _devices_of(state)
    chip = peak_of(devices[0]) if devices else None
    if chip is None:
        return None
    state = map_leaves(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), user_state(shapes_of(state)))
    if train_step.options.steps_per_call > 1:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    step, arguments = train_step.pure((state, batch))
    if not isinstance(step, DistributedStep):
        return None
    one = step.like(default(), accumulate=1, steps_per_call=1, donate=False, verify="off")
    try:
        closed = one.jaxpr(*arguments)
    # The user's code, on other shapes than it trains on: it may name the replicas' axis, or assert how many rows a replica has.
    except Exception:  # noqa: BLE001
        return None
    products = products_of(closed)
    if not products or not is_countable(closed):
        return None
    return chip.compute_s({kind: flops / len(devices) for kind, flops in products.items()})


def peak_of(device: Device) -> Chip | None:
    """Finds the maker's figures of a device's chip; None if they are not known."""
    return None if device.platform == "cpu" else chip_of(device.device_kind)


def _devices_of(state: PyTree) -> tuple[Device, ...]:
    """Finds the devices that a state lies on, under a strategy that names none."""
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return tuple(arrays[0].sharding.device_set) if arrays else ()
