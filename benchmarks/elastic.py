"""The pause of the others when a process is lost, from its end to their next step, and what `on_loss="continue"` costs else.

Three processes train a small step of `--sleep-ms`; one is killed (`kill`) or stopped (`stop`), without and with a spare, and
the longest gap in the times of the others' steps behind it is the pause. The same job with "stop" and "continue" and no fault
gives the cost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal

from pairs import compare

PROCESSES = 3


def train(folder: Path, on_loss: Any, sleep_s: float, layers: int) -> None:
    """Trains in one process, and notes when each step was made."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jdist

    strategy = jdist.multi_worker(on_loss=on_loss, communication={"timeout_s": 5.0})

    def step(state: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            x = batch["x"]
            for i in range(layers):
                x = jnp.tanh(x @ w[i])
            return jdist.mean(jnp.sum(x**2, -1), batch["mask"])

        value, grad = jdist.value_and_grad(loss)(state)
        return state - 1e-3 * grad, {"loss": value}

    times = (folder / f"{os.getpid()}.times").open("a", buffering=1)

    def note(moment: Any) -> None:
        time.sleep(sleep_s)
        times.write(f"{moment.step} {time.time():.4f}\n")

    state = strategy.init(lambda key: jax.random.normal(key, (layers, 64, 64)) / 8, jax.random.key(0))
    rows = {"x": np.random.default_rng(0).normal(size=(96 * 100, 64)).astype(np.float32)}
    jdist.fit(
        step,
        state,
        rows,
        strategy=strategy,
        steps=int((folder / "steps").read_text()),
        global_batch=96,
        callbacks=[note],
        progress=False,
        log_to=None,
        verify="off",
    )


def read(folder: Path) -> dict[int, list[tuple[int, float]]]:
    """Reads each process's steps and times, by its process id."""
    found = {}
    for path in folder.glob("*.times"):
        lines = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 1]
        found[int(path.stem)] = [(int(step), float(at)) for step, at in lines]
    return found


def run(
    options: argparse.Namespace, *, on_loss: Literal["stop", "continue"], spares: int = 0, fault: str | None = None
) -> tuple[float, float]:
    """Runs a job; returns the seconds of a step, and of the pause after the fault."""
    import jdist

    with tempfile.TemporaryDirectory() as name:
        folder, at = Path(name), [0.0]
        (folder / "steps").write_text(str(options.steps))

        def harm() -> None:
            members: list[int] = []  # a spare has made no step
            while len(members) < PROCESSES:
                time.sleep(0.01)
                members = sorted(pid for pid, times in read(folder).items() if len(times) >= options.steps // 4)
            pid = members[0]
            at[0] = time.time()
            os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

        if fault is not None:
            threading.Thread(target=harm, daemon=True).start()
        command = [sys.executable, __file__, "--train", name, "--on-loss", on_loss, "--sleep-ms", str(options.sleep_ms)]
        launched = jdist.launch(
            [*command, "--layers", str(options.layers)],
            processes=PROCESSES,
            on_loss=on_loss,
            spares=spares,
            max_restarts=0,
            log_dir=folder / "logs",
        )
        assert launched.exit_code == 0, launched.failure
        longest, steps = 0.0, []
        for times in read(folder).values():
            ats = [each for _, each in times]
            steps += [b - a for a, b in itertools.pairwise(ats)]
            if at[0]:  # the step under way may still end; the pause is the longest gap behind the fault
                longest = max([longest, *(b - a for a, b in itertools.pairwise(ats) if b > at[0])])
        assert fault is None or longest, "the job had ended before its fault; give more --steps"
        return statistics.median(steps), longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sleep-ms", type=float, default=5.0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--train")
    parser.add_argument("--on-loss", default="continue")
    options = parser.parse_args()
    if options.train is not None:
        train(Path(options.train), options.on_loss, options.sleep_ms / 1e3, options.layers)
        return
    pauses: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        times.setdefault("continue", []).append(run(options, on_loss="continue")[0])
        for name in ("stop", "stop again"):
            times.setdefault(name, []).append(run(options, on_loss="stop")[0])
        for fault in ("kill", "stop"):
            for spares in (0, 1):
                pause = run(options, on_loss="continue", spares=spares, fault=fault)[1]
                pauses.setdefault(f"{fault}, {spares} spares", []).append(pause)
    for name, seconds in pauses.items():
        print(f"{name}: pause {statistics.median(seconds):.2f} s {json.dumps([round(s, 2) for s in sorted(seconds)])}")
    for name in ("continue", "stop again"):
        found = compare(times[name], times["stop"])
        ratio = f"{found.ratio:.3f} [{found.ratio_low:.3f}, {found.ratio_high:.3f}]"
        print(f"{name} / stop: {ratio} of {statistics.median(times['stop']) * 1e3:.2f} ms a step")


if __name__ == "__main__":
    main()
