"""`jdist run` of a task whose steps return what `jdist.metrics` metrics contribute."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import toy_classes
from sklearn.metrics import accuracy_score, confusion_matrix, roc_auc_score

import jdist
from jdist.cli.main import main
from jdist.loop.metric_totals import MetricTotals
from tests.experiment.test_run import params_in


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("classes.yaml").write_text(toy_classes.CONFIG)

    def call(*arguments):
        return main(["run", *arguments]), *capfd.readouterr()

    return call


@pytest.mark.parametrize(("how", "per_call"), [("by name", 4), ("all at once", 1)])
def test_metrics_are_exact_over_all_rows_and_the_run_repeats_to_the_bit(run, how, per_call):
    code, out, err = run("classes.yaml", f"task.options.how={how}", f"train.steps_per_call={per_call}")
    assert (code, err) == (0, "")
    assert "confusion  2 x 2 numbers, in metrics.jsonl" in out
    rows = [json.loads(line) for line in Path("runs/classes/metrics.jsonl").read_text().splitlines()]
    assert ("accuracy" in rows[0]) == (how == "by name")
    params = params_in("runs/classes", step=8, config="classes.yaml")
    y, logits = toy_classes.HELD_OUT["y"], toy_classes.HELD_OUT["x"] @ params["w"] + params["b"]
    assert rows[-1]["eval/auc"] == pytest.approx(roc_auc_score(y, logits[:, 1] - logits[:, 0]))
    assert rows[-1]["eval/accuracy"] == pytest.approx(accuracy_score(y, logits.argmax(1)))
    assert rows[-1]["eval/confusion"] == confusion_matrix(y, logits.argmax(1)).tolist()
    code, out, err = run("--replay", "runs/classes")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("matched: 2 rows of metrics")
    assert main(["runs", "runs/classes", "runs/classes.replay"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["checkpoint.best=eval/acuracy", "checkpoint.mode=max", "--dry-run"],
            'no metric "eval/acuracy" (override checkpoint.best=eval/acuracy). Did you mean eval/accur',
        ),
        (["task.options.how=undeclared", "--dry-run"], "the step returned metric 'accuracy' of dict, not a scalar"),
        (
            ["task.options.how='all at once'", "checkpoint.best=eval/acuracy", "checkpoint.mode=max"],
            "Did you mean eval/accuracy?",
        ),
    ],
)
def test_what_is_no_metric_is_refused_before_training(run, arguments, said):
    _, out, err = run("classes.yaml", *arguments)
    assert said in err
    assert "step 4/8" not in out


def test_an_array_cannot_be_the_best(run):
    code, _, err = run("classes.yaml", "checkpoint.best=eval/confusion", "checkpoint.mode=max")
    assert code == 2
    assert '"eval/confusion" is an array of shape (2, 2), and not one number' in err
    assert "It has: eval/accuracy, eval/auc, eval/loss." in err


def test_evaluate_and_fit_take_a_tasks_own_metrics():
    task = toy_classes.make("all at once")
    state = task.create_state(jax.random.key(0), optax.sgd(0.5))
    found = jdist.evaluate(task, state, toy_classes.HELD_OUT, global_batch=8)
    assert found["auc"] == 0.5
    _, history = jdist.fit(
        task,
        state,
        toy_classes.DATA,
        global_batch=16,
        eval_data=toy_classes.HELD_OUT,
        progress=False,
        log_to=None,
    )
    assert history.evals[-1]["confusion"].sum() == 21


@pytest.mark.parametrize("metrics", [[1], {"auc": 3}, "auc"])
def test_metrics_that_are_none_are_refused(metrics):
    with pytest.raises(jdist.errors.StepError, match=r"`metrics` is .*; give metrics by name"):
        MetricTotals(metrics)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [(3.0, "returned float for metrics"), ({"a": np.zeros(3)}, r"'a' of shape \(3,\), not a scalar")],
)
def test_what_is_no_scalar_is_refused(metrics, message):
    with pytest.raises(jdist.errors.StepError, match=message):
        MetricTotals().note(metrics)


def test_of_several_steps_the_last_is_the_newest():
    tally = MetricTotals(steps_per_call=4)
    tally.note({"a": np.arange(4), "loss": np.ones(4)})
    assert list(tally.newest().items()) == [("loss", 1.0), ("a", 3.0)]
