"""The functions that the script of a launched function calls in each process, by their full names."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jdist.cluster import exit_status, tf_config
from jdist.errors import LaunchError
from jdist.notebook import source, values


def given_file(script: Path) -> Path:
    """Names the file of a script's arguments, names and defaults."""
    return script.with_suffix(".given.npz")


def returned_file(script: Path) -> Path:
    """Names the file of the function's result in process 0."""
    return script.with_suffix(".returned.npz")


def given(script: str, name: str) -> Any:
    """Returns the value of a name of the notebook, for the file `script`."""
    return _given(script)["names"][name]


def restore(definition: Any, script: str, name: str) -> None:
    """Restores the values that a function or class had in the notebook, as its source has just been run."""
    source.restore(inspect.unwrap(definition), _given(script)["changed"][name])


def run(fn: Callable[..., Any], script: str) -> None:
    """Calls the function; process 0 writes its result beside the script.

    Raises:
        LaunchError: the result cannot be handed back.
    """
    try:
        value = fn(*_given(script)["args"])
    except KeyboardInterrupt:  # the notebook's, which reports it itself
        exit_status.failed(exit_status.INTERRUPTED)
        sys.exit(exit_status.INTERRUPTED)
    except EOFError as exc:
        exc.add_note("Was this `input`? Here is no keyboard: ask in the notebook, and pass the answer by `args`.")
        raise
    spec = tf_config(os.environ)
    if spec is not None and spec.process_index > 0:
        return
    try:
        values.write(returned_file(Path(script)), value, jax_arrays=True)
    except values.NotPlain as exc:
        where = f"at {exc.path} " * bool(exc.path)
        raise LaunchError(
            f"`{fn.__name__}` returned {where}{values.kind(exc.value)}, which cannot be handed back to the notebook. Return "
            f"{values.PLAIN}, or arrays of JAX that this process has whole; of a train state `strategy.fetch(state).params`."
        ) from None


@functools.cache
def _given(script: str) -> dict[str, Any]:
    return values.read(given_file(Path(script)))
