"""What `verify="first"` adds to a step's first call, which compiles: seconds, and as a share of it.

    python benchmarks/verify.py [--devices 8] [--rows 64] [--repeats 3]

Three steps: a residual net with synchronised batch normalisation under SGD, the same under AdamW, with biases before the
normalisation that amplify rounding, so it runs a few times more to measure that, and one with a loss
that is not a mean over the rows, also compiled in the global view. Calls with and without take turns, each of its own step;
medians are shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="number of virtual CPU devices; 0: those JAX sees")
    parser.add_argument("--rows", type=int, default=64, help="rows of the global batch")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.devices:
        os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={args.devices}"}
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen as nn

    import jdist

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            axis: Any = jdist.replica_axes()
            x = nn.Conv(16, (3, 3))(x)
            for _ in range(2):
                y = nn.Conv(16, (3, 3))(x)
                y = nn.relu(nn.BatchNorm(use_running_average=False, axis_name=axis)(y))
                x = x + nn.Conv(16, (3, 3))(y)
            return nn.Dense(10)(x.mean((1, 2)))

    def make(tx: optax.GradientTransformation, *, by_hand: bool) -> Any:
        def train_step(state: Any, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                variables = {"params": params, "batch_stats": state["batch_stats"]}
                logits, new = Net().apply(variables, batch["x"], mutable=["batch_stats"])
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
                weights = batch["weight"]
                loss = (weights * losses).sum() / weights.sum() if by_hand else jdist.mean(losses, weights)
                return loss, new["batch_stats"]

            (loss, stats), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state["params"])
            updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "batch_stats": stats, "opt_state": opt_state}, {"loss": loss}

        return train_step

    random = np.random.default_rng(0)
    batch = {
        "x": random.normal(size=(args.rows, 8, 8, 3)).astype(np.float32),
        "y": random.integers(0, 10, args.rows),
        "weight": random.uniform(size=args.rows).astype(np.float32),
    }
    strategy = jdist.mirrored()
    cases = {
        "SGD": (optax.sgd(0.1), False),
        "AdamW": (optax.adamw(1e-3), False),
        "SGD, sum / sum(weights)": (optax.sgd(0.1), True),
    }
    warnings.simplefilter("ignore", jdist.VerificationWarning)
    for name, (tx, by_hand) in cases.items():

        def create(tx: optax.GradientTransformation = tx) -> Any:
            variables = Net().init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
            return {**variables, "opt_state": tx.init(variables["params"])}

        took: dict[str, list[float]] = {"off": [], "first": []}
        steady: list[float] = []
        step: Any = None
        for _ in range(args.repeats):
            for how, seconds in took.items():
                step = jdist.distribute(make(tx, by_hand=by_hand), strategy, verify=how)
                state = strategy.init(create)
                start = time.perf_counter()
                state, _ = step(state, batch)
                jax.block_until_ready(state)
                seconds.append(time.perf_counter() - start)
                start = time.perf_counter()
                jax.block_until_ready(step(state, batch))
                steady.append(time.perf_counter() - start)
        off, first = statistics.median(took["off"]), statistics.median(took["first"])
        print(
            f"{name}: first call {off:.1f} s, verified {first:.1f} s, {first / off:.2f} times as long "
            f"({min(took['first']) / max(took['off']):.2f} to {max(took['first']) / min(took['off']):.2f}); "
            f"a later call {statistics.median(steady) * 1e3:.0f} ms; same: {bool(step.verification)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
