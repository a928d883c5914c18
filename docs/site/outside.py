"""A link out of docs/ leads to the file where the repository is shown; in the site the file comes along, under `outside/`."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
OUTSIDE = "outside/"
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")


def _target(page: str, link: str) -> str:
    """Where a link of a page of the site leads in the repository."""
    source = page.removeprefix(OUTSIDE) if page.startswith(OUTSIDE) else f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _is_outside(path: str) -> bool:
    return not path.startswith("docs/") and (ROOT / path).is_file()


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    pages = list(files.documentation_pages())
    while pages:
        page = pages.pop()
        for link in LINK.findall(page.content_string):
            path = _target(page.src_uri, link)
            if _is_outside(path) and not files.get_file_from_path(OUTSIDE + path):
                content = (ROOT / path).read_bytes()
                file = File.generated(config, OUTSIDE + path, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
                files.append(file)
                if path.endswith(".md"):
                    pages.append(file)  # its links lead on
    return files


def on_page_markdown(markdown: str, *, page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri

    def inside(match: re.Match[str]) -> str:
        path = _target(here, match[1])
        if not _is_outside(path) and not here.startswith(OUTSIDE):
            return match[1]
        place = OUTSIDE + path if _is_outside(path) else path.removeprefix("docs/")
        return posixpath.relpath(place, posixpath.dirname(here) or ".")

    return LINK.sub(inside, markdown)
