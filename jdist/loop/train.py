"""`train`: a run from its checks to its end."""

from __future__ import annotations

import contextlib
import functools
import sys

from jdist.cluster.stop import Preemption
from jdist.data.dataset import DistributedDataset
from jdist.loop.costs import Costs
from jdist.loop.memory import naming_leaves
from jdist.loop.report.times import Outcome
from jdist.loop.run import Run
from jdist.loop.steps import check_resumes, check_returned, check_watched, names_of
from jdist.step.options import Verify
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
                is_elastic = run.strategy.cluster.is_elastic
                inner = depth + (2 if is_elastic else 1)
                check = functools.partial(_check, run, verify, depth=inner)
                start = functools.partial(run.start, ends, inner)
                if is_elastic:
                    from jdist.loop.worlds import go_through  # which most programs do not need

                    go_through(run, check, start)
                else:
                    check()
                    start()
                    run.go_round()
                    run.end()
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
