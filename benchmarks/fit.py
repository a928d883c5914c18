"""What `jdist.fit` costs over the same hand-written loop with the decorated step.

    python benchmarks/fit.py [--devices 1 2] [--rounds 25]

Both train the MLP 784-512-512-10 at global batch 1,024 from arrays in memory, as many rows as MNIST has, two epochs a
round, from a state that is there already; the step is compiled before. `fit` has its default callbacks: a row of metrics
every 20 steps and at the end of an epoch into a file, and lines of progress (into a file, too). The hand-written loop reads no
metric at all. "hand-written again" is the noise. Target: a median ratio of at most 1.02.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

from pairs import alternate, compare, on_cpu_devices

STEPS = 120


def measure(rounds: int) -> None:
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jdist

    strategy = jdist.mirrored()
    model = nn.Sequential([nn.Dense(512), nn.relu, nn.Dense(512), nn.relu, nn.Dense(10)])

    def create_state(key):
        params = model.init(key, jnp.zeros((1, 784)))["params"]
        return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.01, momentum=0.9))

    @jdist.distribute(strategy)
    def train_step(state, batch):
        def loss_fn(params):
            losses = optax.softmax_cross_entropy_with_integer_labels(
                state.apply_fn({"params": params}, batch["image"]), batch["label"]
            )
            return jdist.mean(losses, batch["mask"])

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    rng = np.random.default_rng(0)
    rows = 60 * 1024
    arrays = {"image": rng.normal(size=(rows, 784)).astype(np.float32), "label": rng.integers(0, 10, rows)}
    source = jdist.data.from_arrays(arrays, global_batch=1024, shuffle_seed=0, epochs=None)
    hand = ("hand-written", "hand-written again")
    states = {name: strategy.init(create_state, jax.random.key(0)) for name in ("fit", *hand)}

    def by_hand(name):
        def run():
            state = states[name]
            for i, batch in enumerate(strategy.distribute_dataset(source), 1):
                state, _ = train_step(state, batch)
                if i == STEPS:
                    break
            train_step.wait()
            states[name] = state

        return run

    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "out"), "w") as out:

        def fit():
            with contextlib.redirect_stdout(out):
                states["fit"], _ = jdist.fit(train_step, states["fit"], source, steps=STEPS, log_to=folder)

        times = alternate({"fit": fit, **{name: by_hand(name) for name in hand}}, rounds)
    for name in ("fit", "hand-written again"):
        c = compare(times[name], times["hand-written"])
        print(
            f"{len(jax.devices())} devices: {name} / hand-written: {c.ratio:.3f} [{c.ratio_low:.3f}, {c.ratio_high:.3f}], "
            f"{c.seconds / STEPS * 1e3:.2f} ms a step, {c.difference / STEPS * 1e6:+.0f} us a step",
            flush=True,
        )


if __name__ == "__main__":
    on_cpu_devices(measure, __doc__, __file__, devices=[1, 2], rounds=25)
