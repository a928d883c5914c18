"""The calls of a step that were started and not yet waited for, and its newest state.

Without a bound, steps dispatched over several virtual CPU devices end in an abort ("rendezvous ... Expected N
threads"); on any device they pile up inputs. Each call returns a small token that is never donated, so it can
be waited for.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdist.core.step_state import carried_by, has_static, unpack
from jdist.core.strategy import Strategy
from jdist.errors import StepError
from jdist.typing import PyTree

_windows: weakref.WeakSet[Window] = weakref.WeakSet()


class Lineage:
    """The calls of one step that continue each other's states; two models make two lineages."""

    # `token` is that of the newest call. A code in it is sticky, so it covers all calls of the
    # lineage. It does not count `steps_before`.

    def __init__(self) -> None:
        self.token: Any = None
        self.steps_before = 0
        self.unread: jax.Array | None = None
        self.since_read = 0  # calls
        self.arrays: list[weakref.ref[jax.Array]] = []  # of its newest state, while another lineage goes on


class Window:
    """The tokens of a step's last calls; at most `limit` of them are in flight."""

    # `inspect` gets a token's value (see `non_finite`) and its lineage, once known; it raises if
    # the step went wrong. `is_doubted`: another step may have consumed the newest state since.
    # `lock` is held while the step or its window change, as several threads may call the step;
    # nobody waits for a device while holding it.

    def __init__(
        self,
        strategy: Strategy,
        limit: int,
        inspect: Callable[[np.ndarray, Lineage], None],
        newest_state: Callable[[], Any] = lambda: None,
    ):
        self.strategy, self.limit, self._inspect, self.newest_state = strategy, limit, inspect, newest_state
        self.lock = threading.RLock()
        self._tokens: collections.deque[tuple[Lineage, jax.Array]] = collections.deque()
        self.lineage = Lineage()
        self.is_doubted = False
        self._parked: list[Lineage] = []
        _windows.add(self)

    def add(self, token: jax.Array, lineage: Lineage | None = None) -> None:
        """Adds the newest token; waits for the older half if there are too many."""
        # Half, because every wait costs a switch of threads; the newer half keeps the devices busy
        # meanwhile. Only tokens of the call's own lineage (None: the present one) are inspected: an
        # error of another state is raised when that state is used.
        lineage = self.lineage if lineage is None else lineage
        with self.lock:
            self._tokens.append((lineage, token))
            lineage.since_read += 1
            oldest = None
            if len(self._tokens) >= self.limit:
                for _ in range((self.limit - 1) // 2):
                    self._pop()
                oldest = self._pop()
        if oldest is not None:
            oldest.block_until_ready()
        # Not at every wait: reading takes time, and a token covers all calls before it.
        if lineage.since_read >= self.limit:
            self._read(lineage)

    def _pop(self) -> jax.Array:
        lineage, token = self._tokens.popleft()
        lineage.unread = token
        return token

    def _read(self, lineage: Lineage) -> None:
        with self.lock:
            token, lineage.unread, lineage.since_read = lineage.unread, None, 0
        if token is not None:
            self._inspect(_value(token), lineage)

    def drain(self, lineage: Lineage | None = None) -> None:
        """Waits for every call in flight and looks at the newest token of a lineage, or of each."""
        with self.lock:
            while self._tokens:
                self._pop()
            lineages = [*self._parked, self.lineage] if lineage is None else [lineage]
        for each in lineages:
            self._read(each)

    def go_on_from(self, state: Any) -> None:
        """Switches to the lineage that made a state, or to a new one; called with the lock held."""
        # A state of unknown origin may derive from the newest one, so the calls that made the
        # newest are waited for and inspected first, which may raise.
        if is_newest(self.newest_state(), state):
            return
        self._parked = [each for each in self._parked if any(array() is not None for array in each.arrays)]
        lineage = self._lineage_of(state)
        if lineage is None:
            self.drain(self.lineage)
            lineage = Lineage()
        else:
            self._parked.remove(lineage)
        self.lineage.arrays = [weakref.ref(x) for x in jax.tree.leaves(self.newest_state()) if isinstance(x, jax.Array)]
        self._parked.append(self.lineage)
        self.lineage = lineage

    def _lineage_of(self, state: Any) -> Lineage | None:
        ids = {id(x) for x in jax.tree.leaves(state)}
        return next(
            (each for each in self._parked if any(id(x) in ids for ref in each.arrays if (x := ref()) is not None)),
            None,
        )

    def drain_lineage_of(self, state: Any) -> None:
        """Waits for every call in flight, and inspects the newest token of those that made a state."""
        with self.lock:
            lineage = self.lineage if is_newest(self.newest_state(), state) else self._lineage_of(state)
        if lineage is None:
            self.block()
        else:
            self.drain(lineage)

    def block(self) -> None:
        """Waits for every call in flight, and inspects no token."""
        with self.lock:
            newest = self._tokens[-1][1] if self._tokens else None
        if newest is not None:
            newest.block_until_ready()

    def clear(self, lineage: Lineage | None = None) -> None:
        """Forgets a lineage's tokens, after an error was raised for them."""
        lineage = self.lineage if lineage is None else lineage
        self._tokens = collections.deque(each for each in self._tokens if each[0] is not lineage)
        lineage.unread = None

    def forget(self) -> None:
        """Forgets all calls, as their devices are gone."""
        self._tokens.clear()
        self._parked, self.lineage = [], Lineage()


class NewestState:
    """The state that a step's newest call made."""

    # A call's program appends `(token, state, outputs)` to `results`, at most one entry; the next
    # reader takes it. `results_hold_state`: the state in it is a new one. `packed` is the state as
    # programs take it, with its constants apart; the same object if it has none.

    def __init__(self) -> None:
        self.state: PyTree = None
        self.packed: PyTree = None
        self.results: list[Any] = []
        self.results_hold_state = False
        self._has_constants = False

    def begin_with(self, packed: PyTree) -> None:
        """Notes which leaves of a state that comes from elsewhere are constants: they stay so from call to call."""
        self._has_constants = has_static(packed)

    def check_nothing_lost(self, name: str, state: PyTree) -> None:
        """Raises StepError for a state that was made of this one, without what this one carries."""
        lost = carried_by(self.state) - carried_by(state)
        if not lost:
            return
        arrays = [[x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)] for tree in (self.state, state)]
        if is_newest(*arrays):
            raise StepError(
                f"{name} was called with a state that has lost its {' and '.join(sorted(lost))}. Change a state "
                "by its own methods, `state.replace(...)`, or by `state.with_user({**state.user, ...})`. To begin again "
                "without them, pass `strategy.fetch(state)`."
            )

    def look(self) -> PyTree:
        """Returns the newest state, that of results which were not taken yet included."""
        return unpack(self.results[0][1]) if self.results and self.results_hold_state else self.state

    def take(self) -> None:
        """Takes the state from the results, and forgets them."""
        if self.results_hold_state:
            self.packed = self.results[0][1]
            self.state = unpack(self.packed) if self._has_constants else self.packed
        self.results = []


def _value(token: jax.Array) -> np.ndarray:
    """Reads a token from one device: with eight that takes less than half the time of reading the whole array."""
    return np.asarray(token.addressable_data(0))


def wait_for(strategy: Strategy, state: Any) -> None:
    """Waits for every call in flight under a strategy, and inspects those that made `state`."""
    # A failed step raises when its own state is used, not when that of another step is.
    for window in list(_windows):
        if window.strategy is strategy:
            window.drain_lineage_of(state)


def doubt_newest_states() -> None:
    """Makes every step check at its next call that its newest state was not donated."""
    # Called when a step adopts a state, which may hold arrays of another step's newest one. JAX
    # 0.10 ends the process when it is given donated buffers on several devices, so the check must
    # come first.
    for window in list(_windows):
        window.is_doubted = True


def is_newest(newest: Any, state: Any) -> bool:
    """Returns whether a state is a step's newest, or holds an array of it: one of several, or some in another tree."""
    if newest is state:
        return True
    ids = {id(leaf) for leaf in jax.tree.leaves(newest)}
    return any(id(leaf) in ids for leaf in jax.tree.leaves(state))
