"""Calls a notebook's function in a launched process."""

from __future__ import annotations

import builtins
import importlib
import linecache
import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from jdist.cluster import exit_status, tf_config
from jdist.errors import LaunchError
from jdist.notebook import pickled

# What each process runs, with the file of a call. The notebook's path comes first: jdist may be on it.
PROGRAM = """\
import pickle, sys
file = open(sys.argv[1], "rb")
sys.path[:] = pickle.load(file)
from jdist.notebook import child
child.run(file)
"""


def dumps(fn: Any, args: Sequence[Any], name: str) -> bytes:
    """Pickles a call of `fn`, called `name` in errors, for the file of `PROGRAM`."""
    pickler, data = pickled.dumps(fn, args, name)
    paths = [os.path.abspath(entry) for entry in sys.path]
    return pickle.dumps(paths) + pickle.dumps((pickler.modules, pickler.lines, len(args))) + data


def run(file: IO[bytes]) -> None:
    """Calls the function of a file; process 0 writes its result next to that."""
    sys.excepthook = lambda kind, exc, trace: traceback.print_exception(exc)  # knows the lines of cells
    with file:  # in a folder that is this user's alone, so unpickling it runs nobody else's code
        modules, lines, count = pickle.load(file)  # noqa: S301
        for name in modules:
            importlib.import_module(name)
        if "IPython.display" in modules:
            builtins.display = sys.modules["IPython.display"].display  # type: ignore[attr-defined]  # as in IPython
        linecache.cache |= {name: (0, None, text, name) for name, text in lines.items()}
        unpickler = pickle.Unpickler(file)  # noqa: S301
        anchor, fn, *args = [unpickler.load() for _ in range(2 + count)]
    # For pickles that name a class of the notebook. Without its file, which `multiprocessing` would run again.
    own = {name: value for name, value in anchor.__globals__.items() if name not in ("__file__", "__package__")}
    vars(sys.modules["__main__"]).update(own)
    if isinstance(fn, str):
        module, _, name = fn.partition(":")
        fn = getattr(importlib.import_module(module), name)
    try:
        value = fn(*args)
    except KeyboardInterrupt:  # the notebook's, which reports it itself
        exit_status.failed(exit_status.INTERRUPTED)
        sys.exit(exit_status.INTERRUPTED)
    except EOFError as exc:
        exc.add_note("Was this `input`? Here is no keyboard: ask in the notebook, and pass the answer by `args`.")
        raise
    spec = tf_config(os.environ)
    if spec is None or spec.process_index == 0:
        _write_result(Path(file.name).with_name("result"), value, getattr(fn, "__name__", "fn"))


def read_result(file: Path) -> Any:
    """Reads the result of process 0; None if it has written none."""
    result = file.with_name("result")
    return pickle.loads(result.read_bytes()) if result.exists() else None  # noqa: S301


def _write_result(file: Path, value: Any, name: str) -> None:
    try:
        with file.open("wb") as opened:
            pickled.Pickler(opened, jax_arrays=True, to_notebook=True).dump(value)
    except Exception as exc:  # noqa: BLE001 # any type's own method may raise anything
        _, path, part, error = pickled.find_culprit(value, "", exc, jax_arrays=True, to_notebook=True)
        raise LaunchError(
            f"`{name}` returned {f'at {path} ' * bool(path)}{pickled.kind(part)}, which cannot be handed back to the notebook "
            f"({error}). Return values that can be pickled, and arrays of JAX that this process has whole; of a train state "
            "`strategy.fetch(state).params`."
        ) from None
