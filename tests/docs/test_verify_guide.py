"""The examples of docs/verify.md give what it says."""

import doctest
import re
from pathlib import Path

GUIDE = (Path(__file__).parent.parent.parent / "docs" / "verify.md").read_text()


def test_the_examples_of_the_guide_give_what_it_shows():
    blocks = re.findall(r"^```pycon\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "docs/verify.md", None, 0)
    failures: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert (result.failed, "".join(failures)) == (0, "")
    assert result.attempted > 12
