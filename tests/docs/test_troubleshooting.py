"""docs/troubleshooting/: every message of every error of jdist has its entry, and every entry's messages are there."""

import re
from dataclasses import dataclass
from functools import cached_property

import pytest
from error_messages import ANY, PUBLIC, ROOT, line_of, sites

FOLDER = ROOT / "docs" / "troubleshooting"
SITES = list(sites())


@dataclass(frozen=True)
class Line:
    """A line of an entry: the class of an error and how its message begins, `…` for what varies."""

    entry: str
    text: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(".*".join(map(re.escape, self.text.split(ANY))), re.DOTALL)

    @property
    def error(self) -> str:
        return self.text.partition(":")[0]

    @property
    def says(self) -> int:
        """How much of a message it fixes: of two lines that match, the one that says more counts."""
        return len(self.text.replace(ANY, ""))


LINES = [
    Line(f"{path.name}: {title}", text)
    for path in sorted(FOLDER.glob("*.md"))
    for title, block in re.findall(r"^## (.+?)\n\n```text\n(.*?)```", path.read_text(), re.DOTALL | re.MULTILINE)
    for text in block.splitlines()
]
OF_ERROR = {line.error: [each for each in LINES if each.error == line.error] for line in LINES}
# A message that only hands on the text of another error has that one's entry.
MESSAGES = [
    (f"jdist/{site.file}:{site.line}", f"{site.error}: {message}")
    for site in SITES
    for message in site.messages
    if re.search(r"\w", message)
]


def found(message: str) -> list[Line]:
    """The lines that match best."""
    matching = [line for line in OF_ERROR.get(message.partition(":")[0], []) if line.pattern.fullmatch(message)]
    most = max((line.says for line in matching), default=0)
    return [line for line in matching if line.says == most]


FOUND = {message: found(message) for _, message in MESSAGES}


def test_every_message_has_one_entry():
    assert len(MESSAGES) > 600
    wrong = [
        f"{where}: {'two entries have' if FOUND[message] else 'an entry needs'} the line\n  {line_of(message)}"
        for where, message in MESSAGES
        if len({line.entry for line in FOUND[message]}) != 1
    ]
    assert not wrong, "\n".join(wrong)


def test_every_line_of_an_entry_is_a_message_that_there_is():
    used = {line for lines in FOUND.values() for line in lines}
    assert not [f"{line.entry}: {line.text}" for line in LINES if line not in used]


def test_a_line_says_more_than_a_class():
    # What a peer sent, and what was wrong with it, is for who sends: one entry for all.
    assert [line.text for line in LINES if len(line.text.partition(": ")[2].replace(ANY, "").strip(" .:")) < 6] == [
        "WireError: …"
    ]


def test_every_error_has_an_entry():
    assert PUBLIC - set(OF_ERROR) <= {"JDistError"}  # the root is never raised


@pytest.mark.parametrize(
    ("message", "entry"),
    [
        ("StepError: `accumulate` is 0; it must be an integer of at least 1.", "step.md: An option or a role"),
        ("ConfigError: train.stesp: no such key (a.yaml:3). Did you mean train.steps?", "config.md: A key is unknown"),
        ("WireError: no shard", "parameter_server.md: Bytes"),
        ("StepError: something that nobody says", ""),
    ],
)
def test_a_message_leads_to_its_entry(message, entry):
    assert [line.entry[: len(entry)] for line in found(message)][:1] == ([entry] if entry else [])


def test_every_entry_says_more_than_its_messages():
    for path in sorted(FOLDER.glob("*.md")):
        for title, text in re.findall(
            r"^## (.+?)\n\n```text\n.*?```\n\n(.*?)(?=^## |\Z)", path.read_text(), re.DOTALL | re.MULTILINE
        ):
            assert len(text.split()) > 8, f"{path.name}: {title}"
