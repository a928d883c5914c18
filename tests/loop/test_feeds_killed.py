"""Training on other libraries' data that is killed (SIGKILL) in the middle of an epoch, and goes on to the same parameters."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.by_default import some
from tests.children import without_devices

pytestmark = pytest.mark.xdist_group("processes")
PROGRAM = Path(__file__).with_name("feeds_in_processes.py")
NEEDS = {"huggingface": "datasets", "torch": "torchdata", "grain": "grain", "files": "numpy"}
KINDS = ("files", "grain_map", "grain_iter", "grain_part", "grain_workers", "huggingface", "torch", "torch_part")
# How many processes are killed, and how many go on.
CASES = [(kind, count, count) for kind in KINDS for count in (1, 2)]
CASES += [("torch_workers", 1, 1)]  # of two processes it takes a minute and a half
# A position in data of random access fits any number of processes; two replicas take part in both.
CASES += [(kind, *counts) for kind in ("grain_map", "huggingface") for counts in ((1, 2), (2, 1))]


@pytest.mark.parametrize(("kind", "killed", "resumed"), some(CASES, default=[("grain_part", 2, 2)]))
def test_what_was_killed_in_mid_epoch_goes_on_to_the_same_bits(kind, killed, resumed, tmp_path):
    needed = NEEDS[kind.partition("_")[0]]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed; `make test-loaders` runs this")
    replicas = max(killed, resumed)

    def run(processes: int, *step: str) -> tuple[int, list[dict[str, Any]], str]:
        command = [sys.executable, PROGRAM, tmp_path, kind, str(processes), *step]
        if replicas > 1:
            launch = ["launch", "--processes", str(processes), "--devices-per-process", str(replicas // processes)]
            log = ["--log-dir", tmp_path / f"launch_{len(step)}"]
            command = [sys.executable, "-m", "jdist", *launch, *log, "--", *command[1:]]
        with open(tmp_path / f"out_{len(step)}", "w+") as out:  # a pipe would stay open in workers
            process = subprocess.Popen(command, stdout=out, stderr=out, env=without_devices(), start_new_session=True)
            try:
                code = process.wait(timeout=200)
            finally:
                with contextlib.suppress(ProcessLookupError):  # workers outlive who started them
                    os.killpg(process.pid, signal.SIGKILL)
            out.seek(0)
            text = out.read()
        found = [json.loads(line.partition("found ")[2]) for line in text.splitlines() if "found " in line]
        return code, found, text

    code, found, out = run(killed, "9")
    assert code != 0, out
    assert not found, out
    assert "not killed" not in out
    saved = [int(path.name.split("_")[1]) for path in (tmp_path / "killed").glob("step_*")]
    assert max(saved) in (6, 8), "in the second epoch, and not in its beginning"
    code, found, out = run(resumed)
    assert code == 0, out
    assert len(found) == resumed
    for each in found:
        assert each["replicas"] == replicas
        for what in ("parameters", "losses", "rows"):
            interrupted, whole = each[what]
            assert interrupted == whole, what
        check_rows(kind, whole)


def check_rows(kind: str, steps: list[list[int]]) -> None:
    """Checks the rows of all steps, those of fillings being -1: each one came in each of three epochs."""
    rows = [row for step in steps for row in step if row >= 0]
    assert len(steps) > 12
    assert set(Counter(rows).values()) == {3}
    if kind != "grain_iter":  # which leaves rows out
        assert len(rows) == 3 * 44
