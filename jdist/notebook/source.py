"""The source of a notebook's function or class, the names that it uses, and the values in which it differs by now.

The source is run again elsewhere. There `def f(rate=RATE)` has what RATE is now, and here what it was; and a later cell may
have set a class's attribute. Such defaults and attributes are restored if they are plain data; if they are not, and are
seen to differ, they are refused.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import symtable
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from jdist.notebook import values

# {"defaults": {method's name, "" for a function's own: {parameter: value}},
#  "attributes": {name: value}}
Changes = dict[str, dict[str, Any]]
_UNKNOWN = object()  # the value of an expression that would have to be run


class NoSource(Exception):
    """The source cannot be used; the message is the predicate to the definition's name."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of one definition."""

    text: str  # the source, decorators included
    # names that the definition itself uses, in decorators, defaults, base classes, a class's body
    at_once: tuple[str, ...]
    later: tuple[str, ...]  # names that a call uses
    attributes: frozenset[str]  # dotted names, "jax.numpy.zeros"
    is_decorated: bool
    node: ast.stmt  # the source, parsed


def source_of(definition: FunctionType | type, cells: Sequence[str]) -> Source:
    """Finds the source of a function or class at the top of a cell or of a script."""
    # `definition` comes without its decorators' wrappers. `cells` are in the order in which they
    # ran; a script has none.
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
    """Collects the global names that a scope and its inner scopes read; a class's body runs where it stands."""
    names = at_once if now else later
    names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    for inner in table.get_children():
        _names(inner, at_once, later, now=now and inner.get_type() == "class")


def _of_class(name: str, cells: Sequence[str]) -> str:
    """Finds the newest definition of a class in cells, as `inspect` looks for classes only in files."""
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


def changes(definition: FunctionType | type, node: ast.stmt, namespace: Mapping[str, object]) -> Changes:
    """Finds the plain values that a definition has now and its source may not yield."""
    # `node` is its source, `namespace` the current values of the names that this uses.
    current: Changes = {"defaults": {}, "attributes": {}}
    if isinstance(definition, FunctionType):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        current["defaults"][""] = _defaults(definition, node, "", namespace)
    else:
        assert isinstance(node, ast.ClassDef)
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        written = dict(_assigned(node))
        inside = {**namespace, **dict.fromkeys([*methods, *written], _UNKNOWN)}
        for name, value in vars(definition).items():
            function = function_in(value)
            if name in methods and function is not None:
                if _is_own(definition, name, function):
                    current["defaults"][name] = _defaults(function, methods[name], f"{name}: ", inside)
                elif not methods[name].decorator_list:
                    raise _replaced(name, function)
            elif not name.startswith("__") and _is_other(definition, name, value, written, inside):
                current["attributes"][name] = value
    current["defaults"] = {name: defaults for name, defaults in current["defaults"].items() if defaults}
    return {kind: entries for kind, entries in current.items() if entries}


def restore(definition: FunctionType | type, current: Changes) -> None:
    """Restores the `changes` of a definition in the same definition elsewhere."""
    for name, defaults in current.get("defaults", {}).items():
        function = function_in(vars(definition)[name] if name else definition)
        assert function is not None  # it is the same source
        function.__defaults__ = tuple(defaults.get(p, value) for p, value in _positional(function).items()) or None
        function.__kwdefaults__ = {p: defaults.get(p, value) for p, value in (function.__kwdefaults__ or {}).items()}
    for name, value in current.get("attributes", {}).items():
        setattr(definition, name, value)


def function_in(value: Any) -> FunctionType | None:
    """Unwraps decorators, `staticmethod`, `classmethod` and `property`; None if there is no function inside."""
    if isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value.__func__ if isinstance(value, staticmethod | classmethod) else value)
    return value if isinstance(value, FunctionType) else None


def _positional(function: FunctionType) -> dict[str, Any]:
    """Lists the defaults of positional parameters."""
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))


def _defaults(
    function: FunctionType, node: ast.FunctionDef | ast.AsyncFunctionDef, what: str, namespace: Mapping[str, object]
) -> dict[str, Any]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    written: dict[str, ast.expr | None] = {
        parameter.arg: default
        for parameter, default in [
            *zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        if default is not None
    }
    now = _positional(function) | (function.__kwdefaults__ or {})
    if written.keys() != now.keys():
        raise NoSource(f"has defaults for {', '.join(now) or 'nothing'}, unlike its source; run its definition again")
    return {
        name: value
        for name, value in now.items()
        if _differs(value, written[name], namespace, f"{what}the default of `{name}` is")
    }


def _is_other(
    definition: type, name: str, value: Any, written: Mapping[str, ast.expr | None], namespace: Mapping[str, object]
) -> bool:
    """Whether an attribute of a class has to be restored."""
    if name in written:
        # Members of an enumeration, slots and fields of a named tuple are made from the source.
        is_made = isinstance(value, definition) or inspect.isdatadescriptor(value) or inspect.ismethoddescriptor(value)
        return not is_made and _differs(value, written[name], namespace, f"`{name}` is")
    if name.startswith("_") or value is None:  # decorators and metaclasses add these
        return False
    if isinstance(value, FunctionType):
        if value.__module__ == definition.__module__ and not _is_own(definition, name, value):
            raise _replaced(name, value)
        return False
    if values.is_jax_array(value):
        raise NoSource(
            f"is no longer as its source says: `{name}` is {values.kind(value)}; make it in a function of its own"
        )
    return _is_plain(value)


def _is_own(definition: type, name: str, function: FunctionType) -> bool:
    return function.__qualname__ == f"{definition.__qualname__}.{name}"


def _replaced(name: str, function: FunctionType) -> NoSource:
    return NoSource(
        f"is no longer as its source says: `{name}` is the function {function.__qualname__}; write it in the class"
    )


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Lists the names that a class's body assigns, with their expressions; None for a part of one."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            yield statement.target.id, statement.value
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id, statement.value if part is target else None


def _differs(value: Any, expression: ast.expr | None, namespace: Mapping[str, object], what: str) -> bool:
    """Whether a value must be restored."""
    alike = _is_as_written(value, expression, namespace)
    if alike:
        return False
    if _is_plain(value):
        return True
    if alike is None:  # made there as it was here
        return False
    raise NoSource(f"is no longer as its source says: {what} {values.kind(value)}; run its definition again")


def _is_as_written(value: Any, expression: ast.expr | None, namespace: Mapping[str, object]) -> bool | None:
    """Whether an expression yields a value; None if it is neither literal nor name, and would have to be run."""
    if isinstance(expression, ast.Name | ast.Attribute):
        named = _named(expression, namespace)
        return None if named is _UNKNOWN else named is value
    try:
        literal = None if expression is None else ast.literal_eval(expression)
    except ValueError:
        return None
    return None if expression is None else type(literal) is type(value) and repr(literal) == repr(value)


def _named(expression: ast.expr, namespace: Mapping[str, object]) -> object:
    """Looks up a name, or a name in a module."""
    if isinstance(expression, ast.Name):
        return namespace.get(expression.id, vars(builtins).get(expression.id, _UNKNOWN))
    if isinstance(expression, ast.Attribute) and isinstance(module := _named(expression.value, namespace), ModuleType):
        return getattr(module, expression.attr, _UNKNOWN)
    return _UNKNOWN


def _is_plain(value: Any) -> bool:
    try:
        values.check(value, jax_arrays=False)
    except values.NotPlain:
        return False
    return True
