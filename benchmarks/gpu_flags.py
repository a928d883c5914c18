"""What XLA's GPU flags change in the compiled schedule of `mirrored` and `multi_worker` steps; needs no GPU.

    python benchmarks/gpu_flags.py

A step of ten layers of 1,024 x 1,024 (42 MB of gradients, Adam) is compiled for eight H100s of one host, and of four hosts,
with one flag at a time. Printed are, of each: the all-reduces, the share of their payload that is in flight during matrix
products, and the temporaries. Kernels are not tuned, without a GPU to try them on.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import jdist
from jdist.plan.collectives import collectives
from jdist.plan.hlo import overlap, parse

LAYERS, WIDTH, ROWS = 10, 1024, 64
FLAGS: dict[str, dict[str, Any]] = {
    "none": {},
    "latency-hiding scheduler off": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "latency-hiding scheduler on": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "combine all-reduces up to 4 MB": {"xla_gpu_all_reduce_combine_threshold_bytes": 4_000_000},
    "combine all-reduces up to 128 MB": {"xla_gpu_all_reduce_combine_threshold_bytes": 128_000_000},
    "pipelined all-reduce": {"xla_gpu_enable_pipelined_all_reduce": True},
    "pipelined collectives": {"xla_gpu_enable_pipelined_collectives": True},
    "double-buffered loops": {"xla_gpu_enable_while_loop_double_buffering": True},
    "windowed einsum (collective matmul)": {"xla_gpu_threshold_for_windowed_einsum_mib": 0},
    "scheduler, combine up to 4 MB": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": 4_000_000,
    },
}


def create() -> Any:
    params = {f"layer_{i}": jnp.zeros((WIDTH, WIDTH)) for i in range(LAYERS)}
    return jdist.TrainState.create(params=params, tx=optax.adam(1e-3))


def step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        x = batch["x"]
        for i in range(LAYERS):
            x = jnp.tanh(x @ params[f"layer_{i}"])
        return jnp.mean(x**2)

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def main() -> None:
    bucketed = {"name": "bucketed", "bytes_per_pack": 8_000_000}
    cases: dict[str, Any] = {
        "mirrored, h100:8": jdist.mirrored(topology="h100:8"),
        "mirrored bucketed(8 MB), h100:8": jdist.mirrored(topology="h100:8", all_reduce=bucketed),
        "multi_worker, h100:4x8": jdist.multi_worker(topology="h100:4x8"),
        "mirrored, h100:8, 4 steps a call": jdist.mirrored(topology="h100:8"),
    }
    print(f"JAX {jax.__version__}")
    for name, strategy in cases.items():
        steps = 4 if "steps a call" in name else 1
        shape = (ROWS * strategy.num_replicas, WIDTH)
        batch = {"x": jax.ShapeDtypeStruct((steps, *shape) if steps > 1 else shape, jnp.float32)}
        lowered = jdist.distribute(step, strategy, steps_per_call=steps).lower(jax.eval_shape(create), batch)
        print(f"\n{name}\n  {'flag':<38}{'all-reduces':>12}{'during products':>17}{'temporaries':>14}")
        for flag, options in FLAGS.items():
            try:
                program = lowered.compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as exc:
                print(f"  {flag:<38}{str(exc).splitlines()[0][:60]}")
                continue
            module = parse(program.as_text())
            total, hidden = overlap(module)
            count = sum(c.count for c in collectives(module, dict(strategy.mesh.shape)))
            temporaries = program.memory_analysis().temp_size_in_bytes
            print(f"  {flag:<38}{count:>12}{hidden / max(1, total):>17.0%}{temporaries / 1e6:>11.1f} MB", flush=True)


if __name__ == "__main__":
    main()
