"""The guide to parameter servers: its program runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

GUIDE = (Path(__file__).parent.parent.parent / "docs" / "parameter_server.md").read_text()


def test_the_program_prints_what_the_guide_says(tmp_path):
    ((program, output),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)
    (script := tmp_path / "train.py").write_text(program)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == output, ended.stderr


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([\w.]+)\)", GUIDE):
        assert (Path(__file__).parent.parent.parent / "docs" / link).exists()
