"""What comparing the replicas costs: the first check, by leaves; a later one against the state's size, and its share.

    python benchmarks/replica_check.py [--devices 8] [--megabytes 1 10 100] [--leaves 10 210 1000]

A first check compiles. Its state is of layers, each with a matrix and a bias in six sizes and both moments of Adam. The
share is that of the default, one check every 1,000 steps, for a step that takes as long as reading the state once: no
real step is shorter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="number of virtual CPU devices; 0: those JAX sees")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--leaves", type=int, nargs="+", default=[10, 210, 1000])
    args = parser.parse_args()
    if args.devices:
        os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={args.devices}"}
    import jax
    import jax.numpy as jnp

    import jdist

    for leaves in args.leaves:
        strategy = jdist.mirrored()
        shapes = [shape for i in range(leaves // 6 + 1) for shape in ((8 + i % 6, 16), (16,)) for _ in range(3)][
            :leaves
        ]
        state = strategy.init(lambda shapes=shapes: list(map(jnp.ones, shapes)))
        wall, processor = time.perf_counter(), time.process_time()
        strategy.check(state)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        print(
            f"{strategy.num_replicas} replicas x {leaves} leaves: first check {wall:.2f} s, {processor:.2f} s of the "
            f"processor, {processor / leaves * 1e3:.1f} ms a leaf"
        )
    strategy = jdist.mirrored()
    read = jax.jit(lambda tree: jax.tree.map(jnp.sum, tree))
    for size in args.megabytes:
        state = strategy.init(lambda n=size: [jnp.ones(n * 25_000) for _ in range(10)])
        checks, reads = [], []
        for _ in range(8):
            start = time.perf_counter()
            strategy.check(state)
            middle = time.perf_counter()
            jax.block_until_ready(read(state))
            checks.append(middle - start)
            reads.append(time.perf_counter() - middle)
        check_s, read_s = statistics.median(checks[1:]), statistics.median(reads[1:])
        print(
            f"{strategy.num_replicas} replicas x {size} MB: one check {check_s * 1e3:.1f} ms, {check_s / read_s:.1f} "
            f"times a read of the state; every 1,000 steps at most {check_s / read_s / 10:.2f} % of the time"
        )


if __name__ == "__main__":
    main()
