"""Where a process is, for the others that wait for it: its phase and its stack, read from outside while it may be stuck."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import jax

import jdist

_MOST_FRAMES, _MOST_LETTERS = 12, 300
_JAX, _JDIST = Path(jax.__file__).parent, Path(jdist.__file__).parent
WAITING, HOST = "waiting for the others", "the program's own code"
# What may take as long as it does: a part of the file's path, of the function's name, and what that is.
_LONG = (
    (_JAX / "_src" / "compiler.py", "compile", "compiling"),
    (_JAX / "_src" / "interpreters" / "partial_eval.py", "trace", "tracing"),
    (_JDIST / "train" / "checkpoint", "", "saving or restoring"),
    (_JDIST / "loop" / "evaluate.py", "", "evaluating"),
    (_JDIST / "train" / "evaluat", "", "evaluating"),
    (_JDIST / "experiment", "evaluate", "evaluating"),
)


def whereabouts(thread: int, busy: str | None, *, waits: bool) -> dict[str, Any]:
    """What a thread does, as JSON can hold it.

    Args:
        thread: its identifier.
        busy: what the program says that it does; see `Runtime.busy`.
        waits: whether it waits for other processes.

    Returns:
        `phase`, in words; `may_last`, whether that may take long; `stack`, the innermost frames, the outermost of them first.
    """
    frame = sys._current_frames().get(thread)
    frames = [] if frame is None else [*traceback.walk_stack(frame)]
    phase = busy or next((what for each, _ in frames if (what := _long(each)) is not None), None)
    stack = [f"{each.f_code.co_filename}:{line} {each.f_code.co_name}"[-_MOST_LETTERS:] for each, line in frames]
    return {
        "phase": phase or (WAITING if waits else HOST),
        "may_last": phase is not None,
        "stack": stack[:_MOST_FRAMES][::-1],
    }


def _long(frame: FrameType) -> str | None:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    return next((what for path, part, what in _LONG if file.startswith(str(path)) and part in name), None)
