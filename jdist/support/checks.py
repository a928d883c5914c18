"""Checks of numbers, also NumPy's and JAX's; imports neither, as the launcher does without them."""

from __future__ import annotations

import numbers
import operator
from typing import Any, SupportsFloat


def as_int(value: Any, *, least: int | None = None) -> int | None:
    """Converts a whole number to an int; returns None for anything else, also a bool or a number below `least`.

    Example:
        >>> import numpy as np
        >>> as_int(np.int64(3)), as_int(0, least=1), as_int(1.0), as_int(True)
        (3, None, None, None)
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # JAX raises it for an array of several numbers, and for a traced one
        return None
    return None if number is None or (least is not None and number < least) else number


def as_real(value: Any) -> float | None:
    """Converts a real number to Python's; returns None for anything else, also a bool. NaN and infinities are numbers.

    Example:
        >>> import numpy as np
        >>> as_real(np.float32(0.5)), as_real(2), as_real("2"), as_real(True)
        (0.5, 2, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    as_python = getattr(value, "item", None)  # NumPy's numbers have it
    return as_python() if as_python is not None else value  # type: ignore[return-value]  # `Real` is not known as float


def as_bool(value: Any) -> bool | None:
    """Converts True and False to Python's, NumPy's too; returns None for anything else: "no" would count as True.

    Example:
        >>> import numpy as np
        >>> as_bool(np.bool_(False)), as_bool("no"), as_bool(1)
        (False, None, None)
    """
    return bool(value) if type(value).__name__ in ("bool", "bool_") else None


def is_number(value: Any) -> bool:
    """Whether a value is one real number, or a scalar array of one; does not wait for a device.

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
    """Finds the largest divisor of a number that is no larger than `most`.

    Example:
        >>> largest_divisor(35, 8)
        7
    """
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)
