"""What each strategy's step of `text` needs on TPUs and GPUs that are not here, as `jdist plan` finds it: a table in Markdown.

    python benchmarks/plan_topologies.py [case ...]

The transformer of configs/text.yaml at 101 M parameters in bfloat16 under AdamW, rows of 512 bytes, 8 a replica.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jdist

MODEL = ["layers=8", "width=1024", "heads=16", "length=512", "dtype=bfloat16", "eval_bytes=1000"]
CASES = {
    "one_device": ["strategy.name=one_device"],
    "mirrored": [],
    "mirrored, jit": ["strategy.transform=jit"],
    "mirrored, bucketed 25 MB": ["strategy.all_reduce.name=bucketed", "strategy.all_reduce.bytes_per_pack=25000000"],
    "mirrored, accumulate=4": ["train.accumulate=4"],
    "central_storage": ["strategy.name=central_storage"],
    "sharded, optimizer": ["strategy.name=sharded", "strategy.shard=optimizer"],
    "sharded": ["strategy.name=sharded"],
}
TOPOLOGIES = {"v5p:8x8x8": 512, "h100:8": 8, "h100:4x8": 32}
CONFIG = Path(__file__).parents[1] / "configs" / "text.yaml"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for i in range(10):  # one in ten is held out
            Path(folder, f"{i}.txt").write_text("the data does not matter to a plan\n" * 200)
        options = [f"task.options.{option}" for option in [*MODEL, f"files={folder}/*.txt"]]
        print(
            "| strategy | topology | memory of a device, MB | collectives | MB | in flight during products | exchange / step |"
        )
        print("|---|---|---|---|---|---|---|")
        for name in sys.argv[1:] or CASES:
            overrides = CASES[name]
            for topology, devices in TOPOLOGIES.items():
                rows = 8 * (1 if name == "one_device" else devices) * (4 if "accumulate" in name else 1)
                try:
                    plan = jdist.plan.plan_config(
                        CONFIG, *options, f"train.global_batch={rows}", *overrides, topology=topology
                    )
                except jdist.errors.JDistError as exc:
                    print(f"| {name} | {topology} | refused: {str(exc).split(': ')[-1][:60]} | | | | |", flush=True)
                    continue
                print(row(name, topology, plan), flush=True)


def row(name: str, topology: str, plan: jdist.plan.Plan) -> str:
    memory = "does not fit" if plan.memory is None else f"{plan.memory.total / 1e6:,.0f}"
    host = f" + {plan.memory.host / 1e6:,.0f} of the host" if plan.memory is not None and plan.memory.host else ""
    kinds = ", ".join(f"{c.count} {c.kind}" for c in plan.collectives) or "none"
    payload = sum(c.bytes for c in plan.collectives) / 1e6
    overlapped = f"{plan.overlapped_bytes / plan.in_flight_bytes:.0%}" if plan.in_flight_bytes else ""
    here = [e for e in plan.estimates if e.chips == plan.num_devices]
    share = f"{here[0].exchange_share:.1%}" if here and here[0].exchange_share is not None else ""
    return f"| {name} | {topology} | {memory}{host} | {kinds} | {payload:,.0f} | {overlapped} | {share} |"


if __name__ == "__main__":
    sys.exit(main())
