"""Saves without end and says on standard output how far each save has come, so that a test can kill it anywhere.

    python save_forever.py DIRECTORY_OR_URL [STAGE CALL]

With STAGE ("before commit", "after write_pieces", ...) it kills itself there, at the CALL-th time.
"""

import itertools
import os
import signal
import sys
import warnings
from typing import Any

import jax
import numpy as np

from jdist.checkpoint import bucket, checkpointer, together
from jdist.checkpoint import folder as disk

STAGES = {"write_pieces": together, "write_manifest": disk, "commit": disk, "remove": disk}
KEEP = 2


def state_at(step: int) -> dict:
    """A state that any step of it can be told by: every byte depends on the step."""
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal((64, 64)),
        "many": [rng.integers(0, 255, 100, np.uint8) for _ in range(4)],
        "step": step,
    }


def check_committed(directory: Any, committed: int) -> int:
    """All that was committed before the kill and is still to be kept is there to the bit; returns the newest step."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kill damages nothing, so nothing may be passed over
        with checkpointer.Checkpointer(directory, keep=KEEP) as checkpoints:
            steps = checkpoints.steps()
            assert steps[-1] in (committed, committed + 1)  # the kill may fall between the commit and its announcement
            for step in steps:
                restored = checkpoints.restore(state_at(0), step=step)
                assert restored.data == {"position": step}
                assert jax.tree.structure(restored.state) == jax.tree.structure(state_at(step))
                for a, b in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state_at(step)), strict=True):
                    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
            assert checkpoints.restore(state_at(0)).step == steps[-1]
            checkpoints.claim()
    return steps[-1]


def announce(stage: str, kill_at: tuple[str, int] | None, calls: dict[str, int]) -> None:
    calls[stage] = calls.get(stage, 0) + 1
    if kill_at == (stage, calls[stage]):
        os.kill(os.getpid(), signal.SIGKILL)
    print(stage, flush=True)


def main() -> None:
    directory = sys.argv[1]
    kill_at = (sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 2 else None
    calls: dict[str, int] = {}
    for name, module in STAGES.items():
        function = getattr(module, name)

        def spied(*args, function=function, name=name):
            announce(f"before {name}", kill_at, calls)
            result = function(*args)
            announce(f"after {name}", kill_at, calls)
            return result

        setattr(module, name, spied)
    rmtree = disk.shutil.rmtree

    def half_rmtree(path, **options):
        # A folder that is half gone: its manifest is, its arrays are not.
        (path / "manifest.json").unlink(missing_ok=True)
        announce("inside rmtree", kill_at, calls)
        rmtree(path, **options)

    disk.shutil.rmtree = half_rmtree
    remove_objects, write = disk._remove_objects, bucket._Handle.write

    def half_remove(path):
        # A folder of a bucket that is half gone.
        (path / disk.MANIFEST).unlink()
        announce("inside remove", kill_at, calls)
        remove_objects(path)

    def half_write(handle, data):
        written = write(handle, data)
        announce("inside write_pieces", kill_at, calls)
        return written

    disk._remove_objects, bucket._Handle.write = half_remove, half_write
    if directory.startswith("folderstore://"):
        import tests.checkpoint.stores  # noqa: F401 - tells fsspec of it
    with checkpointer.Checkpointer(directory, keep=KEEP) as checkpoints:
        first = max(checkpoints.steps(), default=0) + 1
        for step in itertools.count(first):
            checkpoints.save(step, state_at(step), data={"position": step}, wait=True)
            print("saved", step, flush=True)


if __name__ == "__main__":
    main()
