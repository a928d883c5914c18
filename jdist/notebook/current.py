"""What a function or class has now and its source does not give: defaults and attributes of classes, set or changed since.

Its source is run again elsewhere. `def f(rate=RATE)` has there what RATE is by then, and here what it was; and a class may
have been given another attribute by a later cell. Values that are plain data are put back; what is none, and is seen to be
another, is refused.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from jdist.notebook import values
from jdist.notebook.names import NoSource

# {"defaults": {method's name, or "" for a function's own: {parameter: value}}, "attributes": {name: value}}
Changes = dict[str, dict[str, Any]]
_UNKNOWN = object()  # what a source gives where that can't be told without running it


def changes(definition: FunctionType | type, node: ast.stmt, namespace: Mapping[str, object]) -> Changes:
    """The plain values that a definition has now, and its source may not give.

    Args:
        definition: a function, or a class.
        node: its source.
        namespace: the names that its source takes, as they are now.

    Raises:
        NoSource: it has something else than its source says, which is no plain value.
    """
    found: Changes = {"defaults": {}, "attributes": {}}
    if isinstance(definition, FunctionType):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        found["defaults"][""] = _defaults(definition, node, "", namespace)
    else:
        assert isinstance(node, ast.ClassDef)
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        written = dict(_assigned(node))
        inside = {**namespace, **dict.fromkeys([*methods, *written], _UNKNOWN)}
        for name, value in vars(definition).items():
            function = function_in(value)
            if name in methods and function is not None:
                if _is_own(definition, name, function):
                    found["defaults"][name] = _defaults(function, methods[name], f"{name}: ", inside)
                elif not methods[name].decorator_list:
                    raise _replaced(name, function)
            elif not name.startswith("__") and _is_other(definition, name, value, written, inside):
                found["attributes"][name] = value
    found["defaults"] = {name: defaults for name, defaults in found["defaults"].items() if defaults}
    return {kind: entries for kind, entries in found.items() if entries}


def restore(definition: FunctionType | type, found: Changes) -> None:
    """Puts back what `changes` has found, into the same definition elsewhere."""
    for name, defaults in found.get("defaults", {}).items():
        function = function_in(vars(definition)[name] if name else definition)
        assert function is not None  # it is the same source
        function.__defaults__ = tuple(defaults.get(p, value) for p, value in _positional(function).items()) or None
        function.__kwdefaults__ = {p: defaults.get(p, value) for p, value in (function.__kwdefaults__ or {}).items()}
    for name, value in found.get("attributes", {}).items():
        setattr(definition, name, value)


def function_in(value: Any) -> FunctionType | None:
    """The function that decorators, `staticmethod`, `classmethod` and `property` have been put round; None if it is none."""
    if isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value.__func__ if isinstance(value, staticmethod | classmethod) else value)
    return value if isinstance(value, FunctionType) else None


def _positional(function: FunctionType) -> dict[str, Any]:
    """The defaults of parameters that may be given by position."""
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
    """Whether an attribute of a class has to be put back."""
    if name in written:
        # Members of an enumeration, slots and fields of a named tuple are made of what is written.
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
    """The names that a class's body assigns, with what; None where that is a part of something."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            yield statement.target.id, statement.value
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id, statement.value if part is target else None


def _differs(value: Any, expression: ast.expr | None, namespace: Mapping[str, object], what: str) -> bool:
    """Whether a value has to be put back.

    Raises:
        NoSource: it is another than the expression gives, and cannot.
    """
    alike = _is_as_written(value, expression, namespace)
    if alike:
        return False
    if _is_plain(value):
        return True
    if alike is None:  # made there as it was here
        return False
    raise NoSource(f"is no longer as its source says: {what} {values.kind(value)}; run its definition again")


def _is_as_written(value: Any, expression: ast.expr | None, namespace: Mapping[str, object]) -> bool | None:
    """Whether an expression gives a value; None if it is no literal and no name, and would have to be run."""
    if isinstance(expression, ast.Name | ast.Attribute):
        found = _named(expression, namespace)
        return None if found is _UNKNOWN else found is value
    try:
        literal = None if expression is None else ast.literal_eval(expression)
    except ValueError:
        return None
    return None if expression is None else type(literal) is type(value) and repr(literal) == repr(value)


def _named(expression: ast.expr, namespace: Mapping[str, object]) -> object:
    """What a name stands for, or a name in a module."""
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
