"""Options from a config, checked against the signature of the function that they are passed to."""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from jdist.experiment.load import Key
from jdist.experiment.validate import Problem, show
from jdist.support.suggest import nearest

_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping)
# Annotations in a config's words, and the types of values that fit; subclasses do not, as True is an int.
_KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    types.NoneType: ("null", (types.NoneType,)),
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
    **dict.fromkeys(_LISTS, ("a list", (list,))),
    **dict.fromkeys(_MAPPINGS, ("a mapping of keys to values", (dict,))),
}


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a function, its annotations as objects where they can be had, else as text."""
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, TypeError):  # an annotation that only type checkers can resolve
        return inspect.signature(function)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Lists the members of a union, those of unions within it too; of anything else itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(annotation) for member in alternatives(part))
    return (annotation,)


def misfit(value: Any, parameter: inspect.Parameter) -> str | None:
    """Describes why a YAML value misfits a parameter: `"x" is not a whole number`; else None."""
    # Also None if the annotation names a type that a config has no word for. The function then
    # checks.
    if value is None and parameter.default is None:
        return None
    kinds = [_kind(part, value) for part in alternatives(parameter.annotation)]
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds) or any(fits for _, fits in known):
        return None
    return f"{show(value)} is not {' or '.join(dict.fromkeys(words for words, _ in known))}"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(annotation: Any, value: Any) -> tuple[str, bool] | None:
    """Names a single annotation in a config's words, and says whether a value fits; None if it has no name."""
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Literal:
        choices = typing.get_args(annotation)
        return " or ".join(map(show, choices)), value in choices
    for kind, (words, fitting) in _KINDS.items():  # no look-up: an annotation may be anything, also what has no hash
        if origin is kind:
            return words, type(value) in fitting
    return None


def check_options(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    called: str,
    key: Key,
    wrong: Callable[[Any, inspect.Parameter], str | None] = misfit,
) -> Iterator[Problem]:
    """Yields a problem for each option that is unknown, missing, or of the wrong type."""
    # `called` names the function in messages, such as `optax.adamw`; `wrong` finds the fault of a
    # value.
    parameters = signature(function).parameters.values()
    by_keyword = {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name, value in options.items():
        parameter = by_keyword.get(name)
        if parameter is not None:
            text = wrong(value, parameter)
            if text is not None:
                yield Problem(key=(*key, name), text=text)
        elif not takes_any:
            remedy = nearest(str(name), by_keyword, label="Its options")
            yield Problem(
                key=(*key, str(name)), text=f"{called} has no such option", remedy=remedy or " It takes none."
            )
    for name, parameter in by_keyword.items():
        if parameter.default is parameter.empty and name not in options:
            yield Problem(key=(*key, name), text=f"missing; {called} needs it")
