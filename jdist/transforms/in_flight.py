"""Steps that were started and not yet waited for.

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

from jdist.strategy import Strategy

_windows: weakref.WeakSet[Window] = weakref.WeakSet()


class Window:
    """The tokens of the last calls of one step, at most `limit` of them not waited for.

    Args:
        strategy: the step's strategy; `wait_for(strategy)` drains all its windows.
        limit: how many calls may be in flight.
        inspect: called with a token's value, int32[2], once it is known; raises where the step went wrong.
        newest_state: returns the state that the step's newest call made.

    Attributes:
        lock: held while what the step or its window know is changed, as several threads may call the step; nobody waits
            for a device while holding it.
    """

    def __init__(
        self,
        strategy: Strategy,
        limit: int,
        inspect: Callable[[np.ndarray], None],
        newest_state: Callable[[], Any] = lambda: None,
    ):
        self.strategy, self.limit, self._inspect, self.newest_state = strategy, limit, inspect, newest_state
        self.lock = threading.RLock()
        self._tokens: collections.deque[jax.Array] = collections.deque()
        self._waits = 0
        self._unread: jax.Array | None = None
        _windows.add(self)

    def add(self, token: jax.Array) -> None:
        """Takes in the newest token; waits for the older half if there are too many.

        Half, because every wait costs a switch of threads; the newer half keeps the devices busy meanwhile.
        """
        tokens = self._tokens
        with self.lock:
            tokens.append(token)
            if len(tokens) < self.limit:
                return
            for _ in range((self.limit - 1) // 2):
                tokens.popleft()
            oldest = tokens.popleft()
        oldest.block_until_ready()
        with self.lock:
            self._waits += 1
            self._unread = oldest
        if self._waits % 2 == 0:  # codes are sticky, so a token tells of all before it, and reading one takes time
            self._read()

    def _read(self) -> None:
        with self.lock:
            token, self._unread = self._unread, None
        if token is not None:
            self._inspect(_value(token))

    def drain(self) -> None:
        """Waits for every call in flight and looks at the newest token."""
        with self.lock:
            if self._tokens:
                self._unread = self._tokens[-1]
                self._tokens.clear()
        self._read()

    def block(self) -> None:
        """Waits for every call in flight, and leaves the looking for later."""
        with self.lock:
            newest = self._tokens[-1] if self._tokens else None
        if newest is not None:
            newest.block_until_ready()

    def clear(self) -> None:
        """Forgets the tokens, after an error was raised for them."""
        self._tokens.clear()
        self._unread = None


def _value(token: jax.Array) -> np.ndarray:
    """The token's value, from one device: on eight that takes less than half the time of asking the whole array."""
    return np.asarray(token.addressable_data(0))


def wait_for(strategy: Strategy, state: Any) -> None:
    """Waits for every call in flight under a strategy, and looks at those that made `state`.

    A step that went wrong says so when its own state is used, not when that of another step is.
    """
    for window in list(_windows):
        if window.strategy is strategy:
            if _made(window.newest_state(), state):
                window.drain()
            else:
                window.block()


def _made(newest: Any, state: Any) -> bool:
    """Whether a state is a step's newest, or holds an array of it: one of several states, or some of them in another tree."""
    if newest is state:
        return True
    ids = {id(leaf) for leaf in jax.tree.leaves(newest)}
    return any(id(leaf) in ids for leaf in jax.tree.leaves(state))
