"""What feeding by other libraries' datasets costs: a step fed by Grain from files, and each adapter for a batch.

    python benchmarks/datasets_of_others.py [--megabytes 64] [--steps 4] [--rounds 6] [--batches 300] [--far 100000]
        [--tables fed adapters far]

The first table alternates a step on batches that Grain reads from ArrayRecord files with one on a batch held in memory.
Target: step time within 5 %.

The second table goes through small batches by a library's own loop and by jdist's adapter of the same dataset, on the host,
with no thread of jdist's or Grain's, which would compete for Python's lock, both behind the same plain pipeline (checks,
mask). Its time is the processor's in this thread, as another program's turns do not count. Target: an adapter adds under
50 us a batch.

The third table goes through a pass up to batch `--far`, saves the position and restores it in a new dataset: the time to
the first batch there, and that to the first batch of a pass. Target: under a second.

Libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
SIDE = 224


class Plain(Iterable):
    """A library's own loop, as an iterable that jdist knows nothing of."""

    def __init__(self, begin: Callable[[], Iterator[Any]]):
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


class Rows:
    """Small rows in memory, by their numbers."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number >= self.count:
            raise IndexError(number)
        return {"y": np.int64(number)}

    def __repr__(self) -> str:
        return f"Rows({self.count})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="size of a batch of images")
    parser.add_argument("--steps", type=int, default=4, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, default=300, help="small batches in a round")
    parser.add_argument("--far", type=int, default=100_000, help="number of the batch that is gone to")
    parser.add_argument("--tables", nargs="+", choices=("fed", "adapters", "far"), default=("fed", "adapters", "far"))
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "fed" in args.tables:
        with tempfile.TemporaryDirectory() as folder:
            fed_from_files(Path(folder), args)
    if "adapters" in args.tables:
        adapters(args)
    if "far" in args.tables:
        far(args)


def fed_from_files(folder: Path, args: argparse.Namespace) -> None:
    """Compares a step on Grain's batches with one on a batch held in memory."""
    import grain
    import jax
    import jax.numpy as jnp
    from array_record.python.array_record_module import ArrayRecordWriter
    from pairs import alternate, compare

    import jdist

    rows = args.megabytes * 1_000_000 // (SIDE * SIDE * 3)
    rng = np.random.default_rng(0)
    paths = []
    for number in range(4):
        paths.append(str(folder / f"part-{number}.array_record"))
        writer = ArrayRecordWriter(paths[-1], "group_size:1,uncompressed")
        for _ in range(rows // 2):
            writer.write(rng.integers(0, 256, SIDE * SIDE * 3, np.uint8).tobytes())
        writer.close()

    def decode(record: bytes) -> dict[str, Any]:
        return {"image": np.frombuffer(record, np.uint8).reshape(SIDE, SIDE, 3)}

    given = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths)).shuffle(seed=0).repeat()
    given = given.map(decode).batch(rows)
    strategy = jdist.one_device()
    dataset = iter(strategy.distribute_dataset(given))
    held = next(dataset)

    def train_step(state: Any, batch: Any) -> Any:
        def loss(kernel: Any) -> Any:
            image = batch["image"].astype(jnp.float32) / 255
            patches = jax.lax.conv_general_dilated(
                image, kernel, (16, 16), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return jdist.mean(jax.nn.gelu(patches).mean((1, 2, 3)), batch["mask"])

        value, grads = jdist.value_and_grad(loss)(state)
        return state - 0.01 * grads, {"loss": value}

    step = jdist.distribute(train_step, strategy)
    state = [strategy.init(lambda: rng.normal(0, 0.02, (16, 16, 3, 384)).astype(np.float32))]

    def run(batches: Iterator[Any]) -> None:
        now, metrics = state[0], None
        for _ in range(args.steps):
            now, metrics = step(now, next(batches))
        jax.block_until_ready(metrics)
        state[0] = now

    def forever() -> Iterator[Any]:
        while True:
            yield held

    programs = {"fed": lambda: run(dataset), "held": lambda: run(forever()), "held again": lambda: run(forever())}
    times = alternate(programs, args.rounds)
    print(f"batches of {rows:,} images, {rows * SIDE * SIDE * 3 / 1e6:.0f} MB, by Grain from ArrayRecord files")
    for side in ("fed", "held again"):
        c = compare(times[side], times["held"])
        print(
            f"  {side:10s} / held in memory: {c.ratio:.3f} [{c.ratio_low:.3f}, {c.ratio_high:.3f}], "
            f"{c.seconds / args.steps * 1e3:,.0f} ms a step"
        )
    start = time.perf_counter()
    count = max(args.steps, 2)
    for number in range(count):
        given[number]
    print(f"  Grain makes a batch in {(time.perf_counter() - start) / count * 1e3:,.0f} ms, in one thread")


def adapters(args: argparse.Namespace) -> None:
    """Prints what each adapter adds to a library's own loop."""
    from pairs import alternate

    from jdist import InputOptions
    from jdist.data import FeedOptions, distributed_dataset

    def through(source: Any) -> Callable[[], None]:
        dataset = distributed_dataset(source, FeedOptions(num_replicas=1, input=InputOptions(prefetch=0)))

        def run() -> None:
            for _ in dataset:
                pass

        return run

    print("\nwhat an adapter adds to the library's own loop, us of this thread a batch of 8 rows")
    print("| dataset | its own loop | added by the adapter | by the same loop again |\n|---|---|---|---|")
    for name, make, own in kinds(args.batches):
        sides = {"own": through(Plain(own)), "own again": through(Plain(own)), "adapted": through(make())}
        times = alternate(sides, args.rounds, clock=time.thread_time)

        def added(side: str, times: dict[str, list[float]] = times) -> float:
            return statistics.median(
                1e6 * (a - b) / args.batches for a, b in zip(times[side], times["own"], strict=True)
            )

        loop_us = statistics.median(times["own"]) * 1e6 / args.batches
        print(f"| {name} | {loop_us:,.0f} | {added('adapted'):,.0f} | {added('own again'):,.0f} |", flush=True)


def far(args: argparse.Namespace) -> None:
    """Prints how long it takes to a far batch, by the position that was saved there."""
    from jdist import InputOptions
    from jdist.data import FeedOptions, distributed_dataset

    def fed(make: Callable[[], Any]) -> Any:
        return distributed_dataset(make(), FeedOptions(num_replicas=1, input=InputOptions(prefetch=0)))

    def first_of(make: Callable[[], Any], state: Any) -> tuple[float, Any]:
        start = time.perf_counter()
        dataset = fed(make)
        if state is not None:
            dataset.restore(json.loads(json.dumps(state)))
        batch = next(iter(dataset))
        return time.perf_counter() - start, batch

    print(f"\ntime to a batch of a new dataset, s, median of {args.rounds}")
    print(f"| dataset | batch 0 | batch {args.far:,} by its position | all batches before it |\n|---|---|---|---|")
    for name, make, _ in kinds(args.far + 2):
        dataset = fed(make)
        if not dataset.is_resumable:
            continue
        batches = iter(dataset)
        if name == "grain DataLoader":  # Grain makes 100 batches a second of it
            first = next(batches)["y"]
            state = moved(dataset.state(), args.far)
            order = [
                make()._sampler[number].record_key for number in (*range(8), *range(8 * args.far, 8 * args.far + 8))
            ]
            assert order[:8] == first.tolist()
            expected, all_before = order[8:], "not read"
        else:
            start = time.perf_counter()
            for _ in range(args.far):
                next(batches)
            all_before = f"{time.perf_counter() - start:.1f}"
            state, expected = dataset.state(), next(batches)["y"]
        batches.close()
        near = statistics.median(first_of(make, None)[0] for _ in range(args.rounds))
        took = []
        for _ in range(args.rounds):
            seconds, batch = first_of(make, state)
            np.testing.assert_array_equal(batch["y"], expected)
            took.append(seconds)
        print(f"| {name} | {near:.3f} | {statistics.median(took):.3f} | {all_before} |", flush=True)


def moved(state: dict[str, Any], batches: int) -> dict[str, Any]:
    """Moves a position of a DataLoader, as Grain writes it, to behind so many batches of 8 rows."""
    own = json.loads(base64.b64decode(state["sources"][0]["state"]["data"]))
    own["last_seen_indices"] = {"0": 8 * batches - 1}
    state["sources"][0]["state"]["data"] = base64.b64encode(json.dumps(own, indent=4).encode()).decode()
    return {**state, "step": batches}


def kinds(batches: int) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Iterator[Any]]]]:
    """Yields a name, what makes a dataset, and what begins its own loop, for each library that is installed."""
    rows = Rows(8 * batches)
    with contextlib.suppress(ImportError):
        import grain

        given = grain.MapDataset.source(rows).shuffle(seed=0).batch(8)
        yield "grain MapDataset", lambda: given, lambda: (given[i] for i in range(len(given)))
        no_threads = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        stream = given.to_iter_dataset(no_threads)
        yield "grain IterDataset", lambda: stream, lambda: iter(stream)
        options = grain.sharding.NoSharding()
        sampler = grain.samplers.IndexSampler(len(rows), num_epochs=1, shuffle=True, seed=0, shard_options=options)
        loader = grain.DataLoader(
            data_source=rows, sampler=sampler, operations=[grain.transforms.Batch(8)], read_options=no_threads
        )
        yield "grain DataLoader", lambda: loader, lambda: iter(loader)
    with contextlib.suppress(ImportError):
        import datasets

        datasets.disable_progress_bars()
        table = datasets.Dataset.from_dict({"y": np.arange(8 * batches)}).with_format("numpy").batch(8)
        yield "Hugging Face Dataset", lambda: table, lambda: (table[i] for i in range(len(table)))
        streamed = table.to_iterable_dataset()
        yield "Hugging Face IterableDataset", lambda: streamed, lambda: iter(streamed)
    with contextlib.suppress(ImportError):
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader

        options = {"batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(0)}
        stateful = StatefulDataLoader(rows, **options)
        yield "StatefulDataLoader", lambda: stateful, lambda: iter(stateful)
        plain = torch.utils.data.DataLoader(rows, **options)
        yield "torch DataLoader", lambda: plain, lambda: iter(plain)
    with contextlib.suppress(ImportError):
        import tensorflow as tf

        sliced = tf.data.Dataset.from_tensor_slices({"y": np.arange(8 * batches)}).batch(8)
        yield "tf.data.Dataset", lambda: sliced, lambda: iter(sliced.as_numpy_iterator())


if __name__ == "__main__":
    main()
