"""The README's decorator example runs as it stands, and its two commands exist."""

import re
from pathlib import Path

import jax

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_decorator_example_runs_on_all_devices(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)  # the repository's own text
    assert names["strategy"].num_replicas == jax.local_device_count()
    assert float(names["metrics"]["loss"]) < 0.5
    assert int(names["state"].step) == 20 * 16


def test_the_first_two_commands_are_targets_of_the_makefile():
    commands = re.findall(r"^make (\w+)", README, re.MULTILINE)
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert commands[:2] == ["run", "test"]
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in commands)
