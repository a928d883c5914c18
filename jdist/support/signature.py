"""Options checked against the signature of the function that takes them, in a config's words."""

from __future__ import annotations

import collections.abc
import inspect
import json
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jdist.support.words import closest, nearest

Key = tuple[str, ...]
# The errors of pydantic in a config's words: what the value is not.
_WORDS = {
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "less_than": "< {lt}",
    "less_than_equal": "<= {le}",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "none_required": "null",
    "literal_error": "{expected}",
    "model_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "list_type": "a list",
    "string_pattern_mismatch": "of the right form",
    "string_too_short": "at least {min_length} visible character long",
    "string_too_long": "at most {max_length} characters long",
}
_LISTS = (tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something wrong with one key of a config."""

    key: Key
    text: str  # what is wrong, without the key
    remedy: str = ""  # how to mend it; opens with a space, or is empty
    others: tuple[Key, ...] = ()  # further keys that have to do with it; their places are named too


def dotted(key: Key) -> str:
    """Writes a key as an override does: `train.steps` for `("train", "steps")`."""
    return ".".join(key)


def leaves(values: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Lists every key path that holds no further mapping, with its value; an empty mapping is a value."""
    for key, value in values.items():
        path = (*prefix, str(key))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def show(value: Any) -> str:
    """Writes a value as it would be in a config, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def problem_of(error: Any, key: Key = ()) -> Problem:
    """Says one of pydantic's errors in a config's words; its place is below `key`."""
    kind, value, limits = error["type"], error["input"], error.get("ctx", {})
    words = _words(error)
    remedy = ""
    if kind == "literal_error" and isinstance(value, str):
        close = closest(value, [part.strip("' ") for part in limits["expected"].replace(" or ", ",").split(",")])
        remedy = f" Did you mean {close}?" if close else ""
    elif kind == "string_type" and isinstance(value, bool):  # written in one of YAML's ways
        remedy = f" If it is meant as text, quote it, such as '{'yes' if value else 'no'}'."
    elif kind == "string_type" and isinstance(value, int | float):
        remedy = f" If it is meant as text, quote it: '{value}'."
    text = f"{show(value)} is not {words}" if words else f"{show(value)}: {error['msg']}"
    return Problem(key=(*key, *map(str, error["loc"])), text=text, remedy=remedy)


def _words(error: Any) -> str | None:
    return _WORDS[error["type"]].format(**error.get("ctx", {})) if error["type"] in _WORDS else None


def check_options(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    called: str,
    key: Key = (),
    wrong: Callable[[Any, inspect.Parameter, Key], Problem | None] | None = None,
    lists: bool = False,
) -> Iterator[Problem]:
    """Yields a problem for each option that is unknown, missing, or misfits its annotation."""
    # `called` names the function in messages, such as `optax.adamw`; `wrong` stands in for `misfit`.
    # With `lists`, `*names` is an option that takes a list; else it is not an option.
    parameters = signature(function).parameters.values()
    by_keyword = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for p in parameters if lists else ():
        if p.kind is p.VAR_POSITIONAL:
            by_keyword[p.name] = p.replace(kind=p.KEYWORD_ONLY, annotation=list[p.annotation], default=())
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name, value in options.items():
        if name in by_keyword:
            problem = (wrong or misfit)(value, by_keyword[name], (*key, name))
            if problem is not None:
                yield problem
        elif not takes_any:
            remedy = nearest(str(name), by_keyword, label="Its options") or " It takes none."
            yield Problem(key=(*key, str(name)), text=f"{called} has no such option", remedy=remedy)
    for name, parameter in by_keyword.items():
        if parameter.default is parameter.empty and name not in options:
            yield Problem(key=(*key, name), text=f"missing; {called} needs it")


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


def misfit(value: Any, parameter: inspect.Parameter, key: Key) -> Problem | None:
    """Finds why a YAML value misfits a parameter's annotation; None if it fits, or if only the function can tell."""
    if value is None and parameter.default is None:
        return None
    # Here, as it takes a tenth of a second, which only configs need.
    from pydantic import ConfigDict, TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    strict = ConfigDict(strict=True, arbitrary_types_allowed=True)
    errors = []
    for annotation in alternatives(parameter.annotation):
        try:
            TypeAdapter(_as_in_yaml(annotation), config=strict).validate_python(value)
            return None
        except ValidationError as exc:
            errors.append(exc.errors(include_url=False)[0])
        except (PydanticUserError, NameError):
            return None
    words = [_words(error) for error in errors]
    if None in words or isinstance(parameter.annotation, str):  # a type that configs have no word for
        return None
    within = [error for error in errors if error["loc"]]  # of the right kind, an item of it is wrong
    if len(errors) == 1 or within:
        return problem_of((within or errors)[0], key)
    return Problem(key=key, text=f"{show(value)} is not {' or '.join(dict.fromkeys(map(str, words)))}")


def _as_in_yaml(annotation: Any) -> Any:
    """Replaces a kind of sequence by `list`, the one that YAML has, and a path by text."""
    origin = typing.get_origin(annotation) or annotation
    if origin is os.PathLike:
        return str
    if not any(origin is each for each in _LISTS):
        return annotation
    item, *others = typing.get_args(annotation) or (Any,)
    return list[Any if others and others != [...] else item]
