"""The examples of docs/weights.md give what it says."""

import doctest
import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "weights.md"


def test_the_examples_of_the_guide_give_what_it_shows():
    text = GUIDE.read_text()
    blocks = re.findall(r"^```pycon\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == text.count("```") // 2, "every block is an example that runs"
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "docs/weights.md", None, 0)
    failures: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert (result.failed, "".join(failures)) == (0, "")
    assert result.attempted > 20
