"""A link out of docs/ leads to the file where the repository is shown; in the site the file comes along, under `outside/`."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def _path(page: str, link: str) -> str | None:
    """Where `link` of `page` leads below the repository's root, if that is out of docs/ and there."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") or not (ROOT / path).is_file() else path


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for page in files.documentation_pages():
        for link in LINK.findall(page.content_string):
            path = _path(page.src_uri, link)
            if path and not files.get_file_from_path(f"outside/{path}"):
                content = (ROOT / path).read_bytes()
                files.append(
                    File.generated(config, f"outside/{path}", content=content, inclusion=InclusionLevel.NOT_IN_NAV)
                )
    return files


def on_page_markdown(markdown: str, *, page, config: MkDocsConfig, files: Files) -> str:
    def inside(match: re.Match[str]) -> str:
        path = _path(page.file.src_uri, match[1])
        return posixpath.relpath(f"outside/{path}", posixpath.dirname(page.file.src_uri) or ".") if path else match[1]

    return LINK.sub(inside, markdown)
