"""Snapshots of a run on the host, and the way from one to the next world after a process was lost."""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jdist.cluster.runtime import Runtime
from jdist.cluster.worlds.elastic import ElasticRuntime
from jdist.cluster.worlds.member import Place, Released
from jdist.errors import StepError
from jdist.support.arrays import is_key, to_host
from jdist.typing import PyTree

if TYPE_CHECKING:
    from jdist.loop.run import Run

_SHARE = 0.01  # of the time of training, for copies of the state
_EXCHANGE_S = 300.0
_PIECE = 1 << 26  # bytes that are sent at once


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run after a step, on the host."""

    step: int  # -1: not begun
    trees: Mapping[str, PyTree]  # the state, and what callbacks keep
    about: Mapping[str, Any] | None  # the position in the data, the rows, the totals; None: not begun


class Snapshots:
    """The newest two states that all processes have copies of."""

    # All take them after the same steps, so that the older one is everybody's. They choose the steps between two together.

    def __init__(self, cluster: Runtime, first: Snapshot):
        self._cluster, self._kept = cluster, deque([first], maxlen=2)
        self._since: tuple[int, float] | None = None  # the step and time after the last one
        self._every, self._next, self._count = 1, 0, 0

    @property
    def steps(self) -> list[int]:
        """The steps at which the run could go on."""
        return [each.step for each in self._kept]

    def take_if_due(self, run: Run) -> None:
        """Copies the run to the host, seldom enough to cost little."""
        if run.step >= self._next:
            self.take(run)

    def take(self, run: Run) -> None:
        """Copies the run to the host, once the steps in flight are done."""
        run.train_step.wait()
        begun, step = time.monotonic(), run.step
        self._kept.append(run.capture())
        took, self._count = time.monotonic() - begun, self._count + 1
        if self._since is not None and self._count & (self._count - 1) == 0:  # a power of two: they agree seldom
            step_s = (begun - self._since[1]) / max(1, step - self._since[0])
            wished = math.ceil(took / (_SHARE * step_s))
            self._every = max(self._cluster.exchange("steps between copies of the state", wished, _EXCHANGE_S))
        self._since, self._next = (step, time.monotonic()), step + self._every

    def go_on(self, place: Place, like: Mapping[str, PyTree]) -> Snapshot:
        """Returns the copy from which all go on; those that come in receive it."""
        found = next((each for each in self._kept if each.step == place.step), None)
        if place.step is not None and place.newcomers:
            found = _share(self._cluster, found, place.newcomers, like)
        found = found or self._kept[0]
        self._kept.clear()
        self._kept.append(found)
        self._since, self._count, self._every, self._next = None, 0, 1, found.step + 1  # as for those that came in
        return found


def go_through(run: Run, prepare: Callable[[], None], start: Callable[[], None]) -> None:
    """Makes a run, from world to world where the others go on without a lost process."""
    cluster = run.strategy.cluster
    if not isinstance(cluster, ElasticRuntime):
        prepare()
        start()
        run.go_round()
        run.end()
        return
    first = Snapshot(step=-1, trees={"state": jax.tree.map(to_host, run.state)}, about=None)
    run.snapshots = snapshots = Snapshots(cluster, first)
    moves, is_begun = cluster.is_aside, False
    if moves:
        prepare()
    while True:
        try:
            if moves:
                like = run.live()
                place = cluster.next_world(() if cluster.is_aside else snapshots.steps)
                snapshot = snapshots.go_on(place, like)
                run.restore(snapshot)
                moves = False
                if snapshot.about is None:
                    is_begun = False
                elif not is_begun:
                    start()
                    is_begun = True
            if not is_begun:
                prepare()
                start()
                is_begun = True
            snapshots.take_if_due(run)
            run.go_round()
            if run.is_complete or not cluster.goes_on():
                run.end()
                return
            snapshots.take(run)
            run.leave()
        except Released:
            return
        except Exception as exc:
            if not cluster.is_loss(exc):
                raise
            run.leave()
        moves = True


def _share(
    cluster: Runtime, snapshot: Snapshot | None, newcomers: Collection[int], like: Mapping[str, PyTree]
) -> Snapshot:
    """Sends the snapshot of the first process that has one to all, as bytes: each bit arrives."""
    source = min(set(range(cluster.num_processes)).difference(newcomers))
    is_source, data = cluster.process_index == source, b""
    if is_source:
        assert snapshot is not None
        leaves = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(dict(snapshot.trees))]
        data = pickle.dumps((snapshot.step, [np.asarray(x) for x in leaves], snapshot.about), protocol=5)
    size = cluster.exchange("bytes of a state", len(data), _EXCHANGE_S)[source]
    received = bytearray()
    for begin in range(0, size, _PIECE):
        piece = np.zeros(min(_PIECE, size - begin), np.uint8)
        if is_source:
            piece[:] = np.frombuffer(data, np.uint8, count=len(piece), offset=begin)
        with cluster.blocked():
            received += multihost_utils.broadcast_one_to_all(piece, is_source=is_source).tobytes()
    step, leaves, about = pickle.loads(received)  # from a process with the job's token
    own, tree = jax.tree.flatten(dict(like))
    if [np.shape(x) for x in leaves] != [np.shape(jax.random.key_data(x) if is_key(x) else x) for x in own]:
        raise StepError(
            "the state of this process differs in its arrays from that of the job which it comes into. Start it with the same "
            "program and options."
        )
    leaves = [
        jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(y)) if is_key(y) else x
        for x, y in zip(leaves, own, strict=True)
    ]
    return Snapshot(step=step, trees=jax.tree.unflatten(tree, leaves), about=about)
