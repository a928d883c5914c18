"""A trace of a few steps by JAX's profiler."""

from __future__ import annotations

import os

import jax

from jdist.callbacks.callback import Callback, Moment
from jdist.core.remote import RemoteTree
from jdist.errors import StepError
from jdist.support.checks import as_int


def profiler(folder: str | os.PathLike[str], *, first: int = 10, last: int = 15) -> Callback:
    """Traces some steps with JAX's profiler: what the devices and the host do, and when.

    Args:
        folder: where the trace goes, under plugins/profile/TIME: `perfetto_trace.json.gz` for https://ui.perfetto.dev, and
            `*.xplane.pb` for XProf (`xprof FOLDER`, or TensorBoard).
        first: the first step of the trace, from 1; the first of a run holds the compilation.
        last: its last step.

    Returns:
        The callback. In a job of several processes each traces itself; give each a folder of its own, or one on its machine.

    Raises:
        StepError: `first` and `last` are no range of steps.

    Source: `tf.keras.callbacks.TensorBoard(profile_batch=...)`
    """
    if as_int(first, least=1) is None or as_int(last, least=first) is None:
        raise StepError(
            f"profiler: `first` is {first!r} and `last` is {last!r}; they must be steps, 1 <= first <= last."
        )
    running: list[None] = []

    def begin(moment: Moment) -> None:
        if not running and first <= moment.step + 1 <= last:
            _wait(moment)
            jax.profiler.start_trace(os.fspath(folder), create_perfetto_trace=True)
            running.append(None)

    def on_step(moment: Moment) -> None:
        if running and moment.step >= last:
            _wait(moment)
            close()
        else:
            begin(moment)

    def close() -> None:
        if running:
            running.clear()
            jax.profiler.stop_trace()

    return Callback(on_start=begin, on_step=on_step, close=close, logs=())


def _wait(moment: Moment) -> None:
    """Waits for the devices, so that the trace has its steps and no others."""
    if not isinstance(moment.state, RemoteTree):
        jax.block_until_ready(moment.state)
