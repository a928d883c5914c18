"""The phase and the stack of a program that may be stuck, read from another thread."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax

_MOST_FRAMES, _MOST_LETTERS = 12, 300
_JAX, _JDIST = Path(jax.__file__).parent, Path(__file__).parents[2]
_OTHERS = tuple(str(path) for path in (_JAX.parent, _JDIST, Path(threading.__file__).parent, "<frozen"))
_ALONE = ("compiling", "tracing")
WAITING, HOST = "waiting for the others", "the program's own code"
# Work that may last: how the file's path begins, a part of the function's name, the phase.
_LONG = (
    (_JAX / "_src" / "compiler.py", "compile", "compiling"),
    (_JAX / "_src" / "interpreters" / "partial_eval.py", "trace", "tracing"),
    (_JDIST / "checkpoint" / "", "", "saving or restoring"),
    (_JDIST / "loop" / "evaluate.py", "", "evaluating"),
    (_JDIST / "checkpoint" / "evaluator.py", "", "evaluating"),
    (_JDIST / "experiment", "evaluate", "evaluating"),
)
_awaited: dict[int, int] = {}  # thread -> the thread of this process that it waits for
_exchanging: set[int] = set()  # threads that wait for values of other processes


@contextlib.contextmanager
def awaiting(thread: int | None) -> Iterator[None]:
    """Marks a wait of this thread for another one of this process, as for a batch."""
    waiting = threading.get_ident()
    if thread is not None:
        _awaited[waiting] = thread
    try:
        yield
    finally:
        _awaited.pop(waiting, None)


@contextlib.contextmanager
def exchanging() -> Iterator[None]:
    """Marks a wait of this thread for values of other processes."""
    waiting = threading.get_ident()
    _exchanging.add(waiting)
    try:
        yield
    finally:
        _exchanging.discard(waiting)


def is_exchanging(thread: int) -> bool:
    """Returns whether a thread, or the one that it waits for, waits for values of other processes."""
    return _acting(thread) in _exchanging


def whereabouts(thread: int, busy: str | None, *, waits: bool) -> dict[str, Any]:
    """Describes a thread's activity, for JSON; `busy` is the argument of `Runtime.busy`."""
    # `phase`: in words; `may_last`: whether it may take long; `where`: the innermost frame of the
    # program's own code; `stack`: the innermost frames, outermost first.
    frame = sys._current_frames().get(_acting(thread))
    frames = [] if frame is None else [*traceback.walk_stack(frame)]
    phase = busy or next((name for each, _ in frames if (name := _long_phase(each)) is not None), None)
    stack = [f"{each.f_code.co_filename}:{line} {each.f_code.co_name}"[-_MOST_LETTERS:] for each, line in frames]
    of_program = [
        line for line, (each, _) in zip(stack, frames, strict=True) if not each.f_code.co_filename.startswith(_OTHERS)
    ]
    return {
        "phase": phase or (WAITING if waits else HOST),
        # A process that waits for the others while it saves or evaluates does not hold them up.
        "may_last": phase is not None and (busy is not None or not waits or phase in _ALONE),
        "where": next(iter(of_program or stack), "no frame"),
        "stack": stack[:_MOST_FRAMES][::-1],
    }


def _acting(thread: int) -> int:
    """Finds the thread that a thread waits for; itself if it waits for none."""
    return _awaited.get(thread, thread)


def _long_phase(frame: FrameType) -> str | None:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    return next((phase for path, part, phase in _LONG if file.startswith(str(path)) and part in name), None)
