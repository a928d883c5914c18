"""The source of a function or class of a notebook, and the names that it takes from there. Pure."""

from __future__ import annotations

import ast
import inspect
import symtable
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType


class NoSource(Exception):
    """Why the source cannot be had, as the end of a sentence that begins with the name."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A definition by itself.

    Attributes:
        text: what was written, decorators included.
        at_once: names that the definition itself uses: in decorators, defaults, base classes, a class's body.
        later: names that are used when it is called.
        attributes: what is taken from names by dots, "jax.numpy.zeros".
        is_decorated: whether it has decorators.
        node: what was written, parsed.
    """

    text: str
    at_once: tuple[str, ...]
    later: tuple[str, ...]
    attributes: frozenset[str]
    is_decorated: bool
    node: ast.stmt


def source_of(definition: FunctionType | type, cells: Sequence[str]) -> Source:
    """The source of a function or a class that stands at the top of a cell or of a script.

    Args:
        definition: it, without what decorators have put round it.
        cells: the notebook's cells in the order in which they ran; none for a script.

    Raises:
        NoSource: there is none that would mean the same elsewhere.
    """
    name = definition.__name__
    if name == "<lambda>":
        raise NoSource("is a lambda; give it a name by `def`")
    if "<locals>" in definition.__qualname__:
        raise NoSource(
            f"is defined inside of another function ({definition.__qualname__}); define it at the top of a cell"
        )
    if isinstance(definition, type) and cells:
        text = _of_class(name, cells)
    else:
        try:
            text = textwrap.dedent(inspect.getsource(definition))
        except (OSError, TypeError) as exc:
            raise NoSource(
                "has no source that Python could find, as in its plain interactive shell. Write it into a module and import it "
                "(in a notebook, `%%writefile my_module.py` makes one)"
            ) from exc
    try:
        tree = ast.parse(text)
    except SyntaxError as exc:
        raise NoSource("has a source that does not stand by itself; define it at the top of a cell") from exc
    at_once: set[str] = set()
    later: set[str] = set()
    _names(symtable.symtable(text, name, "exec"), at_once, later, now=True)
    return Source(
        text=text.rstrip() + "\n",
        at_once=tuple(sorted(at_once)),
        later=tuple(sorted(later - at_once)),
        attributes=frozenset(ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
        is_decorated=any(getattr(node, "decorator_list", None) for node in tree.body),
        node=tree.body[0],
    )


def _names(table: symtable.SymbolTable, at_once: set[str], later: set[str], *, now: bool) -> None:
    """Collects the global names that a scope and those inside of it read; a class's body runs where it stands."""
    names = at_once if now else later
    names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    for inner in table.get_children():
        _names(inner, at_once, later, now=now and inner.get_type() == "class")


def _of_class(name: str, cells: Sequence[str]) -> str:
    """The newest definition of a class in cells; `inspect` looks for classes in files only."""
    for cell in reversed(cells):
        try:
            tree = ast.parse(cell)
        except SyntaxError:  # a cell that did not run
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                first = min(part.lineno for part in (node, *node.decorator_list))
                return "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
    raise NoSource("is a class of which no cell has the definition; write it at the top of one")
