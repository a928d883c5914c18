"""Draws docs/drawings/pictures/*.svg: what `strategy.report`, `jdist plan --svg` and `jdist runs --timeline` make.

    python docs/drawings/pictures/draw.py

The plan takes a minute, as its step is compiled. `killed/` is the record of a run of two processes on 2 cores. First process
1 was killed, later process 0, by SIGKILL:

    jdist launch --processes 2 --devices-per-process 1 --max-restarts 2 -- configs/digits_multi_worker.yaml train.steps=4000 \
        eval.every=400 checkpoint.every=500 task.options.width=8 log.every=50
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jdist
from jdist.cli.main import main
from jdist.cli.runs.timeline import read_timeline
from jdist.cli.runs.timeline_picture import draw

HERE = Path(__file__).parent
PLAN = ("plan", "configs/text_7b.yaml", "--topology", "v5e:8x8", "--svg", "docs/drawings/pictures/plan.svg")


def create(key: jax.Array, width: int = 512) -> jdist.TrainState:
    """Makes the state of two layers."""
    params = {
        "up": {"kernel": jax.random.normal(key, (width, 4 * width)), "bias": jnp.zeros(4 * width)},
        "down": {"kernel": jnp.zeros((4 * width, width)), "bias": jnp.zeros(width)},
    }
    return jdist.TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def shapes(width: int = 512) -> jdist.TrainState:
    return jax.eval_shape(lambda key: create(key, width), jax.random.key(0))


def show_sharded() -> str:
    rules = [("up/kernel", (None, "model")), ("down/kernel", ("model", None))]
    strategy = jdist.sharded([f"cpu:{i}" for i in range(8)], mesh={"replica": 4, "model": 2}, rules=rules)
    return str(strategy.report(shapes()).svg)


def show_chips() -> str:
    strategy = jdist.tpu(topology="v5p:16x16x16", shard={"within": 512})
    return str(strategy.report(shapes(8192)).svg)


def timeline() -> str:
    return str(draw(read_timeline(HERE / "killed")))


PICTURES = (show_sharded, show_chips, timeline)

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for picture in PICTURES:
        (HERE / f"{picture.__name__}.svg").write_text(picture())
    os.chdir(HERE.parents[2])
    raise SystemExit(main(PLAN))
