"""Saves weights, and kills itself on the way, so that a test can look at what is left.

    python save_killed.py FOLDER MAX_FILE_BYTES STAGE CALL

STAGE is "before add" (of a leaf), "before rename" or "after rename" (of a file), CALL the how many-th.
"""

import os
import pathlib
import signal
import sys

import numpy as np

import jdist
from jdist.weights.save import _Writer

NAMES = ("a", "b", "c")


def weights(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(10_000, value + i, np.float32) for i, name in enumerate(NAMES)}


def main() -> None:
    folder, max_file_bytes, stage, call = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    calls = 0

    def reached(here: str) -> None:
        nonlocal calls
        calls += here == stage
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)

    add, rename = _Writer.add, pathlib.Path.rename

    def spied_add(*args):
        reached("before add")
        return add(*args)

    def spied_rename(*args):
        reached("before rename")
        result = rename(*args)
        reached("after rename")
        return result

    _Writer.add, pathlib.Path.rename = spied_add, spied_rename
    jdist.weights.save(weights(7), folder, max_file_bytes=max_file_bytes)


if __name__ == "__main__":
    main()
