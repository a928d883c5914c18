"""Saves and restores of jdist's `Checkpointer` against Orbax's `CheckpointManager`, on one CPU device.

    python benchmarks/checkpoints.py [--rounds 7] [--folder FOLDER]

jdist, jdist once more (the noise of A against A) and Orbax alternate in one process, each in a directory of its own, and
each keeps one checkpoint. "Held up" is the time of the call that saves behind the step, "async" the time until that save is
committed, "sync" a save that waits, "restore" the newest checkpoint, read back and on the device. Two floors run in the same
rounds: "copy" is a memcpy of the state into warm memory (held up / copy), "write" a plain write with fsync (sync / write).
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp
from pairs import Comparison, alternate, compare

from jdist.train import Checkpointer

STATES = {"500 MB in 50 leaves": (50, 2_500_000), "4 MB in 1,000 leaves": (1_000, 1_000)}
JDIST, AGAIN, ORBAX, COPY, WRITE = "jdist", "jdist again", "Orbax", "copy", "write"


class Jdist:
    """Saves and restores with jdist."""

    def __init__(self, folder: Path):
        self._checkpoints = Checkpointer(folder, keep=1)
        self.wait = self._checkpoints.wait

    def save(self, step: int, state: Any) -> None:
        self._checkpoints.save(step, state)

    def save_and_wait(self, step: int, state: Any) -> None:
        self._checkpoints.save(step, state, wait=True)

    def restore(self, like: Any) -> Any:
        restored = self._checkpoints.restore(like)
        assert restored is not None
        return restored.state

    def close(self) -> None:
        self._checkpoints.close()


class Orbax:
    """Saves and restores with Orbax, by a manager for each kind of save."""

    def __init__(self, folder: Path):
        options = (
            ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=each) for each in (True, False)
        )
        self._behind, self._waiting = (
            ocp.CheckpointManager(folder / name, options=each)
            for name, each in zip(("async", "sync"), options, strict=True)
        )
        self.wait = self._behind.wait_until_finished

    def save(self, step: int, state: Any) -> None:
        self._behind.save(step, args=ocp.args.StandardSave(state))

    def save_and_wait(self, step: int, state: Any) -> None:
        self._waiting.save(step, args=ocp.args.StandardSave(state))

    def restore(self, like: Any) -> Any:
        return self._waiting.restore(self._waiting.latest_step(), args=ocp.args.StandardRestore(like))

    def close(self) -> None:
        self._behind.close()
        self._waiting.close()


def shown(comparison: Comparison) -> str:
    return f"{comparison.ratio:.2f} [{comparison.ratio_low:.2f}, {comparison.ratio_high:.2f}]"


def measure(name: str, count: int, size: int, folder: Path, rounds: int) -> None:
    state = {f"leaf_{i:04d}": jax.random.uniform(jax.random.key(i), (size,)) for i in range(count)}
    jax.block_until_ready(state)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    views = {path: np.asarray(leaf) for path, leaf in state.items()}
    warm = {path: view.copy() for path, view in views.items()}
    sides = {JDIST: Jdist(folder / "a"), AGAIN: Jdist(folder / "b"), ORBAX: Orbax(folder / "c")}
    held_s = [0.0]
    steps = iter(range(1_000_000))

    def behind(side: Any) -> None:
        begun_s = time.perf_counter()
        side.save(next(steps), state)
        held_s[0] += time.perf_counter() - begun_s
        side.wait()

    def copy() -> None:
        for path, view in views.items():
            np.copyto(warm[path], view)

    def write() -> None:
        with (folder / "plain").open("wb") as file:
            for each in warm.values():
                file.write(each.data)
            file.flush()
            os.fsync(file.fileno())

    def each_side(run: Callable[[Any], Any]) -> dict[str, Callable[[], None]]:
        return {side: lambda made=made: jax.block_until_ready(run(made)) for side, made in sides.items()}

    saves = alternate(
        {**each_side(behind), COPY: copy}, rounds, clock=lambda: np.array([held_s[0], time.perf_counter()])
    )
    waits = alternate({**each_side(lambda side: side.save_and_wait(next(steps), state)), WRITE: write}, rounds)
    restores = alternate(each_side(lambda side: side.restore(like)), rounds)
    held = {side: [each[0] for each in times] for side, times in saves.items()}
    behind_s = {side: [each[1] for each in times] for side, times in saves.items()}
    for column, times in {"held up": held, "async": behind_s, "sync": waits, "restore": restores}.items():
        theirs_s = compare(times[ORBAX], times[JDIST]).seconds
        ours, noise = compare(times[JDIST], times[ORBAX]), compare(times[AGAIN], times[JDIST])
        print(
            f"{name:20s}  {column:8s} jdist {ours.seconds * 1e3:7.1f} ms, Orbax {theirs_s * 1e3:7.1f} ms: {shown(ours)}; "
            f"A/A {shown(noise)}",
            flush=True,
        )
    for floor, ours, floors in ((COPY, held[JDIST], behind_s[COPY]), (WRITE, waits[JDIST], waits[WRITE])):
        floor_s = compare(floors, ours).seconds
        print(
            f"{name:20s}  {floor:8s} {floor_s * 1e3:7.1f} ms; jdist's {shown(compare(ours, floors))} of it", flush=True
        )
    for side in sides.values():
        side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, help="where to write; by default the system's folder for temporary files"
    )
    args = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)
    for name, (count, size) in STATES.items():
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure(name, count, size, Path(folder), args.rounds)


if __name__ == "__main__":
    main()
