"""Runs that begin with weights of another run, or of safetensors."""

import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from test_run import params_in

import jdist
from jdist.experiment import run


@pytest.fixture
def first(jdist_run):
    """The parameters at the end of a short run; its folder is runs/toy."""
    assert jdist_run("train.steps=4")[0] == 0
    return params_in("runs/toy", step=4)


FROM = "init_from.path=runs/toy"


def test_a_run_begins_with_the_parameters_of_another(first, jdist_run):
    code, out, err = jdist_run("name=next", "train.steps=1", FROM, "train.optimizer.learning_rate=1e-30")
    assert (code, err) == (0, "")
    assert "leaves from runs/toy; new are step, " in out
    jax.tree.map(np.testing.assert_array_equal, params_in("runs/next", step=1), first)
    # A run that goes on has its own weights, also where the others are gone.
    Path("runs/toy").rename("runs/gone")
    Path("runs/toy/checkpoints/step_00000001_save_00001").mkdir(parents=True)  # which cannot be read
    code, out, _ = jdist_run("name=next", "train.steps=2", FROM, "train.optimizer.learning_rate=1e-30")
    assert code == 0
    assert "going on from step 1" in out
    assert "leaves from" not in out


def test_a_dry_run_says_what_fits_and_refuses_what_does_not(first, jdist_run):
    code, out, _ = jdist_run("--dry-run", "name=next", FROM)
    assert code == 0
    assert f"begins with {len(jax.tree.leaves(first))} of " in out
    assert "dry run: all is well" in out
    real, dry = (jdist_run("name=next", FROM, "task.options.features=7", *how) for how in ([], ["--dry-run"]))
    assert dry[0] == real[0] != 0
    assert dry[2] == real[2]
    assert "does not fit the state" in dry[2]


@pytest.mark.parametrize("strategy", ["one_device", "sharded", "parameter_server"])
def test_what_is_new_is_counted(strategy, first, jdist_run):
    code, out, _ = jdist_run("name=next", "train.steps=1", FROM, f"strategy={{name: {strategy}}}")
    assert code == 0
    num_params = len(jax.tree.leaves(first))
    assert f"begins with {num_params} of " in out


def test_a_run_begins_with_safetensors(first, jdist_run):
    jdist.weights.save({"params": first}, "w")
    code, out, err = jdist_run("name=next", "train.steps=1", "init_from.path=w", "train.optimizer.learning_rate=1e-30")
    assert (code, err) == (0, "")
    assert "leaves from w; new are step, " in out
    jax.tree.map(np.testing.assert_array_equal, params_in("runs/next", step=1), first)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["init_from.path=runs/none"], "init_from.path: .*/runs/none has no checkpoint of a run and no safetensors"),
        ([FROM, "init_from.rules=jdist.weights:gpt2"], "init_from.rules: is for safetensors, and runs/toy holds"),
        (
            [FROM, "init_from.only=params"],
            r"init_from: `init_from.only`: 'params' matches no.*For all below it say 'params/\.\*'",
        ),
        ([FROM, "init_from.onl=x"], r"init_from\.onl: no such key.*only"),
        (
            [FROM, "init_from.rename={params/w: params/v}"],
            "init_from: `init_from.rename`: 'params/w': 'params/v': the state has no",
        ),
        (
            [FROM, "task.options.features=4"],
            r"init_from: .*/runs/toy/checkpoints/step_\d+_save_\d+: does not fit the state, which is unchanged. Take a "
            r"part that fits, under the state's names \(`init_from.only`, `init_from.rename`, `init_from.skip_mismatch`\):",
        ),
        ([FROM, "task.options.features=4", "init_from.only=null"], "init_from: .*Take a part that fits, under"),
        (["init_from.path=w", "init_from.rename={a: b}"], "init_from.rename: is for checkpoints"),
        (["init_from.path=w", "init_from.rules=jdist.weights:gpt3"], "has no function 'gpt3'.*gpt2"),
    ],
)
def test_what_is_refused(overrides, says, jdist_run):
    if not Path("runs/toy").exists():
        assert jdist_run("train.steps=1")[0] == 0
        jdist.weights.save({"params": params_in("runs/toy")}, "w")
    code, _, err = jdist_run("name=next", "train.steps=1", *overrides)
    assert code != 0
    assert re.search(says, err, re.DOTALL), err


def test_a_dry_run_looks_for_the_weights(jdist_run):
    code, _, err = jdist_run("--dry-run", "init_from.path=runs/none")
    assert code == 2
    assert "has no checkpoint of a run and no safetensors" in err


def test_checkpoints_that_vanish_before_they_are_read(first, jdist_run, monkeypatch):
    monkeypatch.setattr(run, "check_init_from", lambda *_: shutil.rmtree("runs/toy/checkpoints"))
    code, _, err = jdist_run("name=next", "train.steps=1", FROM)
    assert code == 1
    assert "init_from: runs/toy: had checkpoints when this run began, and has none now." in err
