"""Writes the repository's public address to wherever it belongs, once it has one.

    python docs/site/set_address.py https://github.com/OWNER/jdist

The README's links become absolute, as a package index shows them; the package gets its URLs, CITATION.cff and the site the
repository; each notebook a badge that opens it in Colab, and a first cell that installs jdist from there. Commit the result.
Exits with a message if the address is not GitHub's (Colab opens notebooks from there), or another one is there already.
"""

import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "notebooks"))
from store_outputs import DIGEST, digest  # noqa: E402  a script, of no package

GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(\.git|/)?")
LINK = re.compile(r"(!?)\[([^][]*)\]\((?!\w+:|#)([^)\s]+)\)")
FIRST_COMMENT = re.compile(r"\A(#.*\n)+")
CLONE = 'SOURCE = Path("..").resolve().as_uri()'  # in the notebooks


def replace(path: str, old: str, new: str, root: Path) -> None:
    """Replaces the one place of a file that says so."""
    text = (root / path).read_text("utf-8")
    if text.count(old) != 1:
        sys.exit(
            f"{path}: has {old!r} {text.count(old)} times, not once; undo what was written with git, and mend this script."
        )
    (root / path).write_text(text.replace(old, new), "utf-8")


def absolute(text: str, address: str) -> str:
    """Makes the links of a page at the top of the repository absolute."""

    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        return f"{picture}[{words}]({address}/{'raw' if picture else 'blob'}/main/{target})"

    return LINK.sub(link, text)


def main(address: str, root: Path = ROOT) -> None:
    if (match := GITHUB.fullmatch(address)) is None:
        sys.exit(f"{address}: not an address such as https://github.com/OWNER/jdist.")
    if "[project.urls]" in (root / "pyproject.toml").read_text("utf-8"):
        sys.exit("pyproject.toml has [project.urls]: an address is set already. Replace that one in all files.")
    repository = match[1]
    address = f"https://github.com/{repository}"
    urls = {
        "Source": "",
        "Documentation": "/blob/main/docs/index.md",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    lines = [f'{name} = "{address}{place}"' for name, place in urls.items()]
    scripts = "[project.scripts]\n"
    replace("pyproject.toml", scripts, "\n".join(["[project.urls]", *lines, "", scripts]), root)
    replace("CITATION.cff", "license: ", f"repository-code: {address}\nlicense: ", root)
    replace("mkdocs.yml", "site_name: jdist\n", f"site_name: jdist\nrepo_url: {address}\n", root)
    replace("README.md", "jdist @ git+URL", f"jdist @ git+{address}", root)
    readme = root / "README.md"
    readme.write_text(absolute(readme.read_text("utf-8"), address), "utf-8")
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        badge = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        opens = f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{path.name}"
        notebook.cells[0].source = f"{badge}({opens})\n\n{notebook.cells[0].source}"
        install = notebook.cells[1]
        if CLONE not in install.source:
            sys.exit(f"{path.name}: its first code cell lacks {CLONE!r}.")
        install.source = install.source.replace(CLONE, f'SOURCE = "git+{address}"')
        install.source = FIRST_COMMENT.sub(
            "# Where jdist is not installed yet, this installs it from SOURCE.\n", install.source
        )
        notebook.metadata[DIGEST] = digest(notebook)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
