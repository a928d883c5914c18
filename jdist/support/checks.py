"""Checks of arguments, each with one phrasing; numbers of NumPy and JAX pass, and neither library is imported."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection, Iterable
from typing import Any, SupportsFloat

from jdist.support.words import did_you_mean


def whole_number(
    name: str,
    value: Any,
    error: type[Exception],
    *,
    least: int = 1,
    most: int | None = None,
    unit: str = "",
    call: str = "",
    fix: str = "",
) -> int:
    """Returns `value` as an int, or raises `error` if it is not a whole number from `least` to `most`."""
    number = as_int(value, least=least)
    if number is None or (most is not None and number > most):
        span = f", {least} or more" if most is None else f" from {least} to {most}"
        raise _refusal(name, value, f"a whole number{f' of {unit}' if unit else ''}{span}", error, call, fix)
    return number


def real_number(
    name: str,
    value: Any,
    error: type[Exception],
    *,
    above: float | None = None,
    least: float | None = None,
    unit: str = "",
    call: str = "",
    fix: str = "",
) -> float:
    """Returns `value` as a finite number above `above`, or of at least `least`; else raises `error`."""
    number = as_real(value)
    low = number is not None and ((above is not None and number <= above) or (least is not None and number < least))
    if number is None or number != number or abs(number) == math.inf or low:
        span = f" above {above:g}" if above is not None else f", {least:g} or more" if least is not None else ""
        raise _refusal(
            name, value, f"a{'' if unit else ' finite'} number{f' of {unit}' if unit else ''}{span}", error, call, fix
        )
    return number


def seconds(name: str, value: Any, error: type[Exception], *, least: float | None = None, call: str = "") -> float:
    """Returns a finite duration above 0, or of at least `least`; else raises `error`."""
    return real_number(name, value, error, above=0 if least is None else None, least=least, unit="seconds", call=call)


def flag(name: str, value: Any, error: type[Exception], *, call: str = "", fix: str = "") -> bool:
    """Returns True or False, also for NumPy's; raises `error` for anything else, such as "no"."""
    if (number := as_bool(value)) is None:
        raise _refusal(name, value, "True or False", error, call, fix)
    return number


def choice(
    name: str, value: Any, allowed: Iterable[Any], error: type[Exception], *, call: str = "", fix: str = ""
) -> Any:
    """Returns `value` if it is one of `allowed`; else raises `error`, with the nearest of them."""
    allowed = tuple(allowed)
    if not any(isinstance(value, type(one)) and value == one for one in allowed):
        listed = " or ".join(map(repr, allowed)) if len(allowed) < 3 else f"one of {', '.join(map(repr, allowed))}"
        hint = did_you_mean(value, [one for one in allowed if isinstance(one, str)])
        raise _refusal(name, value, listed, error, call, f"{hint} {fix}".strip())
    return value


def _refusal(name: str, value: Any, allowed: str, error: type[Exception], call: str, fix: str) -> Exception:
    where = f"{call}: " if call else ""
    return error(f"{where}`{name}` is {value!r:.80}; it must be {allowed}.{f' {fix}' if fix else ''}")


def known_options(what: str, given: Iterable[str], known: Collection[str], error: type[Exception]) -> None:
    """Raises `error` for an option of `what` that is not known, with the nearest that is."""
    for name in given:
        if name not in known:
            has = f"It has: {', '.join(known)}." if known else "It has none."
            raise error(f"{what} has no option {name!r}.{did_you_mean(name, known)} {has}")


def as_int(value: Any, *, least: int | None = None) -> int | None:
    """Converts a whole number to an int; returns None for anything else, also a bool or a number below `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # JAX raises it for an array of several numbers, and for a traced one
        return None
    return None if number is None or (least is not None and number < least) else number


def as_real(value: Any) -> float | None:
    """Converts a real number to Python's; returns None for anything else, also a bool. NaN and infinities are numbers."""
    if getattr(value, "ndim", None) == 0:  # a number of NumPy or JAX
        try:
            value = value.item()
        except (TypeError, RuntimeError):  # JAX raises them for a traced one, and for one that was deleted
            return None
    return None if isinstance(value, bool) or not isinstance(value, numbers.Real) else value  # type: ignore[return-value]  # `Real` is not known as float


def as_bool(value: Any) -> bool | None:
    """Converts True and False to Python's, NumPy's too; returns None for anything else: "no" would count as True."""
    return bool(value) if type(value).__name__ in ("bool", "bool_") else None


def is_number(value: Any) -> bool:
    """Returns whether a value is one real number, or a scalar array of one; does not wait for a device.

    Example:
        >>> import numpy as np
        >>> is_number(np.float32(0.5)), is_number(1j), is_number(np.ones(1))
        (True, False, False)
    """
    import jax  # configs are checked before JAX may be imported
    import jax.numpy as jnp
    import numpy as np

    if isinstance(value, np.ndarray | np.generic | jax.Array):
        kinds = (jnp.bool_, jnp.integer, jnp.floating)
        return value.ndim == 0 and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    return isinstance(value, SupportsFloat) and getattr(value, "ndim", 0) == 0  # another library's array too


def largest_divisor(number: int, most: int) -> int:
    """Finds the largest divisor of a number up to `most`.

    Example:
        >>> largest_divisor(35, 8)
        7
    """
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)
