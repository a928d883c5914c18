"""The README's example runs, its diff and the front page's are those of a real program, its commands exist, it is short."""

import re
import textwrap
from pathlib import Path

import jax
import pytest

from tests.existing_steps.test_existing_steps import source

TESTS = Path(__file__).parent
README = (TESTS.parent / "README.md").read_text()
FRONT_PAGE = (TESTS.parent / "docs/index.md").read_text()


def test_the_decorator_example_runs_on_all_devices(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)  # the repository's own text
    assert names["strategy"].num_replicas == jax.local_device_count()
    assert names["history"].epochs[-1]["loss"] < 0.5
    assert int(names["state"].step) == 20 * 16


def test_the_first_two_commands_are_targets_of_the_makefile():
    commands = re.findall(r"^make (\w+)", README, re.MULTILINE)
    makefile = (TESTS.parent / "Makefile").read_text()
    assert commands[:2] == ["run", "test"]
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in commands)


@pytest.mark.parametrize("page", [README, FRONT_PAGE], ids=["README.md", "docs/index.md"])
def test_the_diff_is_that_of_a_program_before_and_after(page):
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    for when, sign in (("before", "-"), ("after", "+")):
        lines = [line[1:] for line in diff.splitlines() if line[:1] in (" ", sign, "")]
        program = textwrap.indent(textwrap.dedent("\n".join(lines)), "    ")
        assert program in source("flax_train_state", when)
    assert sum(line.startswith("-") for line in diff.splitlines()) == 3


def test_it_is_read_in_one_go():
    assert len(README.splitlines()) <= 110
    assert len(README.split()) <= 900
