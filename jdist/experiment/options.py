"""Options from a config, checked against the signature of the function they are passed to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jdist.experiment.load import Key
from jdist.experiment.names import nearest
from jdist.experiment.validate import Problem


def check_options(
    function: Callable[..., Any], options: Mapping[str, Any], *, called: str, key: Key
) -> Iterator[Problem]:
    """Compare options with what a function takes by keyword.

    Args:
        function: the function that is to be called with `**options`.
        options: names and values; only the names are looked at.
        called: what to call the function in a message, such as `optax.adamw`.
        key: the config key that the options are under.

    Yields:
        A problem for each unknown option and for each argument without default that is missing.
    """
    parameters = inspect.signature(function).parameters.values()
    by_keyword = {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in options:
        if name not in by_keyword and not takes_any:
            remedy = nearest(str(name), by_keyword, label="Its options")
            yield Problem(
                key=(*key, str(name)), text=f"{called} has no such option", remedy=remedy or " It takes none."
            )
    for name, parameter in by_keyword.items():
        if parameter.default is parameter.empty and name not in options:
            yield Problem(key=(*key, name), text=f"missing; {called} needs it")
