"""What `jdist.multi_worker` costs over the same hand-written program with `jax.distributed` and `jax.shard_map`.

    python benchmarks/multi_worker.py [--processes 2] [--rounds 30]

Both sides alternate in the same processes, over the same connections (gloo, on loopback); each measurement ends when process 0
has its result. Targets: the step at most 1.03 times the hand-written; an all-reduce of 1, 16 and 128 MiB at least 0.95 times
as fast as a hand-written `psum`. The last lines say how long it takes from `jdist launch` to the first step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

MEGABYTES = {1: 20, 16: 4, 128: 1}  # MiB of an all-reduce: calls in a round
STARTED = "BENCHMARK_STARTED"


def measure(rounds: int) -> None:
    """The part of every process."""
    import jdist

    strategy = jdist.multi_worker()

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import PartitionSpec as P
    from pairs import alternate, compare

    chief = jax.process_index() == 0
    whole, by_rows = P(), P("replica")
    tx = optax.sgd(0.01, momentum=0.9)
    sizes = (784, 512, 512, 10)

    def create(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        w = [jax.random.normal(k, (m, n)) / np.sqrt(m) for k, m, n in zip(keys, sizes, sizes[1:], strict=False)]
        params = {"w": w, "b": [jnp.zeros(n) for n in sizes[1:]]}
        return {"params": params, "opt": tx.init(params)}

    def loss_of(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for i, (w, b) in enumerate(zip(params["w"], params["b"], strict=True)):
            x = x @ w + b
            x = jax.nn.relu(x) if i < 2 else x
        return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()

    def update(state: Any, grads: Any) -> Any:
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    def mlp(state: Any, batch: Any) -> Any:
        loss, grads = jdist.value_and_grad(loss_of)(state["params"], batch)
        return update(state, grads), {"loss": loss}

    def mlp_by_hand(state: Any, batch: Any) -> Any:
        loss, grads = jax.lax.pmean(jax.value_and_grad(loss_of)(state["params"], batch), "replica")
        return update(state, grads), {"loss": loss}

    def by_hand(step: Any, in_specs: Any, out_specs: Any) -> Any:
        mapped = jax.shard_map(step, mesh=strategy.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=0)

    def runner(step: Any, state: Any, batches: tuple[Any, ...], calls: int) -> Any:
        box = [state]

        def run() -> None:
            result = None
            for _ in range(calls):
                result = step(box[0], *batches)
                box[0] = result[0] if isinstance(result, tuple) else result
            jax.block_until_ready(result)

        return run

    def show(name: str, times: dict[str, list[float]], size_bytes: int, calls: int) -> None:
        for side in ("jdist", "hand-written again"):
            c = compare(times[side], times["hand-written"])
            rate = f", {size_bytes * calls / c.seconds / 1e6:,.0f} MB/s" if size_bytes else ""
            print(
                f"{name:17s} {side:18s} / hand-written: ratio {c.ratio:.3f} [{c.ratio_low:.3f}, {c.ratio_high:.3f}], "
                f"{c.seconds / calls * 1e3:.2f} ms a call{rate}",
                flush=True,
            )

    rng = np.random.default_rng(0)
    source = [{"x": rng.normal(size=(1024, 784)).astype(np.float32), "y": rng.integers(0, 10, 1024)}]
    batch = next(iter(strategy.distribute_dataset(source)))
    first = jdist.distribute(mlp, strategy)
    jax.block_until_ready(first(strategy.init(create, jax.random.key(0)), batch))
    if chief:
        print(
            f"from `jdist launch` to the first step done: {time.time() - float(os.environ[STARTED]):.1f} s", flush=True
        )
        print(f"{jax.process_count()} processes, {strategy.num_replicas} replicas, jax {jax.__version__}", flush=True)

    hand = by_hand(mlp_by_hand, (whole, by_rows), (whole, whole))
    states = [strategy.init(create, jax.random.key(0)) for _ in range(3)]
    times = alternate(
        {
            "jdist": runner(first, states[0], (batch,), 4),
            "hand-written": runner(hand, states[1], (batch,), 4),
            "hand-written again": runner(hand, states[2], (batch,), 4),
        },
        rounds,
    )
    if chief:
        show("MLP step", times, 0, 4)

    for megabytes, calls in MEGABYTES.items():
        elements = megabytes * 2**18
        ours = jdist.distribute(
            lambda x: jdist.all_reduce(x, "mean"),
            strategy,
            args=("state",),
            returns="state",
            non_finite="apply",
            check_replicas=0,
        )
        hand = by_hand(lambda x: jax.lax.pmean(x, "replica"), whole, whole)
        xs = [strategy.init(lambda n: jnp.ones(n), elements) for _ in range(3)]
        times = alternate(
            {
                "jdist": runner(ours, xs[0], (), calls),
                "hand-written": runner(hand, xs[1], (), calls),
                "hand-written again": runner(hand, xs[2], (), calls),
            },
            rounds,
        )
        if chief:
            show(f"all-reduce {megabytes} MiB", times, megabytes << 20, calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--worker", action="store_true", help="be one of the processes")
    args = parser.parse_args()
    if args.worker:
        return measure(args.rounds)
    import jdist

    os.environ[STARTED] = str(time.time())
    command = [sys.executable, str(Path(__file__).absolute()), "--worker", "--rounds", str(args.rounds)]
    launched = jdist.launch(command, processes=args.processes, devices_per_process=1)
    sys.exit(launched.exit_code)


if __name__ == "__main__":
    main()
