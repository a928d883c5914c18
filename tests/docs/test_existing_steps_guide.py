"""The examples of the guide to steps that people have give what it says."""

import doctest
import re
from pathlib import Path

GUIDE = Path(__file__).parent.parent.parent / "docs" / "existing_steps.md"


def test_the_examples_give_what_the_guide_says():
    guide = GUIDE.read_text()
    blocks = re.findall(r"^```pycon\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    assert len(blocks) == guide.count("```") // 2, "every block is an example that runs"
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, str(GUIDE), None, 0)
    failures: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert (result.failed, "".join(failures)) == (0, "")
    assert result.attempted > 10
