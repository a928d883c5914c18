"""`docs/site/words.py` finds each of its phrases, also over the end of a line, and none in what `make lint` gives it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs/site/words.py"
_spec = importlib.util.spec_from_file_location("words", SCRIPT)
words = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(words)

FOUND = {
    "is none": ["The value is none.", "These are none:"],
    "is no X": [
        "It is no tuple.",
        "There is no {name}.",
        "the leaves are no arrays",
        "It is no TPU.",
        "It is no `jdist serve`.",
    ],
    "anew": ["It begins anew.", "Anew it is made.", 'header["anew"]', "the field `anew`"],
    "beside": ["kept beside the state", "Beside it"],
    "likewise": ["the rows, likewise"],
    "heed": ["It heeds the mask.", "heed it", "heeded", "heeding"],
    "in vain": ["It waits in vain."],
    "in its turn": ["each in its turn"],
    "wherein": ["a place wherein"],
    "of which": [
        "two, of which one",
        "two, of\n    # which one",
        'f"two, of "\n    "which"',
        '"two, of\\n",\n  "which"',
    ],
    "whose": ["a leaf whose path"],
    "is to be": ["what is to be had", "It is not to be told.", "they are to be kept"],
    "has to be": ["It has to be cheap.", "They have to be there."],
    "by hand": ["a step by hand"],
    "as it is": ["the state as it is", "left as they are"],
}
PASSED = [
    "x is None",
    "the axes are no longer bound",
    "is no more than a name",
    "besides, whoever is here handles it",
    "is not a tuple",
]


@pytest.mark.parametrize(("text", "line"), [(text, 3) for texts in FOUND.values() for text in texts])
def test_finds_the_phrase_and_says_where(text, line, tmp_path, capsys):
    file = tmp_path / "page.md"
    file.write_text(f"A title\n\n{text}\n")
    assert words.main([str(tmp_path)]) == 1
    assert re.fullmatch(rf"{re.escape(str(file))}:{line}: '.+': .+\n", capsys.readouterr().out)


def test_has_an_example_of_each_phrase():
    assert len(FOUND) == len(words.SUGGESTIONS)
    told = [{fix for text in texts for _, _, fix in words.faults(text)} for texts in FOUND.values()]
    assert told == [{fix} for fix in words.SUGGESTIONS.values()]


@pytest.mark.parametrize("text", PASSED)
def test_passes(text):
    assert list(words.faults(text)) == []


def test_the_tree_passes():
    (paths,) = re.findall(r"docs/site/words\.py (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"jdist", "README.md", "CONTRIBUTING.md", "notebooks", "examples"} <= set(paths.split())
    result = subprocess.run([sys.executable, SCRIPT, *paths.split()], cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("", 0)
