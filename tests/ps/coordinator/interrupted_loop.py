"""A program whose scheduling loop is interrupted again and again; prints what it did and what the servers have."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import optax

import jdist

INTERRUPTS, PATIENCE_S = 10, 0.5


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore it
    strategy = jdist.parameter_server(local_workers=2, local_ps=1)

    @jdist.distribute(strategy)
    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = jdist.value_and_grad(lambda params: jdist.mean(params["w"] * batch["x"]))(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    state = strategy.init(lambda: jdist.TrainState.create(params={"w": np.float32(0)}, tx=optax.sgd(0.1)))
    batch = {"x": np.ones(4, np.float32)}
    state, _ = train_step(state, batch)
    train_step.wait()
    returned, caught, rng = 1, 0, random.Random(0)
    for _ in range(INTERRUPTS):
        timer = threading.Timer(rng.uniform(0.005, 0.05), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            # An interrupt within JAX's garbage collection is lost: Python ignores it there.
            end = time.monotonic() + PATIENCE_S
            while time.monotonic() < end:
                train_step(state, batch)
                returned += 1
        except KeyboardInterrupt:
            caught += 1
        timer.join()
    train_step.wait()
    print(returned, caught, int(strategy.fetch(state).step))
    strategy.coordinator.close()


if __name__ == "__main__":
    main()
