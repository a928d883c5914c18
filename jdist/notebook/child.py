"""The functions that a launched function's script calls in each process, by their full names."""

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


def input_file(script: Path) -> Path:
    """Names the file of a script's arguments, and of the notebook's values that it uses."""
    return script.with_suffix(".given.npz")


def result_file(script: Path) -> Path:
    """Names the file of the function's result in process 0."""
    return script.with_suffix(".returned.npz")


def given(script: str, name: str) -> Any:
    """Reads the value that a name has in the notebook."""
    return _inputs(script)["names"][name]


def restore(definition: Any, script: str, name: str) -> None:
    """Restores the values that a function or class has in the notebook, after its source was run."""
    source.restore(inspect.unwrap(definition), _inputs(script)["changed"][name])


def run(fn: Callable[..., Any], script: str) -> None:
    """Calls the function; process 0 writes its result next to the script."""
    try:
        value = fn(*_inputs(script)["args"])
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
        values.write(result_file(Path(script)), value, jax_arrays=True)
    except values.NotPlain as exc:
        where = f"at {exc.path} " * bool(exc.path)
        raise LaunchError(
            f"`{fn.__name__}` returned {where}{values.kind(exc.value)}, which cannot be handed back to the notebook. Return "
            f"{values.PLAIN}, or arrays of JAX that this process has whole; of a train state `strategy.fetch(state).params`."
        ) from None


@functools.cache
def _inputs(script: str) -> dict[str, Any]:
    return values.read(input_file(Path(script)))
