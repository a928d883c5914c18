"""The examples of the guides give what they say, and their tables are whole."""

import doctest
import re
from pathlib import Path

import pytest

import jdist

DOCS = Path(__file__).parent.parent.parent / "docs"
# Table rows that name what a module has, and what of it they leave to the text.
TABLES = {
    "fit": (
        jdist.callbacks,
        {"Callback", "Moment", "Resume", "Return", "Started", "Stop", "Tracker", "TrackerWarning"},
    ),
    "metrics": (jdist.metrics, {"Metric", "of_sums"}),
}


@pytest.fixture(params=TABLES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_examples_give_what_the_guide_says(name: str):
    guide = (DOCS / f"{name}.md").read_text()
    blocks = re.findall(r"^```pycon\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    assert len(blocks) == guide.count("```") // 2, "every block is an example that runs"
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, f"docs/{name}.md", None, 0)
    failures: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert (result.failed, "".join(failures)) == (0, "")
    assert result.attempted > 10


def test_all_that_there_is_is_in_its_table(name: str):
    module, in_the_text = TABLES[name]
    makers = {each for each in vars(module) if callable(getattr(module, each))} - in_the_text
    rows = "\n".join(re.findall(r"^\| `.*", (DOCS / f"{name}.md").read_text(), re.MULTILINE))
    assert len(makers) > 5
    missing = sorted(each for each in makers if not re.search(rf"`{each}[`(]", rows))
    assert not missing, f"write a row into a table of docs/{name}.md for {', '.join(missing)}"
