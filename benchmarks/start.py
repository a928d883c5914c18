"""What jdist costs before it does anything: importing it, and `jdist --help`.

    python benchmarks/start.py [--rounds 15]

Each is a process of its own, timed from its start to its end; all take turns, and one side runs twice (the noise of A
against A). Targets: importing jdist takes at most 1.15 times importing jax, flax and optax, with every public name
touched; `jdist --help` at most 3 times `python -c pass` and 0.3 s. `jdist.nnx` stands on flax.nnx, which `import flax` leaves
out, so it is compared with flax.nnx.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable

from pairs import alternate, compare

_LIBRARIES = "import jax, flax.linen, optax"
_NAMES = "import jdist\nfor name in jdist.__all__:\n    if name != 'nnx': getattr(jdist, name)"
_PROGRAMS = {
    "libraries": ["-c", _LIBRARIES],
    "libraries again": ["-c", _LIBRARIES],
    "import jdist": ["-c", "import jdist"],
    "jdist, a script's names": ["-c", "import jdist; jdist.mirrored, jdist.distribute, jdist.TrainState, jdist.data"],
    "jdist, every public name": ["-c", f"{_LIBRARIES}\n{_NAMES}"],
    "libraries, flax.nnx": ["-c", f"{_LIBRARIES}, flax.nnx"],
    "the same and jdist.nnx": ["-c", f"{_LIBRARIES}, flax.nnx\n{_NAMES}\njdist.nnx"],
    "pass": ["-c", "pass"],
    "jdist --help": ["-m", "jdist", "--help"],
}
_PAIRS = (
    ("libraries again", "libraries"),
    ("import jdist", "libraries"),
    ("jdist, a script's names", "libraries"),
    ("jdist, every public name", "libraries"),
    ("the same and jdist.nnx", "libraries, flax.nnx"),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    times = alternate({name: _process(arguments) for name, arguments in _PROGRAMS.items()}, parser.parse_args().rounds)
    for measured, reference in _PAIRS:
        c = compare(times[measured], times[reference])
        print(
            f"{measured:24s} / {reference:19s}: ratio {c.ratio:.3f} [{c.ratio_low:.3f}, {c.ratio_high:.3f}], "
            f"{c.seconds:.2f} s"
        )
    allowed = 3 * statistics.median(times["pass"]) + 0.3
    taken = statistics.median(times["jdist --help"])
    print(f"jdist --help: {taken:.3f} s; 3 x `python -c pass` + 0.3 s are {allowed:.3f} s")


def _process(arguments: list[str]) -> Callable[[], None]:
    def run() -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    return run


if __name__ == "__main__":
    main()
