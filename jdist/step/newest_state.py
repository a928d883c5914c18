"""Keeps the newest state of a step, also where an interrupt has ended the call that made it."""

from __future__ import annotations

from typing import Any

from jdist.core.static_leaves import has_static, unpack

PyTree = Any


class NewestState:
    """The state that a step's newest call made.

    A call's program appends `(token, state, outputs)` to `results`; whoever looks next takes them.

    Attributes:
        state: as callers hold it; None before the first call.
        packed: as programs take it, its constants apart; the same object where it has none.
        results: those that were not taken yet; empty, or one entry.
        results_hold_state: whether the state among them is a new one.
    """

    def __init__(self) -> None:
        self.state: PyTree = None
        self.packed: PyTree = None
        self.results: list[Any] = []
        self.results_hold_state = False
        self._has_constants = False

    def begin_with(self, packed: PyTree) -> None:
        """Notes which leaves of a state that comes from elsewhere are constants: they stay so from call to call."""
        self._has_constants = has_static(packed)

    def look(self) -> PyTree:
        """The state of the results, where they hold one that was not taken yet; else the one taken last."""
        return unpack(self.results[0][1]) if self.results and self.results_hold_state else self.state

    def take(self) -> None:
        """Takes the state from the results, and forgets them."""
        if self.results_hold_state:
            self.packed = self.results[0][1]
            self.state = unpack(self.packed) if self._has_constants else self.packed
        self.results = []
