"""What feeding costs: the digits CNN at a 64 MB batch, from arrays through the distributed dataset.

    python benchmarks/input.py [--megabytes 64] [--steps 6] [--devices 1]
    python benchmarks/input.py --small [--devices 1]

The same step alternates between batches that come from the dataset (shuffled, gathered, sliced, put on the devices by
the background thread) and one batch held in memory. Target: step time within 5 %. The input thread's share of the CPU
is its own CPU time over the wall time.

`--small`: batches of 8 digits, from arrays to the devices, with nothing else to do; against rows that are gathered and put
there by hand, without a mask and without checks.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="size of a global batch of images")
    parser.add_argument(
        "--width", type=int, default=4, help="channels of the CNN; 32, as in its config, needs 27 GB here"
    )
    parser.add_argument("--steps", type=int, default=6, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="number of virtual CPU devices; 0: those JAX sees")
    parser.add_argument("--small", action="store_true", help="batches of 8 rows, against gather and device_put by hand")
    args = parser.parse_args()
    if args.devices:
        os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={args.devices}"}

    import jax
    import numpy as np
    import optax
    from pairs import alternate, compare

    import jdist
    from jdist.tasks import digits

    strategy = jdist.mirrored()
    if args.small:
        return small_batches(strategy, args.rounds)
    task = digits.make(width=args.width)
    image = next(iter(task.train_data(8, 0, 1)))["image"][0]
    rows = args.megabytes * 1_000_000 // image.nbytes
    rows -= rows % strategy.num_replicas
    rng = np.random.default_rng(0)
    arrays = {
        "image": rng.normal(size=(2 * rows, *image.shape)).astype(image.dtype),
        "label": rng.integers(0, 10, 2 * rows),
    }
    source = jdist.data.from_arrays(arrays, global_batch=rows, shuffle_seed=0, epochs=None)
    dataset = iter(strategy.distribute_dataset(source))
    held = next(dataset)
    state = [strategy.init(lambda key: task.create_state(key, optax.sgd(0.01)), jax.random.key(0))]
    train_step = jdist.distribute(task.train_step, strategy)

    def run(batches) -> None:
        now = state[0]
        for _ in range(args.steps):
            now, metrics = train_step(now, next(batches))
        jax.block_until_ready(metrics)
        state[0] = now

    def forever():
        while True:
            yield held

    cpu_before = input_cpu_s()
    programs = {"fed": lambda: run(dataset), "held": lambda: run(forever()), "held again": lambda: run(forever())}
    times = alternate(programs, args.rounds)
    rounds = args.rounds + 1  # one more, to warm up
    cpu_s, fed_s = input_cpu_s() - cpu_before, sum(times["fed"]) * rounds / args.rounds
    print(
        f"global batch {rows:,} rows, {rows * image.nbytes / 1e6:.0f} MB of images, {strategy.num_replicas} replica(s)"
    )
    for side in ("fed", "held again"):
        c = compare(times[side], times["held"])
        print(
            f"{side:10s} / held in memory: ratio {c.ratio:.3f} [{c.ratio_low:.3f}, {c.ratio_high:.3f}], "
            f"{c.seconds / args.steps * 1e3:,.0f} ms a step"
        )
    print(f"input thread: {cpu_s / args.steps / rounds * 1e3:.0f} ms of CPU a step, {cpu_s / fed_s:.1%} of one core")


def small_batches(strategy, rounds: int, *, rows: int = 8, calls: int = 1000) -> None:
    """Measures one batch of a few rows, without and with prefetching."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from pairs import alternate, compare

    import jdist

    rng = np.random.default_rng(0)
    arrays = {"image": rng.normal(size=(80_000, 8, 8, 1)).astype(np.float32), "label": rng.integers(0, 10, 80_000)}
    sharding = NamedSharding(strategy.mesh, PartitionSpec(strategy.mesh.axis_names))

    def by_hand():
        while True:
            for chosen in rng.permutation(80_000).reshape(-1, rows):
                yield jax.device_put({name: array[chosen] for name, array in arrays.items()}, sharding)

    def fed(prefetch):
        source = jdist.data.from_arrays(arrays, global_batch=rows, shuffle_seed=0, epochs=None)
        return iter(strategy.distribute_dataset(source, options=jdist.InputOptions(prefetch=prefetch)))

    batches = {"by hand": by_hand(), "prefetch=0": fed(0), "prefetch=2": fed(2), "by hand again": by_hand()}

    def run(iterator):
        for _ in range(calls):
            batch = next(iterator)
        jax.block_until_ready(batch)

    times = alternate({name: lambda iterator=iterator: run(iterator) for name, iterator in batches.items()}, rounds)
    for name in batches:
        c = compare(times[name], times["by hand"])
        each = f"{c.seconds / calls * 1e6:,.0f} us a batch"
        print(
            f"{strategy.num_replicas} replica(s), {name}: {each}, ratio {c.ratio:.2f} [{c.ratio_low:.2f}, {c.ratio_high:.2f}]"
        )


def input_cpu_s() -> float:
    """CPU seconds that the prefetch threads have used so far."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("jdist-prefetch") and thread.ident is not None:
            total += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return total


if __name__ == "__main__":
    main()
