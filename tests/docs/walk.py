"""Walks a page as its reader does: saves its files, gives its commands in one shell, and compares what they print.

    python tests/docs/walk.py [--page docs/tasks.md] [--install] [--until HEADING]

In an empty folder, with the `jdist` of this Python; `--install` begins with the page's own installation, in this folder.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of the page: a file to save, commands to give, or (`text`) what they print."""

    kind: str
    title: str
    body: str


def blocks(page: str, until: str | None = None) -> list[Block]:
    """The page's blocks in order, those before a heading."""
    before = page if until is None else page[: page.index(f"\n## {until}\n")]
    return [Block(*found) for found in BLOCK.findall(before)]


def script(page: list[Block], *, install: bool) -> str:
    """One shell script of all blocks, which says after each block of commands that it is through."""
    lines = ["set -eo pipefail"]
    for block in page:
        if block.kind == "sh" and (install or block.title != "install"):
            lines += [block.body, "echo '--- done'"]
        elif block.kind != "text" and block.title not in ("", "install"):
            lines += [f"cat > {block.title} <<'--- end of file'", block.body + "--- end of file"]
    return "\n".join(lines)


def expected(page: list[Block], *, install: bool) -> list[str]:
    """What each block of commands prints; empty where the page does not show it."""
    shown = []
    for block, after in zip(page, [*page[1:], None], strict=True):
        if block.kind == "sh" and (install or block.title != "install"):
            shown.append(after.body if after is not None and after.kind == "text" else "")
    return shown


def agrees(said: str, shown: str) -> bool:
    """Whether a command printed what the page shows, `…` standing for anything."""
    pattern = r".*".join(re.escape(part) for part in shown.strip().split("…"))
    return not shown or re.search(pattern, said, re.DOTALL) is not None


def walk(folder: Path, *, guide: Path = TUTORIAL, until: str | None = None, install: bool = False) -> list[str]:
    """Walks the page in a folder.

    Returns:
        What went wrong, a text for each block of commands that printed something else; nothing if all is well.

    Raises:
        RuntimeError: a command failed.
    """
    page = blocks(guide.read_text(), until)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", script(page, install=install)],
        cwd=folder,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"a command of {guide.name} ended with exit code {ended.returncode}:\n{ended.stdout}")
    printed = ended.stdout.split("--- done\n")
    pairs = zip(printed, expected(page, install=install), strict=False)
    return [
        f"{guide.name} shows\n{shown}\nand its commands print\n{said}"
        for said, shown in pairs
        if not agrees(said, shown)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", action="store_true", help="begin with the page's installation")
    parser.add_argument("--page", type=Path, default=TUTORIAL)
    parser.add_argument("--until", help="the heading to stop before")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        folder = Path.cwd() if arguments.install else Path(empty)
        wrong = walk(folder, guide=arguments.page, until=arguments.until, install=arguments.install)
    print("\n".join(wrong) or f"{arguments.page.name} does what it says")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
