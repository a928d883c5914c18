"""Runs save_forever.py in a process of its own and kills it, at a stage of a save or at random moments."""

import random
import subprocess
import sys
from pathlib import Path

from tests.children import without_devices

SCRIPT = Path(__file__).with_name("save_forever.py")


def child(**env):
    """The environment of a process that saves."""
    return {**without_devices(), "PYTHONPATH": str(SCRIPT.parents[2]), "JAX_PLATFORMS": "cpu", **env}


def start(*arguments, **env):
    line = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=child(**env))


def last_saved(text, before=0):
    return max([before, *(int(line.split()[1]) for line in text.splitlines() if line.startswith("saved"))])


def kill_at(stage, call, place, committed, **env):
    """Saves until it is killed at a stage; returns the last step that was announced."""
    with start(place, stage, call, **env) as process:
        try:
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()  # else leaving the block waits for a child that outlived the timeout
    assert process.returncode == -9, said
    return last_saved(said, committed)


def kill_at_random(place, check, **env):
    """Saves and is killed four times; `check` is given the last step that was announced, and returns the newest."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # shown if the test fails; the moment within a stage is the scheduler's
    rng, committed = random.Random(seed), 0
    for _ in range(4):
        said = ""
        with start(place, **env) as process:
            for line in process.stdout:
                said += line
                if last_saved(said) and rng.random() < 0.1:
                    process.kill()
        assert process.returncode == -9, said
        committed = check(last_saved(said, committed))
