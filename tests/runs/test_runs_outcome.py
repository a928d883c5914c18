"""By what a sweep's runs are sorted."""

import datetime
import math
from pathlib import Path
from types import SimpleNamespace

from jdist.runs.outcome import Ranking
from jdist.runs.summary import RunSummary


def run_of(losses):
    config = SimpleNamespace(checkpoint=SimpleNamespace(best=None, mode=None))
    rows = [{"step": i, "eval/loss": loss} for i, loss in enumerate(losses)]
    when = datetime.datetime(2020, 1, 1)
    return RunSummary(
        path=Path("run"), config=config, status="finished", step=3, total_steps=3, rows=rows, changed_at=when
    )


def test_a_run_that_has_diverged_comes_last():
    diverged, good, better = run_of([0.1, None]), run_of([0.5, 0.3]), run_of([0.5, 0.2])
    assert math.isnan(diverged.last("loss"))
    assert diverged.best("loss") == 0.1
    for mode, expected in (("min", [better, good, diverged]), ("max", [good, better, diverged])):
        ranking = Ranking(metric="loss", mode=mode)
        assert sorted([diverged, good, better], key=ranking) == expected
        assert ranking(None) == ranking(diverged)
