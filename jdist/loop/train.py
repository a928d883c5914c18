"""`train`: a run from its checks to its end, through worlds of other processes where a loss does not end it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable

from jdist.cluster.stop import Preemption
from jdist.cluster.worlds.elastic import ElasticRuntime
from jdist.cluster.worlds.member import Released
from jdist.data.dataset import DistributedDataset
from jdist.errors import DatasetError
from jdist.loop.costs import Costs
from jdist.loop.memory import naming_leaves
from jdist.loop.report.times import Outcome
from jdist.loop.run import Run, Snapshot
from jdist.loop.steps import check_resumes, check_returned, check_watched, names_of
from jdist.loop.worlds import NOT_BEGUN, Snapshots
from jdist.step.options import Verify
from jdist.support.arrays import tree_to_host
from jdist.typing import PyTree


def train(run: Run, state: PyTree, *, stop: Preemption, verify: Verify, depth: int) -> None:
    """Trains to the end, from a state (consumed) or from an earlier process's checkpoint."""
    # `depth` counts the calls up to the user's own, for the location of warnings.
    run.stop, run.state = stop, state
    with contextlib.ExitStack() as ends:
        run.costs = Costs(run.strategy, begun=run.begun)
        ends.callback(run.costs.close)
        for callback in run.callbacks:
            if callback.close is not None:
                ends.callback(callback.close)
        if isinstance(run.feed.batches, DistributedDataset):
            ends.callback(run.feed.batches.close)
        outcome: Outcome = "failed"
        try:
            with naming_leaves(run.live):
                check = functools.partial(_check, run, verify, depth=depth + 2)
                _go_through(run, check, functools.partial(run.start, ends, depth + 2))
            outcome = "finished" if not run.was_ended else "stopped"
            if stop.reason is not None:
                outcome = "interrupted" if stop.reason == "SIGINT" else "preempted"
        finally:
            run.costs.end(outcome, run.step)


def _check(run: Run, verify: Verify, *, depth: int) -> None:
    """Checks a run against the traced steps, before anything is compiled, and lays out its state."""
    run.state = run.train_step.prepare(run.state, run.feed.batches.element_spec)
    tell = functools.partial(print, file=sys.stderr) if run.strategy.cluster.is_chief else None
    run.train_step.verify_next(verify, pads=run.feed.pads, tell=tell)
    names: frozenset[str] | None = frozenset()
    if run.evaluate is not None:
        step = run.evaluate.step
        if (
            run.train_step.options.verify != "off"
            and run.strategy.cluster.num_processes > 1
            and step.options.verify is None
        ):
            tell = None  # the same as of the train step
        step.verify_next(verify, pads=run.evaluate.feed.pads, tell=tell)
    trained = names_of(run.train_step, run.state, run.feed, run.metrics, depth=depth + 1)
    if run.evaluate is not None:
        names = run.evaluate.names(run.state, depth=depth + 1)
    check_returned(run.metrics, trained, names)
    check_resumes(run.callbacks, run.feed, depth=depth + 1)
    check_watched(run.callbacks, trained=trained, evaluated=names, evaluates=run.evaluate is not None)
    for keeps in run.kept.values():
        keeps.begin(run.state)


def _go_through(run: Run, check: Callable[[], None], start: Callable[[], None]) -> None:
    """Makes a run, from world to world where the others go on without a lost process."""
    cluster = run.strategy.cluster
    if not isinstance(cluster, ElasticRuntime):
        check()
        start()
        run.go_round()
        run.end()
        return
    if not run.feed.has_position:
        raise DatasetError(
            f'`data` is {run.feed.kind} without a position, and `on_loss` is "continue", which goes back to one after a loss. '
            f"{run.feed.advice[:1].upper()}{run.feed.advice[1:]}."
        )
    first = Snapshot(NOT_BEGUN, {"state": tree_to_host(run.state)})
    snapshots = Snapshots(cluster, first)
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
