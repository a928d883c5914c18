"""The train step of a config: its options reach it."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_experiment_run import params_in, rows_of


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_in_16_bits_learns_what_one_in_float32_does(jdist_run, precision):
    assert jdist_run("name=full")[0] == 0
    code, _, err = jdist_run("name=half", f"train.precision={precision}")
    assert (code, err) == (0, "")
    half, full = rows_of("runs/half"), rows_of("runs/full")
    assert full[-1]["eval/loss"] < full[1]["eval/loss"]
    np.testing.assert_allclose(half[-1]["eval/loss"], full[-1]["eval/loss"], rtol=0.02)
    assert {x.dtype for x in params_in("runs/half").values()} == {np.dtype("float32")}
    manifests = [json.loads(path.read_text()) for path in Path("runs/half/checkpoints").rglob("*.json")]
    assert any("loss scale" in json.dumps(x) for x in manifests) == (precision == "fp16")


def test_a_precision_that_there_is_not(jdist_run):
    code, _, err = jdist_run("train.precision=fp61")
    assert code != 0
    assert "'bf16' or 'fp16'" in err
    assert "Did you mean fp16?" in err
