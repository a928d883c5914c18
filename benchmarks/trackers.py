"""What a tracker costs the thread that trains: seconds of each logged row there, against a step of 5 ms.

    python benchmarks/trackers.py [--rows 500] [--metrics 10]

Each row has that many numbers, and is logged by a step that does nothing, so that the tracker's own thread is as busy as it
gets. A row every 20 steps, the default, is compared with these 20 steps of 5 ms.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

STEP_S, EVERY = 5e-3, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--metrics", type=int, default=10)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    os.environ |= {"JAX_PLATFORMS": "cpu", "TRACKIO_DIR": str(folder / "trackio")}
    import jax.numpy as jnp

    import jdist
    from jdist import callbacks

    def train_step(state: Any, batch: Any) -> Any:
        return state + 1, {f"metric_{i}": jnp.sum(batch["x"]) + i for i in range(args.metrics)}

    makers = {
        "jsonl, for comparison": lambda: callbacks.jsonl(folder / "rows.jsonl"),
        "tensorboard": lambda: callbacks.tensorboard(folder / "tensorboard"),
        "trackio": lambda: callbacks.trackio("benchmark"),
    }
    for name, make in makers.items():
        callback, seconds = make(), []
        on_row = callback.on_row
        assert on_row is not None

        def timed(moment: Any, on_row: Any = on_row, seconds: list[float] = seconds) -> None:
            start = time.perf_counter()
            on_row(moment)
            seconds.append(time.perf_counter() - start)

        jdist.fit(
            train_step,
            jnp.zeros(()),
            [{"x": jnp.ones(8)}] * args.rows,
            strategy=jdist.one_device(),
            log_every=1,
            callbacks=[callbacks.checkpoint(folder / name), dataclasses.replace(callback, on_row=timed)],
            progress=False,
            log_to=None,
            verify="off",
        )
        row_s, worst_s = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
        share = row_s / (EVERY * STEP_S)
        print(
            f"{name}: {row_s * 1e6:.0f} us a row, 99th percentile {worst_s * 1e6:.0f}; {share:.3%} of {EVERY} steps of 5 ms"
        )


if __name__ == "__main__":
    main()
