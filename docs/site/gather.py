"""Gathers what the site is built from, in build/docs: the pages, and the files elsewhere in the repository that they link to.

A link out of docs/ leads to the file where the repository is shown; in the site that file comes along, under `outside/`. Exits
with a message if a page of docs/ is not in the navigation of mkdocs.yml.
"""

import posixpath
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/docs"
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
NAV_ENTRY = re.compile(r"([\w/]+\.md)$", re.MULTILINE)


def is_outside(path: str) -> bool:
    return not path.startswith("docs/") and (ROOT / path).is_file()


def place_of(path: str) -> str:
    """Returns where a file of the repository is in the site."""
    return f"outside/{path}" if is_outside(path) else path.removeprefix("docs/")


def gathered(path: str, copied: set[str]) -> None:
    """Copies a file, a page with its links rewritten, and the files outside of docs/ that it links to."""
    if path in copied:
        return
    copied.add(path)
    target = SITE / place_of(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not path.endswith(".md"):
        shutil.copyfile(ROOT / path, target)
        return

    def in_site(match: re.Match[str]) -> str:
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if not is_outside(linked) and not is_outside(path):
            return match[1]
        if is_outside(linked):
            gathered(linked, copied)
        return posixpath.relpath(place_of(linked), posixpath.dirname(place_of(path)) or ".")

    target.write_text(LINK.sub(in_site, (ROOT / path).read_text("utf-8")), "utf-8")


def main() -> None:
    shutil.rmtree(SITE, ignore_errors=True)
    copied: set[str] = set()
    for file in sorted((ROOT / "docs").rglob("*")):
        if file.is_file() and file.suffix not in (".py", ".pyc"):
            gathered(file.relative_to(ROOT).as_posix(), copied)
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    pages = {path.removeprefix("docs/") for path in copied if path.startswith("docs/") and path.endswith(".md")}
    if missing := sorted(pages - set(NAV_ENTRY.findall(nav))):
        sys.exit(f"not in the navigation of mkdocs.yml: {', '.join(missing)}")


if __name__ == "__main__":
    main()
