"""Options from a config, checked against the signature of the function they are passed to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jdist.experiment.annotations import misfit, signature
from jdist.experiment.names import nearest
from jdist.experiment.parse import Key
from jdist.experiment.validate import Problem


def check_options(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    called: str,
    key: Key,
    wrong: Callable[[Any, inspect.Parameter], str | None] = misfit,
) -> Iterator[Problem]:
    """Compare options with what a function takes by keyword.

    Args:
        function: the function that is to be called with `**options`.
        options: names and values.
        called: what to call the function in a message, such as `optax.adamw`.
        key: the config key that the options are under.
        wrong: says what is wrong with a value for a parameter, or None; by its annotation, unless given.

    Yields:
        A problem for each unknown option, each value of the wrong type, and each argument without default that is
        missing.
    """
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
