"""Claim: each all-reduce sends what its documentation says; on devices that share one memory nothing beats `psum`.

A 10 MB tree (20 leaves of 500 KB) summed over 8 virtual CPU devices by each algorithm in turn. Prints the ratio to `psum` with
its 95 % interval, `psum` against itself as the noise, and the bytes that one replica sends, read from the compiled program.
Virtual devices say how much work an algorithm is, not how fast it is over a network.

    python benchmarks/reductions.py
    python benchmarks/reductions.py --rounds 10 --megabytes 1
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from pairs import alternate, compare

import jdist
from jdist import reduction
from jdist.reduction import Reduction

NUM_REPLICAS, LEAVES = 8, 20
WIDTH_BYTES = {"f32": 4, "s32": 4, "u16": 2, "s8": 1, "u8": 1}


def main() -> None:
    """Time every algorithm and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--megabytes", type=float, default=10, help="size of the tree")
    options = parser.parse_args()
    size = int(options.megabytes * 1e6 / 4 / LEAVES)

    algorithms: dict[str, Reduction] = {"psum": reduction.psum(), "psum again": reduction.psum()}
    for made in (
        reduction.bucketed(int(options.megabytes * 1e6 / 4)),
        reduction.hierarchical(4, 2),
        reduction.ring(),
        reduction.to_one_device(),
        reduction.compressed("bf16"),
        reduction.compressed("int8"),
    ):
        algorithms[made.name] = made

    programs, sent = {}, {}
    for name, made in algorithms.items():
        programs[name], sent[name] = program(made, size)
    times = alternate(programs, options.rounds)
    print(f"{options.megabytes:g} MB, {NUM_REPLICAS} virtual devices, {options.rounds} rounds, jax {jax.__version__}")
    print("| algorithm | median ms | time / psum | bytes a replica sends / size of the tree | collectives |")
    print("|---|---|---|---|---|")
    for name in algorithms:
        c = compare(times[name], times["psum"])
        ratio = "1" if name == "psum" else f"{c.ratio:.2f} [{c.ratio_low:.2f}, {c.ratio_high:.2f}]"
        moved, kinds = sent[name]
        print(f"| {name} | {1e3 * c.seconds:.1f} | {ratio} | {moved / (4 * size * LEAVES):.2f} | {kinds} |")


def program(made: Reduction, size: int) -> tuple[Callable[[], None], tuple[float, str]]:
    """One all-reduce of the tree, and what it sends."""
    strategy = jdist.mirrored(all_reduce=made)
    assert strategy.mesh is not None
    rng = np.random.default_rng(0)
    by_replica = NamedSharding(strategy.mesh, PartitionSpec(strategy.axes))
    tree = [rng.normal(size=(NUM_REPLICAS, size)).astype(np.float32) for _ in range(LEAVES)]
    one = made.init([x[0] for x in tree])
    carry = jax.tree.map(lambda x: np.stack([np.asarray(x)] * NUM_REPLICAS), one)

    def apply(tree: Any, carry: Any) -> Any:
        tree, carry = made.apply(*jax.tree.map(lambda x: x[0], (tree, carry)), strategy.axes)
        return tree, jax.tree.map(lambda x: x[None], carry)

    spec = PartitionSpec(strategy.axes)
    mapped = jax.shard_map(
        apply, mesh=strategy.mesh, in_specs=(spec, spec), out_specs=(PartitionSpec(), spec), check_vma=False
    )
    arguments = jax.device_put((tree, carry), by_replica)
    compiled = jax.jit(mapped).lower(*arguments).compile()
    return functools.partial(run, compiled, arguments), bytes_sent(compiled.as_text() or "")


def run(compiled: Any, arguments: Any) -> None:
    """One call, waited for."""
    jax.block_until_ready(compiled(*arguments))


def bytes_sent(text: str) -> tuple[float, str]:
    """What one replica sends: the sizes of the compiled program's collectives, each by the least that it takes.

    An all-reduce of B bytes among n takes 2 (n - 1) / n B from each, a reduce-scatter, all-gather or all-to-all (n - 1) / n
    of its whole, a permute B from each pair that it names. A collective in a loop counts as often as the loop runs.
    """
    text = re.sub(r"/\*.*?\*/", "", text)
    total, kinds = 0.0, []
    trips = {
        body: int(n) for body, n in re.findall(r"body=%?([\w.\-]+).*?\"known_trip_count\":\{\"n\":\"(\d+)\"", text)
    }
    computation = ""
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line):
            computation = start[1]
        found = re.search(
            r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", line
        )
        if not found:
            continue
        shape, kind = found.groups()
        size = sum(
            WIDTH_BYTES[dtype] * int(np.prod([int(n) for n in dims.split(",") if n] or [1]))
            for dtype, dims in re.findall(r"\b([a-z]+\d+)\[([\d,]*)\]", shape)
        )
        times = trips.get(computation, 1)
        total += times * size * share(kind, line)
        kinds.append(f"{times} x {kind}" if times > 1 else kind)
    counted = {kind: kinds.count(kind) for kind in kinds}
    return total, ", ".join(kind if n == 1 else f"{n} {kind}" for kind, n in counted.items())


def share(kind: str, line: str) -> float:
    """What part of the size of its result one replica sends in a collective."""
    if kind == "collective-permute":
        return len(re.findall(r"\{\d+,\d+\}", line.partition("source_target_pairs=")[2])) / NUM_REPLICAS
    n = group_size(line)
    return {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}.get(kind, (n - 1) / n)


def group_size(line: str) -> int:
    """How many replicas take part in one group of a collective."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(iota[2])
    return NUM_REPLICAS


if __name__ == "__main__":
    main()
