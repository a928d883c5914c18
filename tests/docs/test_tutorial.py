"""The tutorial and the strategies' pages run as they stand."""

import re
from pathlib import Path

import pytest

from tests.docs import walk

DOCS = Path(__file__).parents[2] / "docs"

EXAMPLES = [
    pytest.param(program, output, id=path.relative_to(DOCS).as_posix())
    for path in [*sorted((DOCS / "strategies").glob("*.md")), DOCS / "all_reduce.md"]
    for program, output in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", path.read_text(), re.DOTALL)
]


def test_its_first_half_runs(tmp_path):
    assert walk.walk(tmp_path, until="Let `fit` run the loop") == []


def test_a_walk_notices_what_is_not_so():
    assert walk.agrees("loss 0.25\n", "loss 0.…")
    assert not walk.agrees("loss 1.25\n", "loss 0.…")
    page = walk.blocks(
        '```sh title="install"\nmake\n```\n\n```python title="a.py"\nx\n```\n\n```sh\nls\n```\n\n```text\na.py\n```\n'
    )
    assert [block.kind for block in page] == ["sh", "python", "sh", "text"]
    assert walk.expected(page, install=False) == ["a.py\n"]
    assert "make" not in walk.script(page, install=False)


@pytest.mark.parametrize(("program", "output"), EXAMPLES)
def test_an_example_prints_what_its_page_says(program, output, capsys):
    exec(compile(program, "example", "exec"), {})  # the repository's own text
    assert capsys.readouterr().out == output


def test_each_strategy_has_a_page_with_a_drawing():
    from jdist.strategies.by_name import STRATEGIES

    pages = {path.stem: path.read_text() for path in (DOCS / "strategies").glob("*.md")}
    without = sorted(STRATEGIES.keys() - pages.keys())
    assert not without, f"write docs/strategies/NAME.md, with a drawing and an example, for {', '.join(without)}"
    assert pages.keys() - STRATEGIES.keys() == {"index"}, "a page of no strategy"
    for name in STRATEGIES:
        drawings = re.findall(r"!\[.+\]\((.+\.svg)\)", pages[name])
        assert len(drawings) == 1, f"docs/strategies/{name}.md has {len(drawings)} drawings; it must have one"
        assert (DOCS / "strategies" / drawings[0]).exists()
    # Theirs need a TPU, or start processes.
    wanted = {f"strategies/{name}.md" for name in STRATEGIES.keys() - {"tpu", "parameter_server"}} | {"all_reduce.md"}
    shown = [str(example.id) for example in EXAMPLES]
    assert sorted(shown) == sorted(wanted), "each has one example: python, and below it the text that it prints"


def test_each_strategy_is_on_the_pages_that_list_all():
    from jdist.strategies.by_name import STRATEGIES

    for path in ("docs/strategies/index.md", "mkdocs.yml"):
        text = (DOCS.parent / path).read_text()
        missing = [name for name in STRATEGIES if f"{name}.md" not in text]
        assert not missing, f"add to {path}: {', '.join(missing)}"
