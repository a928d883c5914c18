"""Fails where an internal docstring is longer than two lines, or has sections: those are for what docs/api lists."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = set(re.findall(r"^::: ([\w.]+)$", "\n".join(p.read_text() for p in (ROOT / "docs/api").glob("*.md")), re.M))
# Their members are shown as those of DistributedStep and Strategy.
LAST_NAMES = {name.rpartition(".")[2] for name in LISTED} | {"TracedStep", "ReplicaMesh"}
# Where the docstrings are the specification, a command's help, or the text of a config's schema.
EXCEPTIONS = (
    "jdist/ps/protocol/",
    "jdist/weights/axes.py",
    "jdist/jaxpr/phases.py",
    "jdist/cli/",
    "jdist/tasks/",
    "jdist/experiment/config.py",
)
SECTION = re.compile(r"^\s*(Args|Attributes|Returns|Raises):", re.MULTILINE)


def internal_docstrings(node: ast.AST, is_public: bool) -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from internal_docstrings(child, is_public)
            continue
        is_private = child.name.startswith("_") and not child.name.endswith("__")
        is_member = is_public and isinstance(node, ast.ClassDef) and not is_private
        is_listed = is_member or child.name in LAST_NAMES
        text = ast.get_docstring(child)
        if text and not is_listed:
            yield child, text
        yield from internal_docstrings(child, is_listed)


def faults() -> Iterator[str]:
    for path in sorted((ROOT / "jdist").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(EXCEPTIONS) or name.removesuffix(".py").replace("/", ".") in LISTED:
            continue
        for node, text in internal_docstrings(ast.parse(path.read_text()), False):
            prose = text.partition("\nExample:")[0].rstrip()
            if prose.count("\n") > 1 or SECTION.search(text):
                yield f"{name}:{node.lineno}: internal docstring: make it one line, or list a public object in docs/api"


if __name__ == "__main__":
    found = list(faults())
    print("\n".join(found))
    sys.exit(bool(found))
