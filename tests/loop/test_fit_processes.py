"""`jdist.fit` in a job of several processes, which is stopped and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jdist
from tests.loop.loop_programs import DATA, HELD_OUT, create_state, eval_step, train_step


@pytest.mark.xdist_group("processes")
def test_two_processes_do_what_one_does_and_go_on_where_they_were(tmp_path):
    def run(epochs: int) -> list[dict[str, Any]]:
        program = Path(__file__).parent / "fit_in_processes.py"
        command = [
            "launch",
            "--processes",
            "2",
            "--devices-per-process",
            "2",
            "--log-dir",
            tmp_path / f"launch_{epochs}",
        ]
        ended = subprocess.run(
            [sys.executable, "-m", "jdist", *command, "--", program, tmp_path, str(epochs)],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stderr.count("verify could not compare") == 2  # one of each of the program's two fits
        return [json.loads(line.partition("found ")[2]) for line in ended.stdout.splitlines() if "found " in line]

    run(1)
    first, second = run(3)
    assert first == second
    average, options = (
        jdist.callbacks.ema(0.8),
        {"global_batch": 16, "shuffle_seed": 0, "progress": False, "log_to": None},
    )
    told = {"eval_data": HELD_OUT, "eval_step": eval_step, "callbacks": [average]}
    state, history = jdist.fit(
        train_step, create_state(), DATA, strategy=jdist.one_device(), epochs=3, **told, **options
    )
    np.testing.assert_allclose(first["w"], state.params["w"], atol=1e-6)
    np.testing.assert_allclose(first["average"], average.average()["w"], atol=1e-6)
    np.testing.assert_array_equal(np.float32(first["y"]), DATA["y"])
    for name in ("epochs", "evals", "steps_per_call"):
        losses = [row["loss"] for row in (history.evals if name == "evals" else history.epochs)]
        np.testing.assert_allclose([row["loss"] for row in first[name]], losses, rtol=1e-5)
    right = np.mean((DATA["x"][:, 0] > 0) == (DATA["y"] > 0))
    assert [row["right"] for row in first["epochs"]] == pytest.approx([right] * 3)
    assert len(list((tmp_path / "log").iterdir())) == 2  # one a run, of the chief
