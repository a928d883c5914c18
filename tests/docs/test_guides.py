"""The examples of the guides give what they say, their programs run, and their tables are whole."""

import dataclasses
import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import jdist
from jdist.experiment.load import load
from jdist.experiment.optimizer import check_optimizer, explain, fill_lengths
from jdist.experiment.validate import validate
from jdist.step.options import ArgRole, ReturnRole, StepOptions
from jdist.strategies.by_name import STRATEGIES
from jdist.tasks import Task
from tests.docs import walk

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
ELSEWHERE = {"input.md", "input_formats.md"}  # tests/docs/test_input_guide.py runs them
EXAMPLES = [name for name, text in TEXTS.items() if "```pycon" in text and name not in ELSEWHERE]
# Every block of these is an example that runs.
NOTHING_ELSE = {"existing_steps.md", "fit.md", "input_pipelines.md", "metrics.md", "weights.md"}
# Table rows that name what a module has, and what of it they leave to the text.
TABLES = {
    "fit.md": (
        jdist.callbacks,
        {"Callback", "Moment", "Resume", "Return", "Started", "Stop", "Tracker", "TrackerWarning"},
    ),
    "metrics.md": (jdist.metrics, {"Metric", "of_sums"}),
}


def run(name: str, text: str, names: dict[str, Any]) -> int:
    """Runs the examples of a page; returns how many there are."""
    blocks = re.findall(r"^```pycon\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), names, f"docs/{name}", None, 0)
    failures: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert (result.failed, "".join(failures)) == (0, "")
    assert result.attempted == len(re.findall("^>>> ", text, re.MULTILINE))
    return result.attempted


def rows(name: str) -> str:
    return "\n".join(re.findall(r"^\| `.*", TEXTS[name], re.MULTILINE))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_give_what_the_guide_says(name: str):
    assert run(name, TEXTS[name], {}) >= 3
    if name in NOTHING_ELSE:
        assert TEXTS[name].count("```pycon") == TEXTS[name].count("```") // 2


def test_ten_guides_have_examples():
    assert len(EXAMPLES) >= 10
    assert set(EXAMPLES) >= NOTHING_ELSE


@pytest.mark.parametrize("name", TABLES)
def test_all_that_there_is_is_in_its_table(name: str):
    module, in_the_text = TABLES[name]
    makers = {each for each in vars(module) if callable(getattr(module, each)) and each[0] != "_"} - in_the_text
    assert len(makers) > 5
    missing = sorted(each for each in makers if not re.search(rf"`{each}[`(]", rows(name)))
    assert not missing, f"write a row into a table of docs/{name} for {', '.join(missing)}"


def test_every_option_and_role_of_a_step_is_in_a_table():
    options, roles = (
        {field.name for field in dataclasses.fields(StepOptions)},
        (*get_args(ArgRole), *get_args(ReturnRole)),
    )
    assert {name for name in options if not re.search(rf"`{name}[`=]", rows("steps.md"))} == set()
    assert {role for role in roles if f'`"{role}"`' not in rows("steps.md")} == set()


def test_the_steps_written_as_programs_compile():
    for block in re.findall(r"^```python\n(.*?)^```", TEXTS["step_laws.md"], re.DOTALL | re.MULTILINE):
        compile(block, "docs/step_laws.md", "exec")


def test_the_config_of_a_schedule_is_taken_and_comes_to_what_it_says(tmp_path: Path):
    guide = TEXTS["learning_rate.md"]
    (section,) = re.findall(r"^```yaml\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    path = tmp_path / "config.yaml"
    path.write_text(f"name: guide\ntask: {{make: 'jdist.tasks.digits:make'}}\n{section}")
    train = validate(load(path)).train
    optimizer = fill_lengths(train.optimizer.model_dump(), steps=5000)
    assert list(check_optimizer(optimizer, global_batch=train.global_batch)) == []
    assert f"`{explain(optimizer, global_batch=train.global_batch)}`" in guide


def test_the_program_of_parameter_servers_prints_what_the_guide_says(tmp_path: Path):
    guide = TEXTS["parameter_server.md"]
    ((program, output),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", guide, re.DOTALL)
    (script := tmp_path / "train.py").write_text(program)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == output, ended.stderr


def test_the_task_of_the_guide_runs(tmp_path: Path):
    assert walk.walk(tmp_path, guide=DOCS / "tasks.md", until="Options") == []


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tasks.md", "tutorial.md"])
def test_all_of_it_runs(name: str, tmp_path: Path):
    assert walk.walk(tmp_path, guide=DOCS / name) == []


def test_the_guide_to_tasks_names_every_field_and_every_strategy():
    guide = TEXTS["tasks.md"]
    assert re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE) == list(Task.__dataclass_fields__)
    missing = [name for name in STRATEGIES if name != "default" and not re.search(rf"\b{name}\b", guide)]
    assert not missing, f"show in docs/tasks.md how the task trains under {', '.join(missing)}"
