"""By what a sweep's runs are sorted."""

import csv
import datetime
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from jdist.cli.runs.grid import Ranking, parse_grid, points, write_outcome
from jdist.cli.runs.summary import RunSummary


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


@pytest.mark.parametrize(
    "key", ["train.steps", "task.options.loss", "task.options.time_s", "a.run", "a.status", "a.trained"]
)
def test_an_axis_that_is_called_as_another_column_has_a_column_by_its_whole_key(tmp_path, key):
    trials = points(parse_grid([f"{key}=10,20", "train.seed=7"]))
    ranking = Ranking(metric="loss", mode="min")
    text = write_outcome(tmp_path, trials, {trials[1]: run_of([0.5, 0.25])}, {}, ranking)
    header, best, other = text.splitlines()[:3]
    assert header.split()[:4] == [key, "seed", "loss", "best"]
    assert (best.split()[:3], other.split()[:3]) == (["20", "7", "0.25"], ["10", "7", "-"])
    rows = json.loads((tmp_path / "table.json").read_text())
    with (tmp_path / "table.csv").open() as file:
        assert [row[key] for row in csv.DictReader(file)] == [row[key] for row in rows] == ["20", "10"]
    expected = {"run": trials[1].name, "seed": "7", "loss": 0.25, "steps": 3, "time_s": 0.0, "status": "finished"}
    assert rows[0] == {**expected, key: "20", "best loss": 0.25}
