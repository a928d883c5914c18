"""jdist's mirrored against tf.distribute.MirroredStrategy: the same MLP, two processes that take turns.

python benchmarks/peers/mirrored.py --tensorflow-python .venv-tf/bin/python [--devices 1 2 8] [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))


class Side:
    """A process that runs steps on request."""

    def __init__(self, python: str, script: str, *arguments: object):
        command = [python, str(HERE / script), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions = self._answer()

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if line.startswith("{")), None)
        if line is None:
            raise SystemExit(f"{self.process.args} ended with exit code {self.process.wait()}")
        return json.loads(line)

    def run(self, steps: int) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=60)
        finally:
            self.process.kill()  # one that hangs


def in_turns(sides: dict[str, Side], steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every side's rounds of so many steps; each round begins with another side, each second one goes backwards."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for i in range(rounds):
        first = i // 2 % len(names)
        for name in (names[first:] + names[:first])[:: 1 if i % 2 else -1]:
            times[name].append(sides[name].run(steps)["seconds"])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow-python", required=True, help="Python of an environment with tensorflow-cpu")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    args = parser.parse_args()

    from pairs import compare

    for n in args.devices:
        ours, again = (Side(sys.executable, "jdist_side.py", n) for _ in range(2))
        theirs = Side(args.tensorflow_python, "tf_side.py", n)
        if n == args.devices[0]:
            print(f"{platform.machine()}, {ours.versions | theirs.versions}", flush=True)
        times: dict[str, list[float]] = {"jdist": [], "jdist again": [], "tf.distribute": []}
        sides = {"jdist": ours, "jdist again": again, "tf.distribute": theirs}
        for _ in range(args.rounds):
            for name, side in sides.items():
                times[name].append(side.run(args.steps)["seconds"])
        for side in sides.values():
            side.close()
        for name in ("jdist", "jdist again"):
            base = "tf.distribute" if name == "jdist" else "jdist"
            c = compare(times[name], times[base])
            print(
                f"{n} device(s): {name} / {base}: ratio {c.ratio:.3f} [{c.ratio_low:.3f}, {c.ratio_high:.3f}], "
                f"{c.seconds / args.steps * 1e3:.2f} ms a step",
                flush=True,
            )


if __name__ == "__main__":
    main()
