"""`jdist.fit` in every process of a job: `fit_in_processes.py FOLDER EPOCHS`; each prints what it has in the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import jdist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.loop import loop_programs


def main(folder: Path, epochs: int) -> None:
    strategy = jdist.multi_worker()
    right = jdist.metrics.accuracy(threshold=0.0)

    def train_step(state: Any, batch: Any) -> Any:
        state, told = loop_programs.train_step(state, batch)
        return state, told | {"right": right.update(batch["x"][:, 0], batch["y"] > 0, batch["mask"])}

    def fit(step: Any, **options: Any) -> Any:
        state = strategy.init(loop_programs.create_state)
        options |= {"epochs": epochs, "global_batch": 16, "shuffle_seed": 0, "progress": False}
        return jdist.fit(step, state, loop_programs.DATA, strategy=strategy, **options)

    average = jdist.callbacks.ema(0.8)
    state, history = fit(
        train_step,
        eval_data=loop_programs.HELD_OUT,
        eval_step=loop_programs.eval_step,
        metrics={"right": right},
        callbacks=[jdist.callbacks.checkpoint(folder / "saved"), average],
        log_to=folder / "log",
    )
    several = fit(loop_programs.train_step, steps_per_call=3, log_to=None)
    rows = jdist.predict(loop_programs.predict_step, state, loop_programs.DATA, strategy=strategy, global_batch=16)
    found = {
        "epochs": history.epochs,
        "evals": history.evals,
        "steps_per_call": several[1].epochs,
        "w": np.asarray(strategy.fetch(state).params["w"]).tolist(),
        "average": np.asarray(average.average()["w"]).tolist(),
        "y": rows["y"].tolist(),
    }
    print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
