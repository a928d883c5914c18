"""Prints the median length of the guides' sentences, in words, and names each page over the bar.

python docs/site/sentences.py [--bar 18]

A code span is one word; code blocks, tables, headings and quotes do not count.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bar", type=float, default=18.0, help="most words that a page's median sentence may have")
    args = parser.parse_args()
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lengths = {page: [len(each.split()) for each in sentences(page.read_text())] for page in pages}
    medians = {page: statistics.median(found) for page, found in lengths.items() if found}
    every = [length for found in lengths.values() for length in found]
    long = sum(length > 25 for length in every) / len(every)
    print(f"{len(every):,} sentences: median {statistics.median(every):g} words, {long:.0%} over 25")
    over = {page: median for page, median in medians.items() if median > args.bar}
    for page, median in over.items():
        print(f"{page.relative_to(ROOT)}: median {median:g} words, at most {args.bar:g} allowed: split its sentences")
    sys.exit(bool(over))


def sentences(markdown: str) -> list[str]:
    """Lists the sentences of a page's prose."""
    text = re.sub(r"^\s*(```|~~~).*?^\s*\1\s*$", "\n\n", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\s*(#|\||>|<|!!!|---).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    found = []
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s+", text, flags=re.MULTILINE):
        found += re.split(r"(?<=[.!?])\s+(?=[A-Z\"(*_]|code)", " ".join(paragraph.split()))
    return [each for each in found if len(each.split()) > 2]


if __name__ == "__main__":
    main()
