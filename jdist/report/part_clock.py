"""The time of a run by what it goes to: each moment counts once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

STARTUP, COMPILE, STEPS, INPUT = "startup", "compile", "steps", "input"
EVALUATION, CHECKPOINT, OTHER = "evaluation", "checkpoint", "other"
# What time goes to, and the name in rows of each part's share of it.
SHARES: Mapping[str, str] = {
    STEPS: "steps_share",
    INPUT: "input_wait_share",
    EVALUATION: "evaluation_share",
    CHECKPOINT: "checkpoint_share",
    COMPILE: "compile_share",
    STARTUP: "startup_share",
    OTHER: "other_share",
}
TRAINING = (STEPS, INPUT, OTHER)  # the parts of a loop that goes round undisturbed


class PartClock:
    """A stopwatch that counts each moment to one part."""

    # While the devices have a step to make, a moment counts to the steps; otherwise to the
    # program's current work. So waiting for data while the previous step still runs costs nothing,
    # and neither does a callback that ends before the step does. `idle_since` returns the time
    # since which the devices have had no step to make; None while they have one. `seconds` is up to
    # date after `settle`.

    def __init__(
        self,
        *,
        begun: float,
        clock: Callable[[], float] = time.monotonic,
        idle_since: Callable[[], float | None] = lambda: 0.0,
    ) -> None:
        self.begun, self._clock, self._idle_since = begun, clock, idle_since
        self.seconds = dict.fromkeys(SHARES, 0.0)
        self._part, self._since = STARTUP, begun
        self._open: list[tuple[str, float, float]] = []  # what the program did since the last `settle`

    def now(self) -> float:
        return self._clock()

    def enter(self, part: str) -> str:
        """Begins a part where the present one ends; returns that one."""
        now, before = self._clock(), self._part
        self._open.append((before, self._since, now))
        self._part, self._since = part, now
        return before

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Counts a block to a part, and goes on with the present one behind it."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def carve(self, part: str, seconds: float) -> None:
        """Counts the last `seconds` to a part, whatever they were counted to: for what is known when it is over."""
        now = self.now()
        self._open.append((self._part, self._since, now))
        self._since = cut = now
        while self._open and self._open[-1][2] > now - seconds:
            before, begin, _ = self._open.pop()
            cut = max(begin, now - seconds)
            if cut > begin:
                self._open.append((before, begin, cut))
                break
        self._open.append((part, cut, now))

    def settle(self) -> float:
        """Counts everything up to now, while it is still known when the devices had their last step; returns the time."""
        now = self._clock()
        self._open.append((self._part, self._since, now))
        self._since = now
        idle_since = self._idle_since()
        for part, begin, end in self._open:
            busy = end - begin if idle_since is None else min(max(idle_since - begin, 0.0), end - begin)
            self.seconds[STEPS] += busy
            self.seconds[part] += end - begin - busy
        self._open.clear()
        return now


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Divides each part's time by the total; empty if no time has passed."""
    total = sum(seconds.values())
    return {SHARES[part]: each / total for part, each in seconds.items()} if total > 0 else {}
