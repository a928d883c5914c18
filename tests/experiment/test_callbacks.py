"""`callbacks` of a config, and that a run by a config is the same as `jdist.fit` of what the config says."""

import csv
import json
import re
import sys
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import toy_regression

import jdist
from jdist import callbacks
from jdist.callbacks.tracker import TIMEOUT_S
from jdist.cli.main import main
from jdist.errors import ConfigError
from jdist.experiment.callbacks import complete, make_callbacks
from jdist.experiment.load import load
from jdist.experiment.prepare import check_names, prepare
from jdist.experiment.validate import validate
from jdist.train import Checkpointer
from tests.experiment.test_run import params_in, rows_of
from tests.toys import without_costs

ENDLESS_PATIENCE = "{early_stopping: {metric: epoch/loss, patience: 1000}}"
STOPS = "callbacks=[{early_stopping: {metric: eval/loss, patience: 1, min_delta: 1000}}]"


@pytest.fixture
def document(tmp_path):
    """`(overrides) -> document` of the toy's config."""
    (tmp_path / "toy.yaml").write_text(toy_regression.CONFIG)
    return lambda *overrides: load(tmp_path / "toy.yaml", overrides)


def begun(strategy):
    return strategy.init(lambda key: toy_regression.make().create_state(key, optax.adamw(1e-2)), jax.random.key(0))


def by_fit(*told, log_every=4, **options):
    """The run that the toy's config describes, written with `jdist.fit`."""
    task, strategy = toy_regression.make(), jdist.mirrored()
    state, history = jdist.fit(
        jdist.distribute(task.train_step, strategy, check_replicas=1000, **options),
        begun(strategy),
        task.train_data(16, 0, None),
        steps=24,
        eval_data=task.eval_data(8),
        eval_step=task.eval_step,
        eval_every=8,
        log_every=log_every,
        callbacks=told,
        progress=False,
        log_to=None,
    )
    return strategy.fetch(state), history


def measured(rows):
    """Each row without what only one of the two front ends says of it."""
    return [{name: x for name, x in row.items() if name not in ("epoch", "examples")} for row in without_costs(rows)]


def without_callbacks(rows):
    rows = [{n: v for n, v in row.items() if not n.startswith("epoch/") and n != "learning_rate"} for row in rows]
    return [row for row in rows if len(row) > 1]


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ([], {}),
        (["train.accumulate=2"], {"accumulate": 2}),
        (["train.steps_per_call=4"], {"steps_per_call": 4}),
        (["log.every=3"], {}),
    ],
    ids=["plain", "accumulate", "steps per call", "rows within epochs"],
)
def test_a_run_by_config_and_the_same_program_with_fit_are_equal_to_the_bit(jdist_run, overrides, options):
    every = 3 if overrides == ["log.every=3"] else 4
    whole, history = by_fit(callbacks.learning_rate_log(1e-2), log_every=every, **options)
    code, _, err = jdist_run(f"callbacks=[learning_rate_log, {ENDLESS_PATIENCE}]", *overrides)
    assert (code, err) == (0, "")
    jax.tree.map(np.testing.assert_array_equal, params_in("runs/toy", step=24), whole.params)
    rows = rows_of("runs/toy")
    assert [row["step"] for row in rows if "loss" in row] == sorted({*range(every, 25, every), 24})
    assert measured(rows) == measured(history.rows)
    assert [row["epoch/loss"] for row in rows if "epoch/loss" in row] == [row["loss"] for row in history.epochs]
    code, _, err = jdist_run("name=plain", *overrides)
    assert (code, err) == (0, "")
    assert measured(rows_of("runs/plain")) == without_callbacks(measured(rows))


def test_early_stopping_ends_a_run_that_is_finished_then(jdist_run):
    code, out, err = jdist_run(STOPS)
    assert (code, err) == (0, "")
    assert "stopped at step 16 of 24: eval/loss has not improved on" in out
    assert "finished: 16 steps" in out
    code, again, _ = jdist_run(STOPS)  # it stays where it is
    assert code == 0
    assert "going on from step 16 of 24" in again
    assert again.partition("finished")[2] == out.partition("finished")[2]
    assert json.loads(Path("runs/toy/result.json").read_text())["stopped"].startswith("eval/loss has not improved")
    state, history = by_fit(callbacks.early_stopping("eval/loss", patience=1, min_delta=1000))
    assert history.stopped is not None
    jax.tree.map(np.testing.assert_array_equal, params_in("runs/toy", step=16), state.params)
    assert main(["run", "--replay", "runs/toy"]) == 0
    code, out, _ = jdist_run("callbacks=[]")  # without it the run goes on
    assert (code, "finished: 24 steps" in out) == (0, True)


