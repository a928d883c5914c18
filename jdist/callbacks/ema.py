"""An exponential moving average of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jdist.callbacks.callback import Callback, Keeps, Moment
from jdist.core.remote import RemoteTree
from jdist.core.step_state import pack, unpack
from jdist.errors import StepError
from jdist.support.arrays import promote_types
from jdist.support.checks import as_real

PyTree = Any


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
    number = as_real(decay)
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
                "ema: the parameters live on parameter servers, and fetching them after each step would take longer than it. "
                "Average what `strategy.fetch(moment.state)` gives in a callback of your own, `Callback(on_epoch=...)`, or "
                "keep the average in the optimiser."
            )
        try:
            return pack(params(state))
        except (AttributeError, KeyError, TypeError) as exc:
            raise StepError(
                f"ema: the state is a {type(state).__name__}, of which the parameters could not be taken ({exc!r}). Say how: "
                '`ema(params=lambda state: state["params"])`.'
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
