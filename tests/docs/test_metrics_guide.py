"""The examples of docs/metrics.md give what it says."""

import doctest
import re
from pathlib import Path

import jdist

GUIDE = (Path(__file__).parent.parent.parent / "docs" / "metrics.md").read_text()


def test_the_examples_of_the_guide_give_what_it_shows():
    blocks = re.findall(r"^```pycon\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == GUIDE.count("```") // 2, "every block is an example that runs"
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "docs/metrics.md", None, 0)
    failures: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert (result.failed, "".join(failures)) == (0, "")
    assert result.attempted > 20


def test_every_metric_is_in_its_table():
    makers = {name for name in vars(jdist.metrics) if callable(getattr(jdist.metrics, name))} - {"Metric", "of_sums"}
    rows = "\n".join(re.findall(r"^\| `.*", GUIDE, re.MULTILINE))
    assert {"mean", "auc", "f1"} <= makers
    assert {name for name in makers if not re.search(rf"`{name}[`(]", rows)} == set()
