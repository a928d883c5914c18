"""The page about tasks runs as it stands."""

import re

import pytest

from jdist.strategies.by_name import STRATEGIES
from jdist.tasks import Task
from tests.docs import walk
from tests.docs.walk import TUTORIAL

GUIDE = TUTORIAL.with_name("tasks.md")


def test_its_task_runs(tmp_path):
    assert walk.walk(tmp_path, guide=GUIDE, until="What `make` is") == []


@pytest.mark.soak
def test_all_of_it_runs(tmp_path):
    assert walk.walk(tmp_path, guide=GUIDE) == []


def test_it_names_every_field_and_every_strategy():
    text = GUIDE.read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(Task.__dataclass_fields__)
    missing = [name for name in STRATEGIES if name != "default" and not re.search(rf"\b{name}\b", text)]
    assert not missing, f"show in docs/tasks.md how the task trains under {', '.join(missing)}"
