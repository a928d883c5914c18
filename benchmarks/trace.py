"""What tracing a step takes, making StableHLO of it, and explaining it, against the same hand-written step.

    python benchmarks/trace.py [--devices 2] [--rounds 5]

Dense layers of 8 features with clipped AdamW: 60 and 500 arrays of parameters, twice as many more in the optimiser's state.
Every trace begins with empty caches. In seconds of the processor; jdist, hand-written and hand-written again take turns.
`jdist.explain` of ten arrays is the first in its process, next to tracing and compiling the hand-written step.
"""

from __future__ import annotations

import time

from pairs import alternate, compare, on_cpu_devices


def measure(rounds: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import PartitionSpec as P

    import jdist

    strategy = jdist.mirrored()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    batch = {"x": np.ones((16, 8), np.float32), "y": np.ones(16, np.float32)}

    def loss_of(params, batch):
        x = batch["x"]
        for w, b in params:
            x = jax.nn.relu(x @ w + b)
        return jnp.mean((x.sum(-1) - batch["y"]) ** 2)

    def updated(state, grads):
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    def step(state, batch):
        loss, grads = jdist.value_and_grad(loss_of)(state["params"], batch)
        return updated(state, grads), {"loss": loss}

    def step_by_hand(state, batch):
        loss, grads = jax.lax.pmean(jax.value_and_grad(loss_of)(state["params"], batch), "replica")
        return updated(state, grads), {"loss": loss}

    def by_hand():
        specs = {"in_specs": (P(), P("replica")), "out_specs": (P(), P()), "check_vma": False}
        return jax.jit(jax.shard_map(step_by_hand, mesh=strategy.mesh, **specs), donate_argnums=0)

    def create(leaves):
        params = [(jnp.ones((8, 8)), jnp.zeros(8)) for _ in range(leaves // 2)]
        return {"params": params, "opt": tx.init(params)}

    state, clocks = create(10), [time.process_time()]
    jdist.explain(jdist.distribute(step, strategy), state, batch)
    clocks.append(time.process_time())
    by_hand().lower(state, batch).compile()
    clocks.append(time.process_time())
    explained, compiled = np.diff(clocks)
    print(
        f"{strategy.num_replicas} devices, 10 leaves: jdist.explain {explained:.2f} s, hand-written compiled {compiled:.2f} s"
    )
    for leaves in (60, 500):
        state = create(leaves)

        def lowered(make, state=state):
            jax.clear_caches()
            make().lower(state, batch)

        def traced(make, state=state):
            jax.clear_caches()
            program = make()
            (program.jaxpr if hasattr(program, "jaxpr") else program.trace)(state, batch)

        sides = {
            "jdist": lambda: jdist.distribute(step, strategy),
            "hand-written": by_hand,
            "hand-written again": by_hand,
        }
        for part, run in (("trace", traced), ("trace and lower", lowered)):
            programs = {side: lambda make=make, run=run: run(make) for side, make in sides.items()}
            times = alternate(programs, rounds, clock=time.process_time)
            for side in ("jdist", "hand-written again"):
                c = compare(times[side], times["hand-written"])
                print(
                    f"{strategy.num_replicas} devices, {leaves} leaves, {part}, {side} / hand-written: ratio {c.ratio:.2f} "
                    f"[{c.ratio_low:.2f}, {c.ratio_high:.2f}] of {c.seconds:.2f} s",
                    flush=True,
                )


if __name__ == "__main__":
    on_cpu_devices(measure, __doc__, __file__, devices=[2], rounds=5)
