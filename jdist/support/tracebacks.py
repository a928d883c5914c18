"""Tracebacks without jdist's own frames: a user's mistake is shown where it was made.

`JDIST_TRACEBACK_FILTERING=off` in the environment keeps all frames. JAX leaves out its own by `JAX_TRACEBACK_FILTERING`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from jdist.errors import JDistError

P = ParamSpec("P")
R = TypeVar("R")
VARIABLE = "JDIST_TRACEBACK_FILTERING"
_OWN = str(Path(__file__).parents[1]) + os.sep
_NOTE = f"jdist has left its own frames out of this traceback; {VARIABLE}=off in the environment shows them."


def hide_own_frames(exc: BaseException) -> None:
    """Takes jdist's frames out of the tracebacks of an exception and of those that it came from.

    To be called as the exception leaves jdist, in an `except` block that raises it again. Causes and notes stay.

    Args:
        exc: the exception. One that jdist did not mean to raise, but that was raised in its code, gets a note how to see
            where.
    """
    # Of commands the other variable shows tracebacks at all: whoever asks for one wants to see where in jdist.
    mode = os.environ.get(VARIABLE, "off" if os.environ.get("JDIST_TRACEBACK") else "on")
    if mode == "off":
        return
    if mode != "on" and not any(VARIABLE in note for note in getattr(exc, "__notes__", ())):
        exc.add_note(f"{VARIABLE} is {mode!r}; it must be 'on' or 'off'. It counts as 'on'.")
    if _raised_here(exc) and not isinstance(exc, JDistError) and _NOTE not in getattr(exc, "__notes__", ()):
        exc.add_note(_NOTE)
    seen: set[int] = set()
    found: list[BaseException | None] = [exc]
    while found:
        one = found.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_own(one.__traceback__)
        found += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions


def without_own_frames(function: Callable[P, R], /) -> Callable[P, R]:
    """The function itself, whose errors have tracebacks without jdist's frames."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as exc:
            hide_own_frames(exc)
            raise

    return call


def _is_own(tb: TracebackType) -> bool:
    return tb.tb_frame.f_code.co_filename.startswith(_OWN)


def _raised_here(exc: BaseException) -> bool:
    tb = exc.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and _is_own(tb)


def _without_own(tb: TracebackType | None) -> TracebackType | None:
    """The same traceback with only the frames of others; new objects, as others may hold the old ones."""
    kept: list[TracebackType] = []
    while tb is not None:
        if not _is_own(tb):
            kept.append(tb)
        tb = tb.tb_next
    made: TracebackType | None = None
    for each in reversed(kept):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made
