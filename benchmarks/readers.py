"""What several workers bring where decoding takes time, and what an order of many rows costs when an epoch begins.

    python benchmarks/readers.py [--decode-ms 20] [--batches 48] [--workers 2 4 8] [--rounds 5] [--rows 100000000]

A batch takes `--decode-ms` to decode, in which the decoder waits and holds no lock, as one does that waits for a disk or
works in C. Every side goes through `strategy.distribute_dataset`; two batches of each worker are not timed at either
end, so the start and the end of threads and processes are left out. Target: n workers are n times as fast as one. With
grain installed its threads and processes are measured as well as jdist's threads.

The second part trains, with a step of next to nothing over a state of 300 arrays, on rows that take 5 ms of Python each, in
threads: the share of the time that `fit` shows as waiting for data, which is all but a few percent, with the switch
interval that `jdist run` sets and with Python's own.

The third table takes the first batch of 256 rows of an epoch, in a drawn order and in a computed one.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))


def decode(number: int | str, seconds: float) -> dict[str, np.ndarray]:
    """Stands for a decoder of one batch; at the top of the module, so that other processes find it."""
    time.sleep(seconds)
    return {"x": np.full((4, 8), int(number), np.float32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode-ms", type=float, default=20)
    parser.add_argument("--batches", type=int, default=48, help="timed batches of a round")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000_000)
    args = parser.parse_args()
    work = functools.partial(decode, seconds=args.decode_ms / 1e3)
    untimed = 2 * max(args.workers)

    from pairs import compare

    import jdist

    strategy = jdist.default()
    has_grain = importlib.util.find_spec("grain") is not None
    sides = {
        "1 worker": files(work, 2 * untimed + args.batches, 1),
        "1 worker again": files(work, 2 * untimed + args.batches, 1),
    }
    for workers in args.workers:
        sides[f"{workers} workers"] = files(work, 2 * untimed + args.batches, workers)
        if has_grain:
            sides[f"{workers} threads of grain"] = grain_threads(work, 2 * untimed + args.batches, workers)
            sides[f"{workers} processes of grain"] = grain_processes(work, 2 * untimed + args.batches, workers)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, make in sides.items():
            batches = iter(strategy.distribute_dataset(make()))
            for _ in range(untimed):
                next(batches)
            start = time.perf_counter()
            for _ in range(args.batches):
                next(batches)
            times[name].append(time.perf_counter() - start)
            batches.close()
    print(f"{args.batches} batches of {args.decode_ms:g} ms; times as fast as 1 worker, median and 95 % interval:")
    for name in sides:
        c = compare(times["1 worker"], times[name])
        each = 1e3 * float(np.median(times[name])) / args.batches
        print(f"  {name:22s} {c.ratio:.2f} [{c.ratio_low:.2f}, {c.ratio_high:.2f}], {each:.1f} ms a batch")

    held_by_python()

    rows = np.broadcast_to(np.int8(0), (args.rows,))  # one byte, which stands for all
    print(f"first batch of 256 rows of an epoch of {args.rows:,}:")
    for shuffle in ("permutation", "index"):
        source = jdist.data.from_arrays(rows, global_batch=256, shuffle_seed=0, shuffle=shuffle, epochs=None)
        took = []
        for epoch in range(min(args.rounds, 3)):
            start = time.perf_counter()
            source.batch_at(epoch * source.steps_per_epoch)
            took.append(time.perf_counter() - start)
        start = time.perf_counter()
        source.batch_at(epoch * source.steps_per_epoch + 1)
        later = time.perf_counter() - start
        held = 8 * args.rows / 1e6 if shuffle == "permutation" else 0
        print(f"  {shuffle:12s} {np.median(took):.6f} s, a later batch {1e6 * later:,.0f} us, holds {held:,.0f} MB")


def held_by_python() -> None:
    import jax
    import jax.numpy as jnp

    import jdist

    class Rows:
        def __len__(self):
            return 100_000

        def __getitem__(self, number):
            end = time.thread_time() + 0.005
            while time.thread_time() < end:
                pass
            return {"x": np.float32(number)}

    def count(state, batch):
        return jax.tree.map(lambda x: x + 1, state), {"loss": batch["x"].sum()}

    strategy = jdist.one_device()
    step = jdist.distribute(count, strategy, returns=("state", "metrics"), verify="off")
    held = next(iter(strategy.distribute_dataset([{"x": np.ones(8, np.float32)}])))
    print("rows of 5 ms in Python, 8 a batch; shown as waiting for data, and what it was:")
    for threads in (4, 16):
        for interval_s in (0.0005, 0.005):
            sys.setswitchinterval(interval_s)
            state = [jnp.float32(0)] * 300
            data = jdist.data.from_rows(Rows(), global_batch=8, workers=threads)
            state, history = jdist.fit(step, state, data, steps=120, log_every=40, progress=False, log_to=None)
            row = history.rows[-1]
            begin = time.perf_counter()
            for _ in range(100):
                state, metrics = step(state, held)
            jax.block_until_ready(metrics)
            alone_s = (time.perf_counter() - begin) / 100
            print(
                f"  {threads:2} threads, turns of {1e3 * interval_s:g} ms: {row['input_wait_share']:.0%}, "
                f"was {1 - alone_s * row['steps_per_s']:.0%}; {row['steps_per_s']:.1f} steps a second",
                flush=True,
            )


def files(work: Callable, count: int, workers: int) -> Callable[[], Iterable]:
    import jdist

    names = [str(number) for number in range(count)]
    return lambda: jdist.data.from_files(names, work, global_batch=4, workers=workers)


def grain_threads(work: Callable, count: int, workers: int) -> Callable[[], Iterable]:
    import grain

    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=workers)
    return lambda: grain.MapDataset.range(count).map(work).to_iter_dataset(options)


def grain_processes(work: Callable, count: int, workers: int) -> Callable[[], Iterable]:
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain's processes read absl's flags
    alone = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1)
    return lambda: grain.MapDataset.range(count).map(work).to_iter_dataset(alone).mp_prefetch(options)


if __name__ == "__main__":
    main()
