"""A run through worlds of other processes: copies on the host, from which all go on after a process was lost."""

from __future__ import annotations

import functools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jdist.cluster.runtime import Runtime
from jdist.cluster.worlds.elastic import ElasticRuntime
from jdist.cluster.worlds.member import Place, Released
from jdist.errors import DatasetError, StepError
from jdist.loop.run import Run, Snapshot
from jdist.support.arrays import is_array, is_key, tree_to_host
from jdist.typing import PyTree

_SHARE = 0.01  # of the time of training, for copies of the state
_EXCHANGE_S = 300.0
_PIECE = 1 << 26  # bytes that are sent at once
_LENGTH = 8  # bytes of a number
NOT_BEGUN = -1


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
        if place.newcomers and place.step not in (None, NOT_BEGUN):
            found = _share(self._cluster, found, place.newcomers, like)
        found = found or self._kept[0]
        self._kept.clear()
        self._kept.append(found)
        self._since, self._count, self._every, self._next = None, 0, 1, found.step + 1  # as for those that came in
        return found


def go_through(run: Run, check: Callable[[], None], start: Callable[[], None]) -> None:
    """Makes a run from world to world, as the others go on without a lost process."""
    cluster = run.strategy.cluster
    assert isinstance(cluster, ElasticRuntime)
    if not run.feed.has_position:
        raise DatasetError(
            f'`data` is {run.feed.kind} without a position, and `on_loss` is "continue", which goes back to one after a loss. '
            f"{run.feed.advice[:1].upper()}{run.feed.advice[1:]}."
        )
    snapshots = Snapshots(cluster, Snapshot(NOT_BEGUN, {"state": tree_to_host(run.state)}))
    run.after_step = functools.partial(snapshots.take_if_due, run)
    moves, is_begun, like = cluster.is_aside, False, {}
    if cluster.is_aside:
        check()
        like = tree_to_host(run.live())
    while True:
        try:
            if moves:
                _close_callbacks(run, cluster)
                snapshot = snapshots.go_on(cluster.next_world(() if like else snapshots.steps), like)
                run.restore(snapshot)
                moves, like, is_begun = False, {}, snapshot.notes is not None
                if is_begun:
                    start()
            if not is_begun:
                check()
                start()
                is_begun = True
            snapshots.take_if_due(run)
            run.go_round()
            if run.is_complete or not cluster.goes_on():
                run.end()
                return
            snapshots.take(run)
        except Released:
            return
        except Exception as exc:
            if not cluster.is_loss(exc):
                raise
        moves = True


def _close_callbacks(run: Run, cluster: ElasticRuntime) -> None:
    """Closes the callbacks before the run goes on in another world, where they are begun again."""
    for callback in run.callbacks:
        try:
            if callback.close is not None:
                callback.close()
        except Exception as exc:
            if not cluster.is_loss(exc):
                raise


def _share(
    cluster: Runtime, snapshot: Snapshot | None, newcomers: Collection[int], like: Mapping[str, PyTree]
) -> Snapshot:
    """Sends the snapshot of the first process that has one to those that have none, as bytes: each bit arrives."""
    source = min(set(range(cluster.num_processes)).difference(newcomers))
    data = b"" if snapshot is None or cluster.process_index != source else _encode(snapshot)
    size = cluster.exchange("bytes of a state", len(data), _EXCHANGE_S)[source]
    received = bytearray()
    for begin in range(0, size, _PIECE):
        piece = np.zeros(min(_PIECE, size - begin), np.uint8)
        if data:
            piece[:] = np.frombuffer(data, np.uint8, count=len(piece), offset=begin)
        with cluster.blocked():
            received += multihost_utils.broadcast_one_to_all(piece, is_source=bool(data)).tobytes()
    return _decode(received, like) if snapshot is None else snapshot


def _encode(snapshot: Snapshot) -> bytes:
    leaves = _arrays(snapshot.trees)
    about = [snapshot.step, snapshot.data, snapshot.notes, [[x.shape, x.dtype.name] for x in leaves]]
    header = json.dumps(about).encode()
    return b"".join([len(header).to_bytes(_LENGTH), header, *(x.tobytes() for x in leaves)])


def _decode(data: bytearray, like: Mapping[str, PyTree]) -> Snapshot:
    begin = _LENGTH + int.from_bytes(data[:_LENGTH])
    step, position, notes, sent = json.loads(data[_LENGTH:begin])
    own, tree = jax.tree.flatten(dict(like))
    arrays = iter(checked := _arrays(like))
    if sent != [[list(x.shape), x.dtype.name] for x in checked]:
        raise StepError(
            "the arrays of this process's state are others than those of the job that it comes into. Start it with the same "
            "program and options."
        )
    leaves = []
    for mine in own:
        if not is_array(mine):
            leaves.append(mine)
            continue
        array = next(arrays)
        leaf = np.frombuffer(data, array.dtype, count=array.size, offset=begin).reshape(array.shape).copy()
        begin += array.nbytes
        leaves.append(
            jax.random.wrap_key_data(jnp.asarray(leaf), impl=jax.random.key_impl(mine)) if is_key(mine) else leaf
        )
    return Snapshot(step, jax.tree.unflatten(tree, leaves), position, notes)


def _arrays(trees: Mapping[str, PyTree]) -> list[np.ndarray]:
    arrays = [x for x in jax.tree.leaves(dict(trees)) if is_array(x)]
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in arrays]
