"""Which values are numbers, those of NumPy and JAX included."""

from __future__ import annotations

import operator
from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np


def count(value: Any) -> int | None:
    """A whole number from 1 on as an int; None of anything else, True too.

    Example:
        >>> import numpy as np
        >>> count(np.int64(3)), count(0), count(1.0)
        (3, None, None)
    """
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
    return number if number >= 1 else None


def is_number(value: Any) -> bool:
    """Whether it is one real number, or a scalar array of one. What a device still computes is not waited for.

    Example:
        >>> import numpy as np
        >>> is_number(np.float32(0.5)), is_number(1j), is_number(np.ones(1))
        (True, False, False)
    """
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        kinds = (jnp.bool_, jnp.integer, jnp.floating)
        return value.ndim == 0 and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    return isinstance(value, SupportsFloat) and getattr(value, "ndim", 0) == 0  # another library's array too
