"""What a distributed step costs over the same hand-written step with jax.jit(jax.shard_map(...)).

    python benchmarks/step_overhead.py [--devices 1 2 8] [--rounds 40] [--cases mlp empty transformer leaves nnx]

Each number of devices runs in a process of its own. jdist, the hand-written step, and the hand-written step once more
(the noise of A against A) alternate in one process. The hand-written step does not look at its gradients; jdist's default
does, and keeps the state where one is NaN or infinite; "jdist, apply" is without that. Targets: median ratio at most
1.015 on the MLP 784-512-512-10 at global batch 1,024, and 1.02 on a transformer of 70 leaves (clipped AdamW); at most 15
(one device) or 20 microseconds a call over the hand-written empty step. "leaves" is a step over 10, 100 and 1,000 arrays
of 16 numbers in a dict; "nnx" over as many Params of a module, against `nnx.jit`, on one device.
"""

from __future__ import annotations

from pairs import alternate, compare, on_cpu_devices

CASES = ("mlp", "empty", "transformer", "leaves", "nnx")


def measure(rounds: int, chosen: tuple[str, ...] = CASES) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
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

    width, heads, layers = 64, 4, 5
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def create_transformer(key):
        keys = iter(jax.random.split(key, 100))

        def matrix(m, n):
            return jax.random.normal(next(keys), (m, n)) / np.sqrt(m)

        def layer():
            arrays = {"up": matrix(width, 4 * width), "down": matrix(4 * width, width)}
            arrays |= {name: matrix(width, width) for name in "qkvo"}
            arrays |= {f"{name}_bias": jnp.zeros(width) for name in "qkvo"}
            return arrays | {name: jnp.ones(width) for name in ("scale1", "scale2", "shift1", "shift2")}

        params = {"layers": [layer() for _ in range(layers)]}
        return {"params": params, "opt": clipped.init(params)}

    def transformer_loss(params, batch):
        def normed(x, scale, shift):
            return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * scale + shift

        x = batch["x"].reshape(-1, 12, width)
        for p in params["layers"]:
            h = normed(x, p["scale1"], p["shift1"])
            q, k, v = ((h @ p[n] + p[f"{n}_bias"]).reshape(*h.shape[:2], heads, -1) for n in "qkv")
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4)
            x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape) @ p["o"] + p["o_bias"]
            x = x + jax.nn.relu(normed(x, p["scale2"], p["shift2"]) @ p["up"]) @ p["down"]
        return (x.mean((1, 2)) - batch["y"]).var()

    def transformer_update(state, grads):
        updates, opt = clipped.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    def transformer(state, batch):
        loss, grads = jdist.value_and_grad(transformer_loss)(state["params"], batch)
        return transformer_update(state, grads), {"loss": loss}

    def transformer_by_hand(state, batch):
        loss, grads = jax.lax.pmean(jax.value_and_grad(transformer_loss)(state["params"], batch), "replica")
        return transformer_update(state, grads), {"loss": loss}

    def shrunk(state, batch):
        return jax.tree.map(lambda x: x * 0.999, state), {"loss": jnp.float32(0)}

    class Params(nnx.Module):
        def __init__(self, n):
            self.params = nnx.List([nnx.Param(jnp.ones(16)) for _ in range(n)])

    def nnx_shrunk(model, batch):
        for param in model.params:
            param[...] = param[...] * 0.999
        return {"loss": jnp.float32(0)}

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
    words = {"x": rng.normal(size=(64, 12 * width)).astype(np.float32), "y": rng.normal(size=64).astype(np.float32)}
    words = jax.device_put(words, strategy.batch_sharding)
    few = jax.device_put({"x": np.ones((64, 1), np.float32)}, strategy.batch_sharding)
    cases = {
        "mlp": (mlp, mlp_by_hand, lambda: strategy.init(create, jax.random.key(0)), batch, 4),
        "empty": (empty, empty_by_hand, lambda: strategy.init(lambda: {"w": jnp.ones(4)}), batch, 200),
        "transformer": (
            transformer,
            transformer_by_hand,
            lambda: strategy.init(create_transformer, jax.random.key(0)),
            words,
            4,
        ),
    }
    for n in (10, 100, 1000):
        arrays = {f"w{i}": np.ones(16, np.float32) for i in range(n)}
        cases[f"leaves {n}"] = (shrunk, shrunk, lambda arrays=arrays: strategy.init(lambda: arrays), few, 2000 // n)
        if strategy.num_replicas == 1:
            cases[f"nnx {n}"] = (nnx_shrunk, nnx_shrunk, lambda n=n: Params(n), few, 2000 // n)
    cases = {name: case for name, case in cases.items() if name.split()[0] in chosen}
    for name, (step, hand_step, make_state, batch, calls) in cases.items():
        is_nnx = name.startswith("nnx")

        def runner(step, state, calls=calls, batch=batch, is_nnx=is_nnx):
            box = [state]

            def run():
                state = box[0]
                for i in range(calls):
                    if is_nnx:
                        metrics = step(state, batch)
                    else:
                        state, metrics = step(state, batch)
                    if i % 8 == 7:  # the bound that every program on CPU devices needs
                        jax.block_until_ready(metrics)
                jax.block_until_ready(metrics)
                box[0] = state

            return run

        # The replica check runs at the first call, in the warm-up, and every 1,000 steps after it as by default.

        def ours(step=step, is_nnx=is_nnx, **options):
            return (
                jdist.nnx.distribute(strategy, **options)(step)
                if is_nnx
                else jdist.distribute(step, strategy, **options)
            )

        hand = nnx.jit if is_nnx else by_hand
        times = alternate(
            {
                "jdist": runner(ours(), make_state()),
                "jdist, apply": runner(ours(non_finite="apply"), make_state()),
                "hand-written": runner(hand(hand_step), make_state()),
                "hand-written again": runner(hand(hand_step), make_state()),
            },
            rounds,
        )
        for side in ("jdist", "jdist, apply", "hand-written again"):
            c = compare(times[side], times["hand-written"])
            print(
                f"{strategy.devices[0].platform} x {strategy.num_replicas}  {name:11s}  {side:18s} / hand-written: "
                f"ratio {c.ratio:.3f} [{c.ratio_low:.3f}, {c.ratio_high:.3f}], "
                f"{c.difference / calls * 1e6:+.1f} us a call of {c.seconds / calls * 1e6:,.0f} us",
                flush=True,
            )


if __name__ == "__main__":
    on_cpu_devices(measure, __doc__, __file__, devices=[1, 2, 8], rounds=40, cases=CASES)
