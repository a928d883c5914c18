"""Callbacks of each step: an average of the parameters, the learning rate in logged rows, a trace by JAX's profiler."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist.callbacks.callback import Callback, Keeps, Moment
from jdist.core.remote import RemoteTree
from jdist.core.step_state import pack, unpack
from jdist.errors import StepError
from jdist.step.tree_checks import kind_of
from jdist.support import checks
from jdist.support.arrays import promote_types, to_host
from jdist.support.tracebacks import callers_level
from jdist.typing import PyTree


@dataclass(frozen=True, kw_only=True)
class Ema(Callback):
    """The callback of `ema`."""

    # returns a tree like the parameters, with their layout; float32 if they have 16 bits, which
    # would round a step's change to nothing. Valid until the next step.
    average: Callable[[], PyTree]


def ema(
    decay: float = 0.999, *, params: Callable[[PyTree], PyTree] = lambda state: state.params, name: str = "ema"
) -> Ema:
    """Keeps an exponential moving average of the parameters: average = decay * average + (1 - decay) * parameters.

    It begins with the first parameters. `checkpoint` saves it with the state. With `steps_per_call` above 1 it sees every n-th
    step's parameters, and takes decay ** n.

    Args:
        decay: from 0 to 1, without 1; 0.999 looks back over some thousand steps.
        params: which part of the state.
        name: under which it is saved; each once in a run.

    Returns:
        The callback, with `average()`: `jdist.evaluate(eval_step, state.replace(params=ema.average()), ...)`.

    Raises:
        StepError: an argument is not allowed; while training: the state lives on parameter servers, or has no such part.

    Source: Polyak and Juditsky 1992; `tf.keras.callbacks.SwapEMAWeights`
    """
    number = checks.as_real(decay)
    if number is None or not 0 <= number < 1:
        raise StepError(f"ema: `decay` is {decay!r}; it must be from 0 to 1, without 1, such as 0.999.")
    if not callable(params):
        raise StepError(
            f"ema: `params` is {params!r:.80}; it must be a function of the state that returns the part to average, such as "
            "`lambda state: state.params`."
        )
    average: PyTree = None

    def begin(state: PyTree) -> None:
        nonlocal average
        average = jax.tree.map(lambda x: jnp.array(x, promote_types(x.dtype, jnp.float32)), _part(state))

    def on_step(moment: Moment) -> None:
        nonlocal average
        average = _averaged(average, _part(moment.state), decay**moment.steps_in_call)

    def _part(state: PyTree) -> PyTree:
        if isinstance(state, RemoteTree):
            raise StepError(
                "ema: the parameters live on parameter servers, and fetching them after each step would take longer "
                "than the step. Average what `strategy.fetch(moment.state)` gives in a callback of your own, "
                "`Callback(on_epoch=...)`, or keep the average in the optimiser."
            )
        try:
            return pack(params(state))
        except (AttributeError, KeyError, TypeError) as exc:
            raise StepError(
                f"ema: cannot find the parameters of a state of type {type(state).__name__} ({exc!r}). Say where they are: "
                '`ema(params=lambda state: state["params"])`; of nnx objects '
                "`ema(params=lambda state: nnx.filter_state(state.others, nnx.Param))`."
            ) from exc

    def put(kept: PyTree) -> None:
        nonlocal average
        average = pack(kept)

    def get() -> PyTree:
        return unpack(average)

    return Ema(on_step=on_step, keeps=Keeps(begin=begin, get=get, put=put), name=name, average=get, logs=())


@functools.partial(jax.jit, donate_argnums=0)
def _averaged(average: PyTree, params: PyTree, decay: jax.typing.ArrayLike) -> PyTree:
    return jax.tree.map(lambda a, p: (decay * a + (1 - decay) * p.astype(a.dtype)).astype(a.dtype), average, params)


def learning_rate_log(
    schedule: Callable[[Any], Any] | jax.typing.ArrayLike, *, name: str = "learning_rate"
) -> Callback:
    """Logs the learning rate that the newest update was made with.

    The count of updates is the optimiser's own, where it keeps one for its schedule: steps that were left out, as a gradient
    was not finite, do not count, and those behind the state that a run began with do. Where it is not at hand (an optimiser of
    another kind, parameter servers) the run's steps are counted.

    Args:
        schedule: `(step) -> learning rate`, the one that the optimiser was made with; or a constant.
        name: in the row.

    Raises:
        StepError: `schedule` is neither a function nor a number; while training: it returns no single number.

    Example:
        >>> import jdist, optax
        >>> schedule = optax.cosine_decay_schedule(1e-3, decay_steps=1000)
        >>> callbacks = [jdist.callbacks.learning_rate_log(schedule)]
    """
    if not callable(schedule) and (isinstance(schedule, bool) or not checks.is_number(schedule)):
        raise StepError(f"learning_rate_log: `schedule` is {schedule!r}; give optax's schedule, or a number.")

    def on_step(moment: Moment) -> None:
        if moment.row is not None:
            moment.log(**{name: _rate_at(schedule, _count_updates(moment) - 1) if callable(schedule) else schedule})

    return Callback(on_step=on_step, name="learning_rate_log", logs=(name,))


def _rate_at(schedule: Callable[[Any], Any], count: int) -> float:
    rate = schedule(count)
    if not checks.is_number(rate):
        raise StepError(
            f"learning_rate_log: `schedule` gives {kind_of(rate)} for step {count}; it must give one number."
        )
    return float(rate)


def _count_updates(moment: Moment) -> int:
    """Counts the updates made, at least 1. Optax counts from 0: the n-th is made with the schedule's value at n - 1."""
    nodes = jax.tree.leaves(moment.state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))
    counts = [int(to_host(node.count)) for node in nodes if isinstance(node, optax.ScaleByScheduleState)]
    return max(1, counts[0] if counts else moment.step)


