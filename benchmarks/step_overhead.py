"""What a distributed step costs over the same hand-written step with jax.jit(jax.shard_map(...)).

    python benchmarks/step_overhead.py [--devices 1 2 8] [--rounds 40]

Each number of devices runs in a process of its own. jdist, the hand-written step, and the hand-written step once more
(the noise of A against A) alternate in one process. The hand-written step does not look at its gradients; jdist's default
does, and keeps the state where one is NaN or infinite; "jdist, apply" is without that. Targets: median ratio at most
1.02 on the MLP 784-512-512-10 at global batch 1,024; at most 20 microseconds a call over the hand-written empty step.
"""

from __future__ import annotations

from pairs import alternate, compare, on_cpu_devices


def measure(rounds: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import PartitionSpec as P

    import jdist

    strategy = jdist.mirrored()
    tx = optax.sgd(0.01, momentum=0.9)
    sizes = (784, 512, 512, 10)

    def create(key):
        keys = jax.random.split(key, 3)
        w = [jax.random.normal(k, (m, n)) / np.sqrt(m) for k, m, n in zip(keys, sizes, sizes[1:], strict=False)]
        params = {"w": w, "b": [jnp.zeros(n) for n in sizes[1:]]}
        return {"params": params, "opt": tx.init(params)}

    def loss_of(params, batch):
        x = batch["x"]
        for i, (w, b) in enumerate(zip(params["w"], params["b"], strict=True)):
            x = x @ w + b
            x = jax.nn.relu(x) if i < 2 else x
        return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()

    def update(state, grads):
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    def mlp(state, batch):
        loss, grads = jdist.value_and_grad(loss_of)(state["params"], batch)
        return update(state, grads), {"loss": loss}

    def mlp_by_hand(state, batch):
        loss, grads = jax.lax.pmean(jax.value_and_grad(loss_of)(state["params"], batch), "replica")
        return update(state, grads), {"loss": loss}

    def empty(state, batch):
        return state, {"loss": jnp.float32(0)}

    def empty_by_hand(state, batch):  # a metric that is averaged, as jdist's is
        return state, jax.lax.pmean({"loss": jnp.float32(0)}, "replica")

    def by_hand(step):
        spec = P("replica")
        mapped = jax.shard_map(step, mesh=strategy.mesh, in_specs=(P(), spec), out_specs=(P(), P()), check_vma=False)
        return jax.jit(mapped, donate_argnums=0)

    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(1024, 784)).astype(np.float32), "y": rng.integers(0, 10, 1024)}
    batch = jax.device_put(batch, strategy.batch_sharding)
    cases = {
        "mlp": (mlp, mlp_by_hand, lambda: strategy.init(create, jax.random.key(0)), 4),
        "empty": (empty, empty_by_hand, lambda: strategy.init(lambda: {"w": jnp.ones(4)}), 200),
    }
    for name, (step, hand_step, make_state, calls) in cases.items():

        def runner(step, state, calls=calls):
            box = [state]

            def run():
                state = box[0]
                for i in range(calls):
                    state, metrics = step(state, batch)
                    if i % 8 == 7:  # the bound that every program on CPU devices needs
                        jax.block_until_ready(metrics)
                jax.block_until_ready(metrics)
                box[0] = state

            return run

        # The replica check runs at the first call, in the warm-up, and every 1,000 steps after it as by default.
        unguarded = jdist.distribute(step, strategy, non_finite="apply")
        times = alternate(
            {
                "jdist": runner(jdist.distribute(step, strategy), make_state()),
                "jdist, apply": runner(unguarded, make_state()),
                "hand-written": runner(by_hand(hand_step), make_state()),
                "hand-written again": runner(by_hand(hand_step), make_state()),
            },
            rounds,
        )
        for side in ("jdist", "jdist, apply", "hand-written again"):
            c = compare(times[side], times["hand-written"])
            print(
                f"{strategy.devices[0].platform} x {strategy.num_replicas}  {name:5s}  {side:18s} / hand-written: "
                f"ratio {c.ratio:.3f} [{c.ratio_low:.3f}, {c.ratio_high:.3f}], "
                f"{c.difference / calls * 1e6:+.1f} us a call of {c.seconds / calls * 1e6:,.0f} us",
                flush=True,
            )


if __name__ == "__main__":
    on_cpu_devices(measure, __doc__, __file__, devices=[1, 2, 8], rounds=40)
