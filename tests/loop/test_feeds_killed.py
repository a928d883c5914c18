"""Training on other libraries' data that is killed (SIGKILL) in the middle of an epoch, and goes on to the same parameters."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.by_default import some
from tests.children import without_devices

pytestmark = pytest.mark.xdist_group("processes")
PROGRAM = Path(__file__).with_name("feeds_in_processes.py")
NEEDS = {"huggingface": "datasets", "torch": "torchdata", "grain": "grain", "files": "numpy"}
CASES = [
    (kind, processes)
    for kind in ("files", "grain_map", "grain_iter", "grain_part", "huggingface", "torch")
    for processes in (1, 2)
]


@pytest.mark.parametrize(("kind", "processes"), some(CASES, default=[("grain_part", 2)]))
def test_what_was_killed_in_mid_epoch_goes_on_to_the_same_bits(kind, processes, tmp_path):
    needed = NEEDS[kind.partition("_")[0]]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed; `make test-loaders` runs this")

    def run(*step: str) -> tuple[int, list[dict[str, Any]], str]:
        command = [sys.executable, PROGRAM, tmp_path, kind, str(processes), *step]
        if processes > 1:
            launch = ["launch", "--processes", str(processes), "--devices-per-process", "1"]
            log = ["--log-dir", tmp_path / f"launch_{len(step)}"]
            command = [sys.executable, "-m", "jdist", *launch, *log, "--", *command[1:]]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=without_devices())
        out = ended.stdout + ended.stderr
        found = [json.loads(line.partition("found ")[2]) for line in ended.stdout.splitlines() if "found " in line]
        return ended.returncode, found, out

    code, found, out = run("9")
    assert code != 0, out
    assert not found, out
    assert "not killed" not in out
    saved = [int(path.name.split("_")[1]) for path in (tmp_path / "killed").glob("step_*")]
    assert max(saved) in (6, 8), "in the second epoch, and not in its beginning"
    code, found, out = run()
    assert code == 0, out
    assert len(found) == processes
    assert all(each["same"] for each in found), found
    assert found[0]["steps"] > 12