def profiler(folder: str | os.PathLike[str], *, first: int = 10, last: int = 15) -> Callback:
    """Traces some steps with JAX's profiler: what the devices and the host do, and when.

    Args:
        folder: where the trace goes, under plugins/profile/TIME: `perfetto_trace.json.gz` for https://ui.perfetto.dev, and
            `*.xplane.pb` for XProf (`xprof FOLDER`, or TensorBoard).
        first: the first step of the trace, from 1; the first of a run holds the compilation.
        last: its last step.

    Returns:
        The callback. In a job of several processes each traces itself, in a subfolder such as `process_1`.

    Raises:
        StepError: `first` and `last` do not form a range of steps.

    Warns:
        UserWarning: while training: JAX's profiler failed; training continues without a trace.

    Source: `tf.keras.callbacks.TensorBoard(profile_batch=...)`
    """
    first = checks.whole_number("first", first, StepError, call="profiler")
    last = checks.whole_number("last", last, StepError, least=first, call="profiler")
    running, failed, path = False, False, os.fspath(folder)

    def attempt(action: Callable[[], Any]) -> bool:
        nonlocal failed
        try:
            action()
        except Exception as exc:  # noqa: BLE001 - whatever JAX's profiler raises, training goes on
            failed = True
            text = f"profiler: no complete trace in {path}: {type(exc).__name__}: {exc}. Training is not affected."
            warnings.warn(text, stacklevel=callers_level())
        return not failed

    def begin(moment: Moment) -> None:
        nonlocal running, path
        if not running and not failed and first <= moment.step + 1 <= last:
            _wait(moment)
            cluster = moment.strategy.cluster
            if cluster.num_processes > 1:  # JAX reads back the newest trace of a folder, which may be another process's
                path = os.path.join(os.fspath(folder), f"process_{cluster.process_index}")
            running = attempt(lambda: jax.profiler.start_trace(path, create_perfetto_trace=True))

    def on_step(moment: Moment) -> None:
        if running and moment.step >= last:
            _wait(moment)
            close()
        else:
            begin(moment)

    def close() -> None:
        nonlocal running
        if running:
            running = False
            attempt(jax.profiler.stop_trace)

    return Callback(on_start=begin, on_step=on_step, close=close, logs=())


def _wait(moment: Moment) -> None:
    """Waits for the devices, so that the trace has its steps and no others."""
    if not isinstance(moment.state, RemoteTree):
        jax.block_until_ready(moment.state)
