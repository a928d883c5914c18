"""Hints for arguments as Keras has them: what they are here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from jdist.errors import StepError
from jdist.loop.task import Task
from jdist.support.tracebacks import hide_own_frames
from jdist.support.words import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

# Keras' names of `fit`, `evaluate` and `predict`, and options that are the step's.
_HERE = {
    **dict.fromkeys(("batch_size", "global_batch_size"), "`global_batch`: the rows of a step over all replicas"),
    "validation_data": "`eval_data`, with `eval_step`",
    "validation_split": "`eval_data`, with `eval_step`: split the arrays before",
    "validation_freq": "`eval_every`, a number of steps",
    "steps_per_execution": "`steps_per_call`",
    "initial_epoch": "`jdist.callbacks.checkpoint(folder)`, which goes on where a run ended",
    "shuffle": "`shuffle_seed`, a number",
    "verbose": "`progress`, True or False",
    "x": '`data`: a dict of arrays, such as {"x": x, "y": y}',
    "y": '`data`: a dict of arrays, such as {"x": x, "y": y}',
    "precision": '`jdist.distribute(step, strategy, precision=jdist.precision("bf16"))`, which makes the step',
    "accumulate": "`jdist.distribute(step, strategy, accumulate=...)`, which makes the step",
    "optimizer": "part of the state: `jdist.TrainState.create(params=..., tx=optimizer)`",
}


def _is_keras_model(value: object) -> bool:
    # By its classes' names, as importing Keras takes seconds.
    return any(each.__name__ == "Model" and "keras" in each.__module__.split(".") for each in type(value).__mro__)


def with_hints(call: Callable[P, R], /) -> Callable[P, R]:
    """Wraps a function to refuse another library's arguments, and to name the right ones."""
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:  # here, as what `fit` warns of counts the calls to the user's own
            check(args, kwargs)
            return call(*args, **kwargs)
        except Exception as exc:
            hide_own_frames(exc)
            raise

    def check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if len(args) > 3:
            raise StepError(
                f"jdist.{call.__name__} takes a step, a state and the data by position, and got {len(args)} arguments. "
                'The data is one tree, {"x": x, "y": y}; pass all other arguments by name.'
            )
        for value in (*args[:2], kwargs.get("step"), kwargs.get("state")):
            if _is_keras_model(value):
                raise StepError(
                    f"jdist.{call.__name__} got a Keras model ({type(value).__name__}). It takes a step, a function of the "
                    "model's variables that `model.stateless_call` makes of a Keras 3 model; docs/keras.md has one to copy."
                )
        if len(args) > 1 and callable(args[1]) and not callable(args[0]) and not isinstance(args[0], Task):
            raise StepError(
                f"jdist.{call.__name__} got a {type(args[0]).__name__} as the step, and a function as the state: the two seem "
                f"to be swapped. Call `jdist.{call.__name__}(step, state, data)`."
            )
        for name in kwargs.keys() - known.keys():
            if name in _HERE:
                raise StepError(f"jdist.{call.__name__} has no argument `{name}`; here it is {_HERE[name]}.")
            if meant := did_you_mean(name, known):
                raise StepError(f"jdist.{call.__name__} has no argument `{name}`.{meant}")

    return checked
