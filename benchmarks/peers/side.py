"""One side of a comparison: a process that runs a round of steps whenever it reads a line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable


def serve(versions: dict[str, str], run: Callable[[int], float]) -> None:
    """Answers `rounds` lines, each a number of steps, with the seconds that they took.

    Args:
        versions: printed once, when the side is warm.
        run: runs so many steps, waits for them, and returns the last loss.
    """
    run(3)
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        loss = run(int(line))
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), flush=True)
