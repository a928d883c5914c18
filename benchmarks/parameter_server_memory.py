"""Claim: the coordinator's memory does not grow with the number of steps, and a server's is its shard and a few messages.

    python benchmarks/parameter_server_memory.py --steps 100000          # tiny steps: the coordinator
    python benchmarks/parameter_server_memory.py --steps 300 --floats 25000000   # large ones: the server
    python benchmarks/parameter_server_memory.py --steps 11 --floats 128000000 --workers 1   # how many times the state each has

Prints the resident memory of the program and of the server while workers train, at ten moments after a first tenth; and at
the end, after a snapshot and a fetch, the most that each process ever had above what a tiny state took, in states.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jdist


def resident_mb(pid: int | str) -> float:
    """Resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def peak_mb(pid: int | str) -> float:
    """The most that was ever resident of a process, in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def main() -> int:
    """Train, and look at the memory now and then.

    Returns:
        The exit code: 1 if the program's memory grew by more than a tenth after the first tenth of the steps.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--floats", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    strategy = jdist.parameter_server(local_workers=options.workers, local_ps=1)

    @jdist.distribute(strategy)
    def train_step(state, batch):
        loss, grads = jdist.value_and_grad(lambda w: jdist.mean(batch["x"]) * w.mean())(state["w"])
        return {"w": state["w"] - 0.1 * grads, "count": state["count"] + 1}, {"loss": loss}

    batch = {"x": np.ones((8, 4), np.float32)}
    tiny, metrics = train_step(strategy.init(lambda: {"w": jnp.ones(8), "count": jnp.int32(0)}), batch)
    float(metrics["loss"])
    server, *workers = tiny.job.servers.processes()
    processes = {"program": "self", "server": server, **{f"worker {i}": pid for i, pid in enumerate(workers)}}
    begun = {name: peak_mb(pid) for name, pid in processes.items()}
    state = strategy.init(lambda: {"w": jnp.ones(options.floats), "count": jnp.int32(0)})
    begin, first = time.perf_counter(), 0.0
    for step in range(1, options.steps + 1):
        state, metrics = train_step(state, batch)
        if step % max(1, options.steps // 11):
            continue
        float(metrics["loss"])
        servers = state.job.servers
        program, ps = resident_mb("self"), resident_mb(servers.processes()[0])
        first = first or program
        rate = step / (time.perf_counter() - begin)
        print(f"step {step:,}: program {program:.0f} MB, server {ps:.0f} MB; {rate:,.0f} steps/s")
    state.job.coordinator.snapshots.take()
    count = int(strategy.fetch(state)["count"])
    times = {name: (peak_mb(pid) - begun[name]) / (4 * options.floats / 1e6) for name, pid in processes.items()}
    print("at most, in states:", ", ".join(f"{name} {found:.1f}" for name, found in times.items()))
    print(
        f"{count:,} updates; the state is {4 * options.floats / 1e6:,.1f} MB; the program grew by {program / first - 1:+.1%}"
    )
    strategy.coordinator.close()
    return int(program > 1.1 * first or count != options.steps)


if __name__ == "__main__":
    raise SystemExit(main())
