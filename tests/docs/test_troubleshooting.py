"""docs/troubleshooting/: the messages that users meet most, each with its reason and its remedy, and each still raised."""

import re
from dataclasses import dataclass

import pytest

from tests.docs.error_messages import ANY, PUBLIC, ROOT, messages

FOLDER = ROOT / "docs" / "troubleshooting"


@dataclass(frozen=True)
class Entry:
    """A section of a page.

    Attributes:
        name: its page and its heading.
        lines: the class of each error and how its message begins, `…` for what varies.
        text: what follows them.
    """

    name: str
    lines: tuple[str, ...]
    text: str


ENTRIES = [
    Entry(f"{path.name}: {title}", tuple(lines.splitlines()), text)
    for path in sorted(FOLDER.glob("*.md"))
    for title, lines, text in re.findall(
        r"^## (.+?)\n\n```text\n(.*?)```\n\n(.*?)(?=^## |\Z)", path.read_text(), re.DOTALL | re.MULTILINE
    )
]


def is_raised(line: str) -> bool:
    pattern = re.compile(".*".join(map(re.escape, line.split(ANY))), re.DOTALL)
    return any(pattern.fullmatch(message) for message in messages())


def test_there_are_as_many_entries_as_one_reads():
    assert 50 <= len(ENTRIES) <= 70
    assert sum(path.read_text().count("```text") for path in FOLDER.glob("*.md")) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_is_about_errors_that_are_raised(entry: Entry):
    assert entry.lines
    assert [line for line in entry.lines if not is_raised(line)] == []


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_says_why_and_what_to_do(entry: Entry):
    why, marker, remedy = entry.text.partition("**Fix")
    assert marker
    assert len(why.split()) > 6
    assert len(remedy.split()) > 6


def test_no_line_has_two_entries():
    lines = [line for entry in ENTRIES for line in entry.lines]
    assert len(set(lines)) == len(lines)


def test_every_public_error_is_named():
    named = set(re.findall(r"\b\w+Error\b", (FOLDER / "index.md").read_text()))
    assert named >= PUBLIC


@pytest.mark.parametrize(
    ("line", "raised"),
    [
        ("StepError: jdist.mean: `mask` has shape …, `per_example` has shape …; the mask's shape must be the …", True),
        ("ConfigError: …: no such key…", True),
        ("ReplicaDivergenceError: … of … leaves of the state differ between the … replicas:…", True),
        ("StepError: something that nobody says", False),
        (
            "BatchError: jdist.mean: `mask` has shape …, `per_example` has shape …; the mask's shape must be the …",
            False,
        ),
    ],
)
def test_a_line_is_found_by_its_class_and_its_words(line: str, raised: bool):
    assert is_raised(line) is raised
