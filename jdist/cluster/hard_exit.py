"""Ending a process from any of its threads, whatever the others hold or wait for."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_LAST_S = 2.0  # what is not said by then, as nobody reads the pipe or the disk is gone, stays unsaid


class Leaving:
    """Has a thread ready for the last words: at the end of a program, Python starts no more."""

    def __init__(self) -> None:
        self._words: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._speak, name="jdist-last-words", daemon=True).start()

    def leave(self, code: int, *last_words: Callable[[], object]) -> NoReturn:
        """Ends the process with `code` now, without JAX's own farewell, which would wait for the others.

        Args:
            code: the exit code.
            *last_words: what to do before; given up after 2 s.
        """
        spoken = threading.Event()
        for words in (*last_words, sys.stdout.flush, sys.stderr.flush, spoken.set):
            self._words.put(words)
        spoken.wait(_LAST_S)
        os._exit(code)

    def close(self) -> None:
        """Ends the thread, where nothing is left to be ended."""
        self._words.put(None)

    def _speak(self) -> None:
        while (words := self._words.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # closed, full, gone: the next may still be said
                words()
