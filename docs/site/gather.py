"""Gathers what the site is built from, in build/docs: the pages, and the files elsewhere in the repository that they link to.

`<!-- config keys -->` becomes a table of the keys of configs, and `<!-- file PATH -->` the text of a file.

A link out of docs/ leads to the file where the repository is shown; in the site that file comes along, under `outside/`. Exits
with a message if a page of docs/ is not in the navigation of mkdocs.yml.
"""

import dataclasses
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/docs"
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
KEYS, INCLUDED = "<!-- config keys -->", re.compile(r"<!-- file (\S+) -->")
NAV_ENTRY = re.compile(r"([\w/]+\.md)$", re.MULTILINE)


def is_outside(path: str) -> bool:
    return not path.startswith("docs/") and (ROOT / path).is_file()


def place_of(path: str) -> str:
    """Returns where a file of the repository is in the site."""
    return f"outside/{path}" if is_outside(path) else path.removeprefix("docs/")


def config_keys() -> str:
    """Writes a table of the keys of configs, from their schema."""
    from jdist import CommunicationOptions
    from jdist.experiment.config import Config

    words = {" | ": " or ", "Count": "int >= 1", "PositiveFloat": "float > 0", "None": "null"}
    words |= {"Mode": "Literal['min', 'max']", "Implementation": "str"}
    pattern = re.compile("|".join(map(re.escape, words)))

    def row(key: str, kind: str, default: str, text: str) -> str:
        kind = re.sub(r"Annotated\[(\w+|dict\[.*\]), \w+\(.*\)\]", r"\1", kind)
        default = default.replace("None", "null").replace("True", "true").replace("False", "false")
        return f"| `{key}` | `{pattern.sub(lambda match: words[match[0]], kind)}` | {default} | {text} |"

    def rows(model: Any, above: str = "", required: str = "required") -> Iterator[str]:
        for name, field in model.model_fields.items():
            kinds = (field.annotation, *get_args(field.annotation))
            sections = [each for each in kinds if hasattr(each, "model_fields")]
            default = required if field.is_required() else f"`{field.get_default(call_default_factory=True)}`"
            if not sections:
                yield row(above + name, model.__annotations__[name], default, field.description)
            for section in sections:
                yield from rows(
                    section, f"{above}{name}.", "required with its section" if type(None) in kinds else required
                )

    options = (
        row(f"strategy.communication.{each.name}", str(each.type), f"`{each.default}`", "See `CommunicationOptions`.")
        for each in dataclasses.fields(CommunicationOptions)
    )
    return "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows(Config), *options])


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

    text = LINK.sub(in_site, (ROOT / path).read_text("utf-8"))
    text = INCLUDED.sub(
        lambda match: f"```{Path(match[1]).suffix[1:]}\n{(ROOT / match[1]).read_text('utf-8').rstrip()}\n```", text
    )
    target.write_text(text.replace(KEYS, config_keys()) if KEYS in text else text, "utf-8")


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
