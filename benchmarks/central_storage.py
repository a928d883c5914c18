"""A step of central_storage against the same step of mirrored, on virtual CPU devices.

    python benchmarks/central_storage.py [--devices 2 8] [--rounds 15]

Each number of devices runs in a process of its own; central_storage, mirrored, and mirrored once more (the noise of A
against A) alternate in one process. On CPU both memories are the same, so this shows what gathering, summing by parts and
the second copy of the state's parts cost, and not what a bus between host and device does. MLP 784-512-512-10 at global
batch 1,024, as in step_overhead.py, under SGD with momentum and under AdamW.
"""

from __future__ import annotations

from pairs import alternate, compare, on_cpu_devices


def measure(rounds: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jdist

    sizes = (784, 512, 512, 10)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(1024, 784)).astype(np.float32), "y": rng.integers(0, 10, 1024)}

    def step(state, batch):
        def loss_of(params):
            x = batch["x"]
            for i, (w, b) in enumerate(zip(params["w"], params["b"], strict=True)):
                x = x @ w + b
                x = jax.nn.relu(x) if i < 2 else x
            return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()

        loss, grads = jdist.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def runner(strategy, tx):
        def create(key):
            keys = jax.random.split(key, 3)
            w = [jax.random.normal(k, (m, n)) / np.sqrt(m) for k, m, n in zip(keys, sizes, sizes[1:], strict=False)]
            return jdist.TrainState.create(params={"w": w, "b": [jnp.zeros(n) for n in sizes[1:]]}, tx=tx)

        train_step = jdist.distribute(step, strategy)
        placed = jax.device_put(batch, strategy.batch_sharding)
        box = [strategy.init(create, jax.random.key(0))]

        def run():
            state = box[0]
            for _ in range(4):
                state, _ = train_step(state, placed)
            train_step.wait()
            box[0] = state

        return run

    for name, tx in (("sgd", optax.sgd(0.01, momentum=0.9)), ("adamw", optax.adamw(1e-3))):
        programs = {
            "central_storage": runner(jdist.central_storage(), tx),
            "mirrored": runner(jdist.mirrored(), tx),
            "mirrored again": runner(jdist.mirrored(), tx),
        }
        times = alternate(programs, rounds)
        for side in ("central_storage", "mirrored again"):
            c = compare(times[side], times["mirrored"])
            print(
                f"cpu x {jax.device_count()}  {name:5s}  {side:15s} / mirrored: ratio {c.ratio:.3f} "
                f"[{c.ratio_low:.3f}, {c.ratio_high:.3f}] of {c.seconds / 4 * 1e3:,.1f} ms a step",
                flush=True,
            )


if __name__ == "__main__":
    on_cpu_devices(measure, __doc__, __file__, devices=[2, 8], rounds=15)
