"""What a step needs beyond its state, as the compiler counts it: jdist's default, without its guard, and hand-written.

    python benchmarks/step_memory.py [--devices 1 2]

Twenty layers of 12.5 MB, under Adam and under AdamW with clipped gradients. The guard looks at all gradients before it
changes a parameter; hand-written Adam on one device may use up each gradient as it comes. Nothing is run.
"""

from __future__ import annotations

from pairs import on_cpu_devices


def measure(rounds: int) -> None:
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import PartitionSpec as P

    import jdist

    strategy, width, layers = jdist.mirrored(), 1768, 20
    n = strategy.num_replicas

    def loss_of(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    for name, tx in (
        ("adam", optax.adam(1e-3)),
        ("clipped adamw", optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))),
    ):

        def create(tx=tx):
            params = [jnp.zeros((width, width)) for _ in range(layers)]
            return {"params": params, "opt": tx.init(params)}

        def update(state, grads, tx=tx):
            updates, opt = tx.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

        def step(state, batch):
            loss, grads = jdist.value_and_grad(loss_of)(state["params"], batch)
            return update(state, grads), {"loss": loss}

        def by_hand(state, batch):
            loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
            if n > 1:
                loss, grads = jax.lax.pmean((loss, grads), "replica")
            return update(state, grads), {"loss": loss}

        def shapes(tree, sharding):
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

        state = shapes(jax.eval_shape(create), strategy.replicated_sharding)
        batch = shapes({"x": jax.ShapeDtypeStruct((32 * n, width), jnp.float32)}, strategy.batch_sharding)
        specs = {"in_specs": (P(), P("replica")), "out_specs": (P(), P()), "check_vma": False}
        hand_written = jax.jit(jax.shard_map(by_hand, mesh=strategy.mesh, **specs), donate_argnums=0)
        sides = {
            "jdist": jdist.distribute(step, strategy),
            "jdist, apply": jdist.distribute(step, strategy, non_finite="apply"),
            "hand-written": hand_written,
        }
        memory = {side: program.lower(state, batch).compile().memory_analysis() for side, program in sides.items()}
        needed = {side: each.argument_size_in_bytes + each.temp_size_in_bytes for side, each in memory.items()}
        for side, each in memory.items():
            print(
                f"{n} devices, {name}, {side}: {each.argument_size_in_bytes / 1e6:,.0f} MB of state and batch and "
                f"{each.temp_size_in_bytes / 1e6:,.0f} MB of temporaries on a device, "
                f"{needed[side] / needed['hand-written']:.2f} of hand-written",
                flush=True,
            )


if __name__ == "__main__":
    on_cpu_devices(measure, __doc__, __file__, devices=[1, 2], rounds=1)
