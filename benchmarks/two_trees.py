"""This tree against another checkout of jdist, in turns: what a change has cost.

    python benchmarks/two_trees.py OTHER [--rounds 15] [--cases step async ...]

OTHER is a checkout, as `git worktree add --detach /tmp/before COMMIT` makes one. Every case runs in two
processes of each tree: a process keeps its own few percent for life (memory layout, where threads landed), so each pair of the
trees is printed, and those of A against A for the noise. The cases: an empty step on 1 and on 8 virtual devices, with a
call that is all overhead; a parameter server of 8 floats and of a million, asynchronous and synchronous, and with two copies;
closures that do nothing; a process that imports every public name; and checkpoints of 100 MB in 50 leaves, of 1 GB in 8
and of 10,000 leaves of 4 bytes, saved until committed, and restored.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]
CASES = {  # the script of a side, its arguments, and how many calls are a round
    "step, 1 device": ("two_trees.py", ("--side", "1"), 1000),
    "step, 8 devices": ("two_trees.py", ("--side", "8"), 300),
    "async, 8 floats": ("peers/jdist_parameter_server.py", (1, 8), 1000),
    "sync, 8 floats": ("peers/jdist_parameter_server.py", (1, 8, "mode=sync"), 300),
    "async, 1M floats": ("peers/jdist_parameter_server.py", (2, 1_000_000), 60),
    "two copies, 8 floats": ("peers/jdist_parameter_server.py", (2, 8, "ps_replicas=2"), 300),
    "closures": ("peers/jdist_parameter_server.py", (1, 0), 1000),
    "import": ("two_trees.py", ("--side", "import"), 1),
    "save, 50 leaves": ("two_trees.py", ("--side", "save", 50, 500_000), 1),
    "restore, 50 leaves": ("two_trees.py", ("--side", "restore", 50, 500_000), 1),
    "save, 1 GB": ("two_trees.py", ("--side", "save", 8, 31_250_000), 1),
    "restore, 1 GB": ("two_trees.py", ("--side", "restore", 8, 31_250_000), 1),
    "save, 10,000 leaves": ("two_trees.py", ("--side", "save", 10_000, 1), 1),
    "restore, 10,000 leaves": ("two_trees.py", ("--side", "restore", 10_000, 1), 1),
}
SIDES = {
    "here": True,
    "other": False,
    "other again": False,
    "here again": True,
}  # whether of this tree; in order of their start
PAIRS = [("here", "other"), ("here again", "other again"), ("here", "here again"), ("other", "other again")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    if not (args.other / "jdist" / "__init__.py").is_file():
        parser.error(f"{args.other} is not a checkout of jdist: it has no jdist/__init__.py")

    from mirrored import in_turns
    from pairs import compare

    args.other = args.other.resolve()
    os.chdir(HERE)  # `python -m jdist serve`, as sides start it, looks for jdist in the working directory first

    for case in args.cases:
        script, arguments, calls = CASES[case]
        with contextlib.ExitStack() as ends:
            sides = {
                name: ends.enter_context(contextlib.closing(_side(tree, script, arguments)))
                for name, tree in ((name, HERE.parent if is_here else args.other) for name, is_here in SIDES.items())
            }
            in_turns(sides, calls, 2)  # the first calls compile
            for side in sides.values():
                side.cpu.clear()
            times = in_turns(sides, calls, args.rounds)
            used = {name: side.cpu for name, side in sides.items()}
        for name, base in PAIRS:
            for clock, seconds in (("wall", times), ("CPU", used)):
                c = compare(seconds[name], seconds[base])
                print(
                    f"{case:22s} {name:10s} / {base:11s}, {clock:4s}: ratio {c.ratio:.3f} "
                    f"[{c.ratio_low:.3f}, {c.ratio_high:.3f}], {c.seconds / calls * 1e6:,.0f} us a call",
                    flush=True,
                )


class TimedSide:
    """A side that also measures the CPU seconds of its processes, which other work on the machine disturbs less."""

    def __init__(self, side: Any):
        self.side, self.cpu = side, list[float]()
        self.close = side.close

    def run(self, steps: int) -> dict:
        """Runs so many steps."""
        before = self._used()
        answer = self.side.run(steps)
        self.cpu.append(self._used() - before)
        return answer

    def _used(self) -> float:
        main = psutil.Process(self.side.process.pid)
        times = [process.cpu_times() for process in (main, *main.children(recursive=True))]
        # ended children count with the process that waited for them
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def _side(tree: Path, script: str, arguments: tuple[object, ...]) -> TimedSide:
    from mirrored import Side

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tree.resolve())
    try:
        return TimedSide(Side(sys.executable, str(HERE / script), *arguments))
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def side(what: str, *sizes: str) -> None:
    """One side: a number of devices, "import", or "save" or "restore" with numbers of leaves and of floats in each."""
    from side import serve

    if what == "import":
        names = "import jdist\nfor name in jdist.__all__:\n    if name != 'nnx': getattr(jdist, name)"

        def run(calls: int) -> float:
            for _ in range(calls):
                subprocess.run([sys.executable, "-c", names], check=True)
            return 0.0

        return serve({"tree": os.environ["PYTHONPATH"]}, run)
    if sizes:
        return _checkpoint_side(what, *map(int, sizes))
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={what}"}
    import jax
    import jax.numpy as jnp

    import jdist

    strategy = jdist.mirrored()
    batch = jax.device_put({"x": jnp.zeros((8, 1))}, strategy.batch_sharding)
    step: Callable = jdist.distribute(lambda state, batch: (state, {"loss": jnp.float32(0)}), strategy)
    box = [strategy.init(lambda: {"w": jnp.ones(4)})]

    def call(calls: int) -> float:
        state = box[0]
        for i in range(calls):
            state, metrics = step(state, batch)
            if i % 8 == 7:  # the bound that every program on CPU devices needs
                jax.block_until_ready(metrics)
        box[0] = state
        return float(metrics["loss"])

    serve({"tree": jdist.__file__}, call)


def _checkpoint_side(what: str, num_leaves: int, num_floats: int) -> None:
    from side import serve

    os.environ["JAX_PLATFORMS"] = "cpu"
    import numpy as np

    from jdist.train import Checkpointer

    # NumPy's, so that a restore reads and does not place; random, as weights are.
    rng = np.random.default_rng(0)
    state = {str(i): rng.standard_normal(num_floats, np.float32) for i in range(num_leaves)}
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, keep=1) as checkpoints:

        def run(calls: int) -> float:
            for _ in range(calls):
                if what == "save":
                    checkpoints.save(0, state, wait=True)
                else:
                    checkpoints.restore(state)
            return 0.0

        checkpoints.save(0, state, wait=True)
        serve({"files": str(sum(path.is_file() for path in Path(folder).rglob("*")))}, run)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        side(*sys.argv[2:])
    else:
        main()
