"""Fails on phrases of translated English: `python docs/site/words.py jdist README.md` prints each with a suggestion."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

READ = {".py", ".md", ".ipynb", ".yaml", ".yml"}
# In lower or upper case, but for code's `is None`. Exceptions: "is no longer" and "is no more than".
SUGGESTIONS = {
    r"(is|are) (?-i:none)": "say it positively, or `None`",
    r"(is|are) no (?!longer\b|more than\b)[a-z{`]\w*": "is not a, or: has no, is missing, without",
    "anew": "again",
    "beside": "next to, or: as well as",
    "likewise": "also",
    "heed(s|ed|ing)?": "respect",
    "in vain": "without effect",
    "in its turn": "leave it out",
    "wherein": "where",
    "of which": "split the sentence",
    "whose": "with, or split the sentence",
    "(is|are) (not )?to be [a-z]+": "must be, must not be, or: is available",
    "(has|have) to be": "must be",
    "by hand": "hand-written, or: manually",
    "as (it is|they are)": "unchanged",
}
# Between two words: a space, or the end of a line with a comment's sign or a string's quotes around it.
GAP = r"(?:\s|\\n|[#\"',])+"
ANY = "|".join(
    rf"(?P<p{i}>(?:\b|(?<=\\n))(?:{p.replace(' ', GAP)})(?:\b|(?<=[{{`])))" for i, p in enumerate(SUGGESTIONS)
)
PATTERN = re.compile(ANY, re.IGNORECASE)


def faults(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields of each phrase its line, its words and the suggestion."""
    for found in PATTERN.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        index = int(found.lastgroup[1:])
        yield line, " ".join(re.split(GAP, found[0])), list(SUGGESTIONS.values())[index]


def files(paths: list[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (f for f in inside if f.suffix in READ and f.resolve() != Path(__file__).resolve())


def main(paths: list[str]) -> int:
    found = [f"{f}:{line}: {words!r}: {fix}" for f in files(paths) for line, words, fix in faults(f.read_text())]
    print("\n".join(found), end="\n" if found else "")
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
