"""The two programs of docs/from_jit.md, before and after its diff, print the same loss on one device and on eight."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/from_jit.md").read_text()
((DIFF,),) = [re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)]


def program(sign: str) -> str:
    return "\n".join(line[1:] for line in DIFF.splitlines() if line[:1] in ("", " ", sign))


def printed(sign: str, devices: int, folder: Path) -> str:
    (script := folder / "train.py").write_text(program(sign))
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("devices", [1, 8])
def test_both_programs_print_the_same_loss(devices: int, tmp_path: Path):
    before = printed("-", devices, tmp_path)
    assert re.fullmatch(r"loss 0\.\d{4}\n", before)
    assert printed("+", devices, tmp_path) == before


def test_the_page_stays_short():
    assert len(PAGE.split()) <= 600