def test_a_run_that_was_stopped_stops_early_where_it_would_have(jdist_run):
    assert jdist_run(STOPS, "name=whole")[0] == 0
    assert jdist_run(STOPS, "train.steps=8")[0] == 0
    code, out, _ = jdist_run(STOPS)
    assert (code, "stopped at step 16 of 24" in out) == (0, True)
    assert rows_of("runs/toy") == rows_of("runs/whole")


def test_ema_is_saved_goes_on_with_the_run_and_is_read_by_fit(jdist_run):
    asked = "callbacks=[{ema: {decay: 0.9}}]"
    assert jdist_run(asked, "train.steps=8")[0] == 0
    assert jdist_run(asked)[0] == 0
    whole = callbacks.ema(0.9)
    by_fit(whole)
    there = callbacks.ema(0.9)
    by_fit(callbacks.checkpoint("runs/toy/checkpoints"), there)  # at its end already
    jax.tree.map(np.testing.assert_array_equal, there.average(), whole.average())


def test_each_writes_into_the_run_folder(jdist_run, monkeypatch):
    logged, given = [], []

    class Service(types.ModuleType):
        def init(self, **options):
            given.append(options)
            return types.SimpleNamespace(
                log=lambda row, step: logged.append((step, row)), finish=lambda exit_code: logged.append(exit_code)
            )

        def Image(self, picture):
            return picture.format

    monkeypatch.setitem(sys.modules, "wandb", Service("wandb"))
    code, _, err = jdist_run(
        "callbacks=[learning_rate_log, csv, tensorboard, {wandb: {project: x}}, {profiler: {first: 5, last: 6}}, "
        "{nan_guard: {metrics: [loss]}}]",
        "train.optimizer.learning_rate={schedule: cosine_decay_schedule, init_value: 0.1}",
    )
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(Path("runs/toy/metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["4", "8", "12", "16", "20", "24"]
    schedule = optax.cosine_decay_schedule(0.1, 24)
    rates = [row["learning_rate"] for row in rows_of("runs/toy")]
    assert rates == pytest.approx([float(schedule(step - 1)) for step in range(4, 25, 4)], rel=1e-6)
    rows, curves, code = logged[:-2], *logged[-2:]
    assert [step for step, _ in rows] == [4, 8, 12, 16, 20, 24]
    assert [row["loss"] for _, row in rows] == [row["loss"] for row in rows_of("runs/toy")]
    assert (curves, code) == ((24, {"curves": "PNG"}), 0)
    (options,) = given
    assert (options["project"], options["name"], options["dir"]) == ("x", "toy", "runs/toy")
    assert options["config"]["train"]["optimizer"]["learning_rate"]["decay_steps"] == 24  # as resolved
    assert list(Path("runs/toy/tensorboard").iterdir())
    assert list(Path("runs/toy/profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("{trackio: {nam: x}}", r"callbacks\.0\.trackio: no option 'nam'\. Did you mean name\?"),
        ("{trackio: {resume: must}}", r"callbacks\.0\.trackio: jdist sets 'resume' itself\. Options: name, group"),
        ("{mlflow: {uri: x}}", r"callbacks\.0\.mlflow\.uri: mlflow has no such option"),
        ("{tensorbord: {}}", r"callbacks\.0\.tensorbord: no such callback .* Did you mean tensorboard\?"),
    ],
)
def test_a_wrong_name_or_option_of_a_tracker_is_refused_at_the_start(jdist_run, override, message):
    if "{trackio" in override:
        pytest.importorskip("trackio", reason="pip install 'jdist[trackio]'")
    code, out, err = jdist_run(f"callbacks=[{override}]")
    assert (code, "step  4/24" in out) == (2, False)
    assert re.search(message, err)


def test_a_tracker_goes_on_with_its_run_and_begins_another_for_a_fresh_one(jdist_run, monkeypatch):
    """Of two starts, one id; the hyperparameters are the resolved config."""
    pytest.importorskip("tensorboardX")
    started = []
    real = jdist.callbacks.tensorboard

    class Tracker:
        def start(self, run_id, config, *, resumed):
            started.append((run_id, resumed, config))
            return callbacks.Started()

        def log(self, step, scalars, images):
            pass

        def finish(self, status):
            pass

    def make(folder, *, config=None):
        assert real(folder, config=config).name == "tensorboard"
        return callbacks.track(Tracker(), name="tensorboard", config=config)

    monkeypatch.setattr(callbacks, "tensorboard", make)
    assert jdist_run("callbacks=[tensorboard]", "train.steps=8")[0] == 0
    assert jdist_run("callbacks=[tensorboard]")[0] == 0
    assert main(["run", "toy.yaml", "callbacks=[tensorboard]", "train.steps=8", "--fresh"]) == 0
    ids, resumed, configs = zip(*started, strict=True)
    assert (ids[0] == ids[1], ids[0] == ids[2]) == (True, False)
    assert resumed == (False, True, False)
    assert (configs[0]["name"], configs[1]["train"]["steps"]) == ("toy", 24)


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ("csv", {"csv": {"path": "metrics.csv"}}),
        ("{csv: {path: null}}", {"csv": {"path": "metrics.csv"}}),
        ("{csv: {path: x}}", {"csv": {"path": "x"}}),
        ("nan_guard", {"nan_guard": {"metrics": []}}),
        ("learning_rate_log", {"learning_rate_log": {"name": "learning_rate"}}),
        ("{trackio: {project: x}}", {"trackio": {"project": "x", "config": None, "timeout_s": TIMEOUT_S}}),
    ],
)
def test_the_record_has_the_defaults_that_are_plain_values(document, given, filled):
    config = complete(validate(document(f"callbacks=[{given}]")))
    assert config.callbacks == [filled]
    assert complete(config) == config


