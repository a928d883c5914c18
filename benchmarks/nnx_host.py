"""The host's time for a step over nnx objects, next to the same step over a plain state.

    python benchmarks/nnx_host.py [--devices 1 2] [--rounds 20]

An MLP of 4 and of 32 narrow layers under Adam: the devices have almost nothing to compute, so a call takes the host's
time. All programs alternate in one process. "split once" keeps `nnx.split`'s state in the loop and merges it in the
step, which is traced once. "8 steps a call" is `steps_per_call=8`, its time divided by 8.
"""

from __future__ import annotations

from pairs import alternate, compare, on_cpu_devices


def measure(rounds: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import jdist

    strategy = jdist.mirrored()
    tx = optax.adam(1e-3)
    width, rows, calls = 16, 16, 32

    class MLP(nnx.Module):
        def __init__(self, layers, rngs):
            self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.tanh(layer(x))
            return x

    def create(layers):
        model = MLP(layers, nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def create_plain(layers):
        keys = jax.random.split(jax.random.key(0), layers)
        params = [{"w": jax.random.normal(key, (width, width)) / 4, "b": jnp.zeros(width)} for key in keys]
        return params, tx.init(params)

    def plain_loss(params, batch):
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return (x**2).mean()

    def plain_step(value_and_grad):
        def step(state, batch):
            params, opt_state = state
            loss, grads = value_and_grad(plain_loss)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

        return step

    def nnx_step(value_and_grad):
        def step(model, optimizer, batch):
            loss, grads = value_and_grad(lambda model: (model(batch["x"]) ** 2).mean())(model)
            optimizer.update(model, grads)
            return {"loss": loss}

        return step

    def over_objects(step, objects, batch, n=1):
        def run():
            for i in range(0, calls, n):
                metrics = step(*objects, batch)
                if i % 8 == 0:
                    jax.block_until_ready(metrics)
            jax.block_until_ready(metrics)

        return run

    def over_state(step, state, batch):
        box = [state]

        def run():
            state = box[0]
            for i in range(calls):
                state, metrics = step(state, batch)
                if i % 8 == 0:
                    jax.block_until_ready(metrics)
            jax.block_until_ready(metrics)
            box[0] = state

        return run

    x = np.random.default_rng(0).normal(size=(8, rows, width)).astype(np.float32)
    batch = next(iter(strategy.distribute_dataset([{"x": x[0]}])))
    batches = next(iter(strategy.distribute_dataset([{"x": each} for each in x], steps_per_call=8)))
    ours, theirs = jdist.value_and_grad, jax.value_and_grad
    for layers in (4, 32):
        graphdef, split = nnx.split(create(layers))

        def split_step(state, batch, graphdef=graphdef):
            model, optimizer = nnx.merge(graphdef, state)
            metrics = nnx_step(jdist.nnx.value_and_grad)(model, optimizer, batch)
            return nnx.state((model, optimizer)), metrics

        by_nnx = nnx_step(jdist.nnx.value_and_grad)
        programs = {
            "jdist.distribute": over_state(jdist.distribute(plain_step(ours), strategy), create_plain(layers), batch),
            "jdist.nnx.distribute": over_objects(jdist.nnx.distribute(strategy)(by_nnx), create(layers), batch),
            "split once": over_state(jdist.distribute(split_step, strategy), split, batch),
            "8 steps a call": over_objects(
                jdist.nnx.distribute(strategy, steps_per_call=8)(by_nnx), create(layers), batches, n=8
            ),
        }
        if strategy.num_replicas == 1:
            plain = jax.jit(plain_step(theirs), donate_argnums=0)
            programs["jax.jit"] = over_state(plain, create_plain(layers), batch)
            programs["nnx.jit"] = over_objects(nnx.jit(nnx_step(nnx.value_and_grad)), create(layers), batch)
        times = alternate(programs, rounds)
        leaves = len(jax.tree.leaves(split))
        for name in programs:
            c = compare(times[name], times["jdist.distribute"])
            print(
                f"{strategy.num_replicas} devices, {layers} layers, {leaves} variables, {name}: "
                f"{c.seconds / calls * 1e6:,.0f} us a step, {c.difference / calls * 1e6:+,.0f} us, "
                f"ratio {c.ratio:.2f} [{c.ratio_low:.2f}, {c.ratio_high:.2f}]",
                flush=True,
            )


if __name__ == "__main__":
    on_cpu_devices(measure, __doc__, __file__, devices=[1, 2], rounds=20)
