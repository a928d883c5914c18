"""Whole runs of the small task in toy_regression.py, in this process."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import toy_regression
from toy_regression import CONFIG

from jdist.cli.main import main
from jdist.experiment.load import load
from jdist.experiment.prepare import prepare
from jdist.experiment.validate import validate
from jdist.loop.evaluate import measure
from jdist.train import Checkpointer
from tests.toys import without_costs

pytestmark = pytest.mark.xdist_group(__name__)  # they share the usual run


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """Parameters and rows at the end of the run as it is configured."""
    folder = tmp_path_factory.mktemp("usual")
    (folder / "toy.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["run", "toy.yaml"]) == 0
        return params_in("runs/toy", step=24), rows_of("runs/toy")


def saved_by(folder, *overrides, config="toy.yaml"):
    """The newest checkpoint of a run."""
    document = load(config, overrides)
    parts = prepare(validate(document), document)
    like = parts.strategy.init(lambda key: parts.task.create_state(key, parts.optimizer), jax.random.key(0))
    with Checkpointer(Path(folder, "checkpoints")) as checkpoints:
        return checkpoints.restore(like)


def params_in(folder, *overrides, step=None, config="toy.yaml"):
    """The parameters in the newest checkpoint of a run."""
    restored = saved_by(folder, *overrides, config=config)
    assert step is None or restored.step == step
    return jax.tree.map(np.asarray, restored.state.params)


def rows_of(folder):
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return without_costs(rows)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_writes_its_folder_and_says_what_it_does(jdist_run):
    code, out, err = jdist_run("train.seed=3")
    assert (code, err) == (0, "")
    assert re.search(r"seed: 3 +# override train\.seed=3", out)
    assert re.search(r"steps: 24 +# toy\.yaml:5", out)
    assert re.search(r"clip_norm: null +# default", out)
    assert f"global batch 16 = {jax.device_count()} replicas x 2" in out
    assert "24 steps = 312 examples = 6 epochs of 52 (4 steps each)" in out
    assert re.search(r"step  4/24  loss \d.*examples/s  .*ETA 0:00:\d\d", out)
    assert "loss of predicting the mean" in out
    assert " ".join(sorted(p.name for p in Path("runs/toy").iterdir() if p.name[0] != ".")) == toy_regression.FILES
    rows = rows_of("runs/toy")
    assert [row["step"] for row in rows] == [4, 8, 12, 16, 20, 24]
    assert [row["examples"] for row in rows] == [52, 104, 156, 208, 260, 312]
    assert [row["step"] for row in rows if "eval/close" in row] == [8, 16, 24]
    assert rows[-1]["eval/loss"] < rows[1]["eval/loss"]
    assert load("runs/toy/config.yaml").values == validate(load("toy.yaml", ["train.seed=3"])).model_dump()


def test_evaluation_counts_each_row_once_whatever_the_batch(jdist_run):
    jdist_run("train.steps=8")
    wanted = {name: value for name, value in rows_of("runs/toy")[-1].items() if name.startswith("eval/")}
    params = params_in("runs/toy", "train.steps=8", step=8)
    data = toy_regression.make().eval_data(21).batch_at(0)
    errors = (data["x"] @ params["w"] + params["b"] - data["y"]) ** 2
    assert wanted["eval/loss"] == pytest.approx(errors.mean(), rel=1e-5)
    assert wanted["eval/close"] == pytest.approx((errors < 1).mean(), rel=1e-6)


@pytest.mark.parametrize("sizes", [(5,), (4, 1), (2, 2, 1)])
def test_batches_weigh_as_many_rows_as_they_have(sizes):
    rows, batches = iter(np.arange(5.0)), []
    for size in sizes:
        x = np.array([next(rows) for _ in range(size)] + [99.0] * (5 - size))
        batches.append({"x": x, "mask": np.arange(5) < size})
    means = measure(lambda state, b: {"a": b["x"][b["mask"]].mean(), "loss": np.float32(1)}, None, batches)
    assert list(means.items()) == [("loss", 1.0), ("a", pytest.approx(2.0))]


def test_an_interrupted_run_goes_on_and_ends_as_if_nothing_had_been(jdist_run, usual):
    assert jdist_run("train.steps=8")[0] == 0
    code, out, _ = jdist_run()
    assert code == 0
    assert "going on from step 8 of 24" in out
    assert "step  4/24" not in out
    assert_same(params_in("runs/toy", step=24), usual[0])
    assert rows_of("runs/toy") == usual[1]


def test_a_finished_run_says_so_and_changes_nothing(jdist_run):
    first = jdist_run()[1]
    before = Path("runs/toy/metrics.jsonl").read_bytes()
    code, out, _ = jdist_run()
    assert code == 0
    assert "going on from step 24 of 24" in out
    assert "finished: 24 steps" in out
    assert out.partition("evaluation\n")[2] == first.partition("evaluation\n")[2]
    assert Path("runs/toy/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.steps_per_call=4",),
        ("strategy.transform=jit",),
        ("train.verify=strict",),
        ("strategy.name=one_device",),
        ("train.steps=null", "train.epochs=6"),
        ("train.check_replicas=null", "checkpoint.best=null", "checkpoint.every=null", "eval.every=null"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_how_a_run_is_carried_out_does_not_change_its_course(jdist_run, usual, overrides):
    rows = usual[1]
    code, _, err = jdist_run(*overrides)
    assert (code, err) == (0, "")
    others = rows_of("runs/toy")
    assert [row["step"] for row in others] == [row["step"] for row in rows]
    np.testing.assert_allclose([r["loss"] for r in others], [r["loss"] for r in rows], rtol=1e-4)
    assert others[-1]["eval/loss"] == pytest.approx(rows[-1]["eval/loss"], rel=1e-4)


def test_another_strategy_may_go_on_where_one_stopped(jdist_run):
    jdist_run("train.steps=8")
    code, out, err = jdist_run("strategy.name=one_device")
    assert (code, err) == (0, "")
    assert "going on from step 8" in out
    assert "global batch 16 = 1 replica x 16" in out


def test_a_state_in_parts_goes_on_on_other_numbers_of_devices(jdist_run, usual):
    """On 8, 4 and 8 again, then whole: the rows seen and the losses are those of a run that nothing interrupted."""
    parts = "name: sharded, whole_below: 0, most_whole: 1"
    four = ", ".join(f"cpu:{i}" for i in range(4))
    done = 0
    for steps, strategy, printed in [
        (8, parts, "8 replicas with the state in 8 parts"),
        (12, f"{parts}, devices: [{four}]", "4 replicas with the state in 4 parts"),
        (16, parts, "8 replicas with the state in 8 parts"),
        (24, "name: mirrored", "mirrored: 8 replicas on"),
    ]:
        code, out, err = jdist_run(f"train.steps={steps}", f"strategy={{{strategy}}}")
        assert (code, err) == (0, "")
        assert printed in out
        assert f"going on from step {done} of {steps}" in out or not done
        done = steps
    params, rows = usual
    got = rows_of("runs/toy")
    assert [(row["step"], row["examples"]) for row in got] == [(row["step"], row["examples"]) for row in rows]
    for name in ("loss", "eval/loss"):
        pairs = [(a[name], b[name]) for a, b in zip(got, rows, strict=True) if name in b]
        np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params_in("runs/toy", step=24), params)


def test_a_different_config_in_the_folder_is_refused_key_by_key(jdist_run):
    jdist_run("train.steps=8")
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    code, _, err = jdist_run("train.seed=1", "train.optimizer.b1=0.8", "train.clip_norm=1", "log.every=2")
    assert code == 2
    assert err.splitlines() == [
        "jdist: runs/toy: holds a run with a different config:",
        "  train.seed: 0 there, 1 now (override train.seed=1)",
        "  train.optimizer.b1: not set there, 0.8 now (override train.optimizer.b1=0.8)",
        "  train.clip_norm: null there, 1.0 now (override train.clip_norm=1)",
        "Go on with the old config, choose another name, or start again with --fresh, which keeps the old folder.",
    ]
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()} == before
    code, out, _ = jdist_run("train.seed=1", "--fresh")
    assert code == 0
    assert "moved the earlier run from runs/toy to runs/toy.1" in out
    assert {p: Path("runs/toy.1", p.relative_to("runs/toy")).read_bytes() for p in before} == before


def test_an_override_may_follow_a_flag(jdist_run):
    code, out, err = jdist_run("name=other", "--fresh", "train.steps=8")
    assert (code, Path("runs/other").is_dir()) == (0, True), (out, err)


def test_a_restart_by_the_launcher_goes_on_from_what_the_first_attempt_began_afresh(jdist_run, monkeypatch):
    jdist_run("train.steps=8", "--fresh")
    monkeypatch.setenv("JDIST_LAUNCH_ATTEMPT", "1")
    assert "going on from step 8 of 24" in jdist_run("--fresh")[1]


def test_a_schedule_that_follows_the_length_of_the_run_keeps_it_from_growing(jdist_run):
    schedule = "train.optimizer.learning_rate={schedule: cosine_decay_schedule, init_value: 0.1}"
    assert jdist_run("train.steps=8", schedule)[0] == 0
    code, _, err = jdist_run("train.steps=16", schedule)
    assert code == 2
    assert "train.optimizer.learning_rate.decay_steps: 8 there, 16 now" in err
    assert "A schedule follows the length of the run" in err
    code, _, err = jdist_run("train.steps=16", schedule.replace("0.1}", "0.1, decay_steps: 8}"))
    assert (code, err) == (0, "")


def test_a_different_config_is_refused_also_before_the_first_checkpoint(jdist_run):
    jdist_run("train.steps=8")
    shutil.rmtree("runs/toy/checkpoints")  # as after a kill between the first row and the first checkpoint
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    code, _, err = jdist_run("train.seed=1")
    assert code == 2
    assert "train.seed: 0 there, 1 now (override train.seed=1)" in err
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()} == before


def test_fewer_steps_than_are_done_already_is_refused(jdist_run):
    jdist_run("train.steps=8")
    code, _, err = jdist_run("train.steps=4")
    assert code == 2
    assert "has come to step 8 already, past the 4 steps asked for (override train.steps=4)" in err


def test_a_step_that_is_not_finite_is_left_out_and_the_good_state_is_saved(jdist_run):
    bad = "task.options.poison_row=40"
    code, _, err = jdist_run(bad)
    assert code == 1
    step = int(re.search(r"The state before it, at step (\d+), is saved", err).group(1))
    assert f"jdist: step {step + 1} was not applied: " in err
    assert "train.non_finite=skip" in err
    assert "Traceback" not in err
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params_in("runs/toy", bad, step=step)))
    assert jdist_run(bad)[0] == 1  # the same command meets the same step
    code, out, _ = jdist_run(bad, "train.non_finite=skip")
    assert code == 0
    assert f"going on from step {step} of 24" in out
    assert re.search(rf"\d of {24 - step} steps were left out", out)


@pytest.mark.parametrize("rows", [52, 104])
def test_a_batch_of_all_rows_and_more_is_filled_up(jdist_run, rows):
    code, out, err = jdist_run(f"train.global_batch={rows}", "train.steps=4")
    assert (code, err) == (0, "")
    assert "4 steps = 208 examples = 4 epochs of 52 (1 step each)" in out


def test_an_evaluation_batch_larger_than_the_data_is_all_of_it(jdist_run):
    jdist_run("train.steps=8", "name=parts")
    code, _, err = jdist_run("train.steps=8", "name=whole", f"eval.global_batch={10**15}")
    assert (code, err) == (0, "")
    parts, whole = rows_of("runs/parts")[-1], rows_of("runs/whole")[-1]
    assert whole["eval/loss"] == pytest.approx(parts["eval/loss"], rel=1e-5)
    assert whole["eval/close"] == pytest.approx(parts["eval/close"], rel=1e-6)


def test_a_damaged_checkpoint_is_passed_over_with_a_word(jdist_run, usual):
    jdist_run("train.steps=16")
    newest_save = max(Path("runs/toy/checkpoints").iterdir())
    (newest_save / "manifest.json").write_text("{")
    code, out, _ = jdist_run()
    assert code == 0
    assert f"warning: {newest_save.absolute()}" in out
    assert "going on from step 8 of 24" in out
    assert_same(params_in("runs/toy", step=24), usual[0])
    assert rows_of("runs/toy") == usual[1]
