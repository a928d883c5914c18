"""Keras 3 models: the page runs as it stands, and a model in the place of a step is answered with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jdist
from jdist.errors import StepError
from tests.docs import walk

PAGE = Path(__file__).parents[2] / "docs" / "keras.md"


def test_its_program_trains_a_keras_model(tmp_path):
    assert walk.walk(tmp_path, guide=PAGE) == []


PROGRAM = """
import keras, numpy as np, jdist
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
for call in (jdist.fit, jdist.evaluate, jdist.predict):
    for arguments in ((model, None, {"x": np.ones(4)}), (lambda state, batch: batch, model, {"x": np.ones(4)})):
        try:
            call(*arguments)
        except jdist.errors.StepError as exc:
            print(exc)
"""


def test_a_model_is_answered_with_the_page():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answers = run.stdout.splitlines()
    assert [line.partition(". ")[0] for line in answers] == [
        f"jdist.{name} got a Keras model (Sequential)" for name in ("fit", "evaluate", "predict") for _ in range(2)
    ]
    assert all(line.endswith("docs/keras.md has one to copy.") for line in answers)


def test_what_is_only_called_a_model_is_none_of_kerass():
    class Model:
        pass

    with pytest.raises(StepError, match="needs a step, it got a Model"):
        jdist.fit(Model(), 0.0, {})
