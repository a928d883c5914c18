"""docs/steps.md: its examples give what it says, and every option and role of `jdist.distribute` is in its tables."""

import dataclasses
import doctest
import re
from pathlib import Path
from typing import get_args

from jdist.step.options import ArgRole, ReturnRole, StepOptions

GUIDE = (Path(__file__).parents[2] / "docs" / "steps.md").read_text()
ROWS = "\n".join(re.findall(r"^\| `.*", GUIDE, re.MULTILINE))


def test_the_examples_give_what_the_guide_says():
    blocks = re.findall(r"^```pycon\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "docs/steps.md", None, 0)
    failures: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert (result.failed, "".join(failures)) == (0, "")
    assert result.attempted > 10


def test_the_steps_written_as_programs_compile():
    for block in re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE):
        compile(block, "docs/steps.md", "exec")


def test_every_option_and_role_is_in_a_table():
    options = {field.name for field in dataclasses.fields(StepOptions)}
    assert {name for name in options if not re.search(rf"`{name}[`=]", ROWS)} == set()
    assert {role for role in (*get_args(ArgRole), *get_args(ReturnRole)) if f'`"{role}"`' not in ROWS} == set()
