"""A step on a state in parts, on virtual CPU devices: against a copy on each device, against a hand-written one, against jit.

    python benchmarks/sharded.py [--devices 2 8] [--rounds 15]

`mirrored`, `sharded(shard="optimizer")` and `sharded()` run one step, a stack of six layers of 1,024 x 1,024 in a scan under
AdamW at global batch 512. Hand-written: the same in `shard_map`, gathered in the scan's body under `jax.checkpoint`, updated
in parts. jit is the plain step with parameters laid out in parts by `NamedSharding`, and the compiler left to it. On CPU all
devices share one memory, so this shows what the program does, not what a network would.

"mlp" is 784-512-512-10 at global batch 1,024 with momentum, each array gathered before its use. With accumulate=8 one
reduction an update is compared with the reduction in every microbatch that jit makes.
"""

from __future__ import annotations

from pairs import alternate, compare, on_cpu_devices


def measure(rounds: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import jdist

    layers, width, rows, microbatches = 6, 1024, 512, 8
    tx = optax.adamw(1e-3)
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(rows, width)).astype(np.float32) for name in ("x", "y")}

    def create():
        w = jax.random.normal(jax.random.key(0), (layers, width, width)) / np.sqrt(width)
        return jdist.TrainState.create(params={"w": w}, tx=tx)

    def loss_of(params, batch, whole=lambda w: w):
        def layer(x, w):
            return x + jnp.tanh(x @ whole(w)), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params["w"])
        return jnp.mean((x - batch["y"]) ** 2)

    def step(state, batch):
        loss, grads = jdist.value_and_grad(lambda p: loss_of(p, batch))(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def looped(function, state, batch):
        box = [state]

        def run():
            state = box[0]
            for _ in range(3):
                state, metrics = function(state, batch)
            jax.block_until_ready(metrics)
            box[0] = state

        return run

    def runner(strategy, **options):
        placed = jax.device_put(batch, strategy.batch_sharding)
        return looped(jdist.distribute(step, strategy, **options), strategy.init(create), placed)

    mesh = jax.make_mesh((jax.device_count(),), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    cut, by_rows, same = PartitionSpec(None, "replica"), PartitionSpec("replica"), PartitionSpec()

    def specs_of(state):
        return jax.tree.map(lambda x: cut if x.ndim == 3 else same, state)

    def updated(state, grads):
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return state.replace(
            params=optax.apply_updates(state.params, updates), opt_state=opt_state, step=state.step + 1
        )

    def laid_out():
        state = create()
        return jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(state)))

    def by_hand():
        n = jax.device_count()

        def body(state, batch):
            def whole(w):
                return jax.lax.all_gather(w, "replica", tiled=True)

            loss, grads = jax.value_and_grad(lambda p: loss_of(p, batch, whole))(state.params)
            return updated(state, jax.tree.map(lambda g: g / n, grads)), {"loss": jax.lax.pmean(loss, "replica")}

        state = laid_out()
        specs = specs_of(state)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs, by_rows), out_specs=(specs, same), check_vma=False)
        placed = jax.device_put(batch, NamedSharding(mesh, by_rows))
        return looped(jax.jit(mapped, donate_argnums=0), state, placed)

    def by_jit(accumulate=1):
        state = laid_out()
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(state))

        def plain(state, batch):
            if accumulate == 1:
                loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
            else:
                parts = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)

                def add(total, part):
                    return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(state.params, part)), None

                zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
                (loss, grads), _ = jax.lax.scan(add, zero, parts)
                loss, grads = jax.tree.map(lambda x: x / accumulate, (loss, grads))
            return updated(state, grads), {"loss": loss}

        placed = jax.device_put(batch, NamedSharding(mesh, by_rows))
        return looped(jax.jit(plain, donate_argnums=0, out_shardings=(shardings, None)), state, placed)

    sizes, momentum = (784, 512, 512, 10), optax.sgd(0.01, momentum=0.9)
    images = {"x": rng.normal(size=(1024, 784)).astype(np.float32), "y": rng.integers(0, 10, 1024)}

    def create_mlp():
        keys = jax.random.split(jax.random.key(0), 3)
        w = [jax.random.normal(k, (m, n)) / np.sqrt(m) for k, m, n in zip(keys, sizes, sizes[1:], strict=False)]
        return jdist.TrainState.create(params={"w": w, "b": [jnp.zeros(n) for n in sizes[1:]]}, tx=momentum)

    def mlp_loss(params, batch):
        x = batch["x"]
        for i, (w, b) in enumerate(zip(params["w"], params["b"], strict=True)):
            x = x @ w + b
            x = jax.nn.relu(x) if i < 2 else x
        return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()

    def mlp_step(state, batch):
        loss, grads = jdist.value_and_grad(mlp_loss)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def mlp(**options):
        strategy = jdist.sharded()
        placed = jax.device_put(images, strategy.batch_sharding)
        return looped(jdist.distribute(mlp_step, strategy, **options), strategy.init(create_mlp), placed)

    def mlp_by_hand():
        n = jax.device_count()

        def axis_of(x):
            return next((axis for axis, size in enumerate(x.shape) if size % n == 0), None)

        def spec_of(x):
            axis = axis_of(x)
            return same if axis is None else PartitionSpec(*(None,) * axis, "replica")

        state = create_mlp()
        axes = jax.tree.map(lambda x: -1 if axis_of(x) is None else axis_of(x), state.params)
        specs = jax.tree.map(spec_of, state)

        def gathered(x, axis):
            return x if axis < 0 else jax.lax.all_gather(x, "replica", axis=axis, tiled=True)

        def body(state, batch):
            loss, grads = jax.value_and_grad(lambda p: mlp_loss(jax.tree.map(gathered, p, axes), batch))(state.params)
            grads = jax.tree.map(lambda g, axis: jax.lax.pmean(g, "replica") if axis < 0 else g / n, grads, axes)
            updates, opt_state = momentum.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
            return state, {"loss": jax.lax.pmean(loss, "replica")}

        mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs, by_rows), out_specs=(specs, same), check_vma=False)
        state = jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
        return looped(jax.jit(mapped, donate_argnums=0), state, jax.device_put(images, NamedSharding(mesh, by_rows)))

    programs = {
        "mlp": mlp(),
        "mlp, no guard": mlp(non_finite="apply"),
        "mlp, hand-written": mlp_by_hand(),
        "mlp, hand-written again": mlp_by_hand(),
        "mirrored": runner(jdist.mirrored()),
        "mirrored again": runner(jdist.mirrored()),
        "optimizer": runner(jdist.sharded(shard="optimizer")),
        "state": runner(jdist.sharded()),
        "state, no guard": runner(jdist.sharded(), non_finite="apply"),
        "state, hand-written": by_hand(),
        "state by jit": by_jit(),
        f"optimizer, accumulate={microbatches}": runner(jdist.sharded(shard="optimizer"), accumulate=microbatches),
        f"mirrored, accumulate={microbatches}": runner(jdist.mirrored(), accumulate=microbatches),
        f"state by jit, accumulate={microbatches}": by_jit(microbatches),
    }
    times = alternate(programs, rounds)
    pairs = [
        ("mlp", "mlp, hand-written"),
        ("mlp, no guard", "mlp, hand-written"),
        ("mlp, hand-written again", "mlp, hand-written"),
        ("mirrored again", "mirrored"),
        ("optimizer", "mirrored"),
        ("state", "mirrored"),
        ("state", "state, hand-written"),
        ("state, no guard", "state, hand-written"),
        ("state", "state by jit"),
        (f"optimizer, accumulate={microbatches}", f"state by jit, accumulate={microbatches}"),
        (f"mirrored, accumulate={microbatches}", f"state by jit, accumulate={microbatches}"),
    ]
    for side, other in pairs:
        c = compare(times[side], times[other])
        print(
            f"cpu x {jax.device_count()}  {side:25s} / {other:26s}: ratio {c.ratio:.3f} "
            f"[{c.ratio_low:.3f}, {c.ratio_high:.3f}] of {c.seconds / 3 * 1e3:,.1f} ms a step",
            flush=True,
        )


if __name__ == "__main__":
    on_cpu_devices(measure, __doc__, __file__, devices=[2, 8], rounds=15)
