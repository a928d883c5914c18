"""What a loop round convolutions costs on CPU: the digits CNN plainly, accumulated, and several steps a call.

    python benchmarks/loops_on_cpu.py

XLA's CPU backend has no fast convolution inside a while loop; jdist unrolls such loops there. The last line is the loop
as `lax.scan` makes it.
"""

import os
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import optax

import jdist
from jdist.tasks import digits


def main() -> None:
    task, strategy = digits.make(), jdist.one_device()
    source = task.train_data(128, 0, None)

    def scanned(state, batch):
        return jax.lax.scan(task.train_step, state, jax.tree.map(lambda x: x[None], batch))

    cases = {
        "plain": (task.train_step, {}),
        "accumulate=2": (task.train_step, {"accumulate": 2}),
        "steps_per_call=4": (task.train_step, {"steps_per_call": 4}),
        "lax.scan in the step": (scanned, {}),
    }
    for name, (step, options) in cases.items():
        steps = options.get("steps_per_call", 1)
        batches = iter(strategy.distribute_dataset(source, steps_per_call=steps))
        state = strategy.init(lambda key: task.create_state(key, optax.adam(1e-3)), jax.random.key(0))
        train_step = jdist.distribute(step, strategy, **options)
        state, _ = train_step(state, next(batches))
        train_step.wait()
        start = time.perf_counter()
        for _ in range(8):
            state, _ = train_step(state, next(batches))
        train_step.wait()
        print(f"{name:22s} {(time.perf_counter() - start) / 8 / steps * 1e3:7.1f} ms a step", flush=True)


if __name__ == "__main__":
    main()