@pytest.mark.parametrize("options", ["", "run_name: null", "run_name: null, tags: null"])
def test_null_means_the_value_that_the_run_has_for_an_option(document, tmp_path, monkeypatch, options):
    def mlflow(*, run_name: str | None = None, tags: dict[str, str] | None = None):
        return types.SimpleNamespace(run_name=run_name, tags=tags)

    monkeypatch.setattr(callbacks, "mlflow", mlflow)
    asked = document(f"callbacks=[{{mlflow: {{{options}}}}}, {{csv: {{path: null}}}}]")
    config = validate(asked)
    check_names(config, asked)
    mlflow_made, _ = make_callbacks(config, {}, 0.1, asked, tmp_path)
    assert (mlflow_made.run_name, mlflow_made.tags) == ("toy", None)


def test_the_resolved_config_and_a_dry_run_show_them_with_their_options(jdist_run):
    code, out, err = jdist_run("callbacks=[ema, {early_stopping: {patience: 5}}]", "--dry-run")
    assert (code, err) == (0, "")
    shown = next(line for line in out.splitlines() if line.startswith("callbacks:"))
    assert "{ema: {decay: 0.999, name: ema}}" in shown
    assert "{early_stopping: {metric: eval/loss, min_delta: 0.0, mode: null, patience: 5}}" in shown
    assert shown.endswith("# override callbacks=[ema, {early_stopping: {patience: 5}}]")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("[erly_stopping]", r"callbacks\.0\.erly_stopping: no such callback .* Did you mean early_stopping\?"),
        ("[csv, {ema: {dcay: 0.9}}]", r"callbacks\.1\.ema\.dcay: ema has no such option .* Did you mean decay\?"),
        ("[{ema: {decay: x}}]", r'callbacks\.0\.ema\.decay: "x" is not a number \(override'),
        ("[{ema: {decay: 1}}]", r"callbacks\.0\.ema\.decay: `decay` is 1; .* \(override"),
        ("[{early_stopping: {patience: 0}}]", r"callbacks\.0\.early_stopping\.patience: `patience` is 0; it must be"),
        (
            "[{early_stopping: {metric: loss}}]",
            r"callbacks\.0\.early_stopping\.metric: `metric` is 'loss'; it must begin with",
        ),
        ("[{early_stopping: {metric: eval/close}}]", "cannot tell from the name 'eval/close' whether higher is better"),
        (
            "[{profiler: {first: 20}}]",
            r"callbacks\.0\.profiler\.last: `last` is 15; it must be a whole number, 20 or more",
        ),
        ("[{csv: {path: ''}}]", r'callbacks\.0\.csv\.path: "" is not at least 1 visible character long'),
        ("[{ema: {name: ' '}}]", r'callbacks\.0\.ema\.name: " " is not at least 1 visible character long'),
        ("[{tensorboard: {folder: ''}}]", r'callbacks\.0\.tensorboard\.folder: "" is not at least 1 visible'),
        ("[{csv: {path: 3}}]", r"callbacks\.0\.csv\.path: 3 is not text"),
        ("[{nan_guard: {metrics: loss}}]", r'callbacks\.0\.nan_guard\.metrics: "loss" is not a list'),
        ("ema", 'callbacks: "ema" is not a list'),
        ("[{ema: 3}]", r"callbacks\.0\.ema: 3 is not a mapping"),
        ("[{ema: {}, csv: {}}]", r"callbacks\.0: .* one name, or one name with its options"),
        ("[checkpoint]", r"callbacks\.0\.checkpoint: no such callback .* Callbacks: csv"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(override, message, document):
    asked = document(f"callbacks={override}")
    with pytest.raises(ConfigError, match=message):
        check_names(validate(asked), asked)


def test_they_are_checked_before_processes_meet_and_before_the_task_is_made(document):
    wrong = ["callbacks=[{ema: {decay: 1}}, {csv: {pth: x}}]", "strategy.topolgy=x", "train.optimizer.lr=1"]
    asked = document(*wrong, "task.make=no:no")
    with pytest.raises(
        ConfigError, match=r"^4 problems with .*\n.*topolgy.*\n.*ema\.decay.*\n.*csv\.pth.*\n.*optimizer\.lr"
    ):
        prepare(validate(asked), asked, make=lambda *_, **__: pytest.fail("the strategy is made"))


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_metric_that_is_not_measured_is_refused_before_training(jdist_run, more):
    code, out, err = jdist_run("callbacks=[{early_stopping: {metric: eval/los, mode: min}}]", *more)
    assert code == 2
    assert 'callbacks.0.early_stopping.metric: the task\'s evaluation has no metric "eval/los"' in err
    assert "Did you mean eval/loss?" in err
    assert "step  4/24" not in out


def test_two_that_keep_the_same_are_refused(jdist_run):
    code, out, err = jdist_run("callbacks=[ema, {ema: {decay: 0.5}}]")
    assert code != 0
    assert "two callbacks of the name 'ema' keep something" in err
    assert "step  4/24" not in out


def test_the_best_is_kept_where_the_state_before_a_nan_is_saved(jdist_run):
    bad = ["task.options.poison_row=40", "train.seed=5", "checkpoint.every=2", "checkpoint.keep=1", "eval.every=2"]
    assert jdist_run(*bad)[0] == 1
    with Checkpointer("runs/toy/checkpoints", best_metric="eval/close") as checkpoints:
        assert (checkpoints.steps(), checkpoints.best_step) == ([2, 3], 2)


def test_after_a_step_that_is_not_finite_a_run_goes_on_from_where_callbacks_were(jdist_run):
    """A state that is saved alone would begin an average anew, and the epoch's mean in its midst."""
    asked = "task.options.poison_row=40", "train.seed=5", "checkpoint.every=2", "log.every=1"
    watching = "callbacks=[{ema: {decay: 0.9}}, {early_stopping: {metric: epoch/loss, patience: 50}}]"
    assert jdist_run(*asked, watching, "train.non_finite=skip", "name=whole")[0] == 0
    code, _, err = jdist_run(*asked, watching)
    assert code == 1
    saved = int(re.search(r"The newest checkpoint is that of step (\d+)\..* go on from there", err, re.DOTALL).group(1))
    code, out, err = jdist_run(*asked, watching, "train.non_finite=skip")
    assert (code, err) == (0, "")
    assert f"going on from step {saved} of" in out
    assert "warning" not in out
    assert measured(rows_of("runs/toy")) == measured(rows_of("runs/whole"))
