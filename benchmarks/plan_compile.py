"""How long the TPU and GPU compilers take for steps of the tests, in processor seconds, which a busy machine does not stretch.

    python benchmarks/plan_compile.py [digits|text|text-100m ...]

It makes no claim and compares nothing: it says what `jdist plan` costs before a TPU or a GPU is rented.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import optax

import jdist
from examples.tasks import text
from jdist.plan.hlo import parse
from jdist.tasks import digits


def digits_state_and_batch(rows: int):
    task = digits.make()
    leaves = {"image": ((8, 8, 1), "float32"), "label": ((), "int32"), "mask": ((), "bool")}
    return task, {k: jax.ShapeDtypeStruct((rows, *shape), dtype) for k, (shape, dtype) in leaves.items()}


def text_state_and_batch(rows: int):
    task = text.make(files="jdist/**/*.py")
    leaves = {"tokens": ((129,), "uint16"), "mask": ((), "bool")}
    return task, {k: jax.ShapeDtypeStruct((rows, *shape), dtype) for k, (shape, dtype) in leaves.items()}


def large_text_state_and_batch(rows: int):
    """A transformer of 101 M parameters on rows of 512 bytes, in bfloat16."""
    task = text.make(files="jdist/**/*.py", layers=8, width=1024, heads=16, length=512, dtype="bfloat16")
    leaves = {"tokens": ((513,), "uint16"), "mask": ((), "bool")}
    return task, {k: jax.ShapeDtypeStruct((rows, *shape), dtype) for k, (shape, dtype) in leaves.items()}


MODELS = {"digits": digits_state_and_batch, "text": text_state_and_batch, "text-100m": large_text_state_and_batch}
TOPOLOGIES = ("v4:2x2x1", "v5e:2x4", "v6e:16x16", "v5p:16x16x16", "h100:8", "h100:64x8", "a100-80gb:8", "b200:8")


def main() -> None:
    print(f"{'task':10}{'topology':14}{'devices':>8}{'lower':>8}{'compile':>9}{'read':>7}   processor seconds")
    for name in sys.argv[1:] or ("digits", "text"):
        make = MODELS[name]
        for topology in TOPOLOGIES:
            strategy = jdist.mirrored(topology=topology)
            task, batch = make(4 * strategy.num_replicas)
            key = jax.random.key(0)
            state = jax.eval_shape(lambda key, task=task: task.create_state(key, optax.adamw(1e-3)), key)
            times = [time.process_time()]
            lowered = jdist.distribute(task.train_step, strategy).lower(state, batch)
            times.append(time.process_time())
            compiled = lowered.compile()
            times.append(time.process_time())
            parse(compiled.as_text() or "")
            times.append(time.process_time())
            spent = [after - before for before, after in itertools.pairwise(times)]
            print(
                f"{name:10}{topology:14}{strategy.num_replicas:8,}" + "{:8.1f}{:9.1f}{:7.1f}".format(*spent), flush=True
            )


if __name__ == "__main__":
    main()
