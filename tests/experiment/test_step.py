"""The train step of a config: its options reach it."""

import json
from pathlib import Path

import numpy as np

from tests.experiment.test_run import params_in, rows_of


def test_a_run_in_16_bits_learns_what_one_in_float32_does(jdist_run):
    assert jdist_run("name=full")[0] == 0
    code, out, err = jdist_run("name=half", "train.precision=fp16")
    assert (code, err) == (0, "")
    assert "of 24 steps were left out" in out
    half, full = rows_of("runs/half"), rows_of("runs/full")
    assert full[-1]["eval/loss"] < full[1]["eval/loss"]
    # A few of the 24 steps are left out, until the first scale has come down to these losses: 3 % more at the end.
    np.testing.assert_allclose(half[-1]["eval/loss"], full[-1]["eval/loss"], rtol=0.06)
    assert {x.dtype for x in params_in("runs/half").values()} == {np.dtype("float32")}
    manifests = [json.loads(path.read_text()) for path in Path("runs/half/checkpoints").rglob("*.json")]
    assert any("loss scale" in json.dumps(x) for x in manifests)


def test_a_precision_that_there_is_not(jdist_run):
    code, _, err = jdist_run("train.precision=fp61")
    assert code != 0
    assert "'bf16' or 'fp16'" in err
    assert "Did you mean fp16?" in err
