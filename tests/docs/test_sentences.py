"""The script that measures sentences counts prose alone, and fails a page of long ones."""

import runpy
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "site" / "sentences.py"
PAGE = """# A heading of a page. With a full stop.

One sentence
of five words. And `a span that counts` as one!

```python
no.sentence()
```

| a table | is none. |
|---|---|
| a row | of it. |

- An item [with a link](of/many/words.md#here) here.
- Short.
"""


def test_what_counts_as_a_sentence():
    found = runpy.run_path(str(SCRIPT))["sentences"](PAGE)
    assert found == ["One sentence of five words.", "And code as one!", "An item with a link here."]


def test_the_pages_keep_the_bar_and_a_lower_one_fails():
    assert subprocess.run([sys.executable, SCRIPT], capture_output=True, timeout=60, check=False).returncode == 0
    low = subprocess.run(
        [sys.executable, SCRIPT, "--bar", "3"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (low.returncode, "docs/fit.md: median" in low.stdout) == (1, True), low.stdout
