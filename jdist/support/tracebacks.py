"""Tracebacks without jdist's frames, so that a user's mistake is shown where it was made.

JDIST_TRACEBACK_FILTERING=off keeps all frames. JAX leaves out its own, see JAX_TRACEBACK_FILTERING.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from jdist.errors import JDistError

P = ParamSpec("P")
R = TypeVar("R")
VARIABLE = "JDIST_TRACEBACK_FILTERING"
_OWN = str(Path(__file__).parents[1]) + os.sep
_NOTE = f"jdist has left its own frames out of this traceback; {VARIABLE}=off in the environment shows them."


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def hide_own_frames(exc: BaseException) -> None:
    """Removes jdist's frames from an exception's tracebacks and its causes'; notes stay."""
    # Call it in an `except` block through which the exception leaves jdist. An exception of jdist's
    # code that is not a `JDistError` gets a note that says how to show the frames.
    # JDIST_TRACEBACK makes commands show tracebacks at all, jdist's frames included.
    mode = os.environ.get(VARIABLE, "off" if os.environ.get("JDIST_TRACEBACK") else "on")
    if mode == "off":
        return
    if mode != "on" and not any(VARIABLE in note for note in getattr(exc, "__notes__", ())):
        exc.add_note(f"{VARIABLE} is {mode!r}; it must be 'on' or 'off'. It counts as 'on'.")
    if _raised_here(exc) and not isinstance(exc, JDistError) and _NOTE not in getattr(exc, "__notes__", ()):
        exc.add_note(_NOTE)
    seen: set[int] = set()
    to_visit: list[BaseException | None] = [exc]
    while to_visit:
        current = to_visit.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = _without_own(current.__traceback__)
        to_visit += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            to_visit += current.exceptions


def callers_level() -> int:
    """Finds the `stacklevel` with which the calling function's warning names the line that called jdist, JAX passed over."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_OWN) or frame.f_globals.get("__name__", "").startswith("jax.")
    ):
        level, frame = level + 1, frame.f_back
    return level


def without_own_frames(function: Callable[P, R], /) -> Callable[P, R]:
    """Wraps a function so that the tracebacks of its errors lack jdist's frames."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as exc:
            hide_own_frames(exc)
            raise

    return call


def _is_own(tb: TracebackType) -> bool:
    name = tb.tb_frame.f_code.co_filename
    if name == "<string>":  # what `dataclasses` writes
        return tb.tb_frame.f_globals.get("__name__", "").startswith("jdist.")
    return name.startswith(_OWN)


def _raised_here(exc: BaseException) -> bool:
    tb = exc.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and _is_own(tb)


def _without_own(tb: TracebackType | None) -> TracebackType | None:
    """Copies a traceback without jdist's frames; the old objects stay, as others may hold them."""
    kept: list[TracebackType] = []
    while tb is not None:
        if not _is_own(tb):
            kept.append(tb)
        tb = tb.tb_next
    result: TracebackType | None = None
    for each in reversed(kept):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result
