"""docs/plan.md: its command prints what the page shows, and its options are those of the command."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "plan.md").read_text()


def jdist(command: list[str]) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "jdist", *command],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "160"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return ended.stdout


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu holds the TPU compiler")
def test_the_command_prints_what_the_page_shows():
    (command,) = re.findall(r"^jdist (plan .+)$", GUIDE, re.MULTILINE)
    (shown,) = re.findall(r"^```text\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    printed = jdist(shlex.split(command))
    # The sizes of temporaries and program, and with them the total, belong to one version of the compiler.
    varying = re.compile(r"^  (temporaries|program|total|FLOPs|bytes) .*$|[\d.]+ us|[\d.]+%", re.MULTILINE)

    def form(text: str) -> str:
        return re.sub(r" +", " ", varying.sub("~", text))

    assert form(shown) in form(printed)


def test_its_options_are_those_of_the_command():
    named = set(re.findall(r"`(--[a-z-]+)", GUIDE))
    assert named == set(re.findall(r"(--[a-z-]+)", jdist(["plan", "--help"]))) - {"--help"}
