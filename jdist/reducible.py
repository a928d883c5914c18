"""What can be reduced over replicas: leaves as arrays of numbers, in the dtype that their sum or mean has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.errors import StepError
from jdist.global_arrays import is_key

PyTree = Any


def as_array(call: str, name: str, x: Any) -> jax.Array:
    """An argument as an array of numbers, or of keys.

    Args:
        call: who was called, `jdist.mean`.
        name: what it is, for the error.
        x: anything.

    Raises:
        StepError: names it and its type.
    """
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as exc:  # text, None, lists of unequal lengths
        raise StepError(
            f"{call}: {name} is {x!r:.60}, a {type(x).__name__}; it must be an array of numbers, or a number. Keep other "
            "things out of what replicas exchange."
        ) from exc


def as_arrays(call: str, tree: PyTree) -> PyTree:
    """A tree with each leaf as an array of numbers, or of keys.

    Raises:
        StepError: names the first leaf that is none.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: as_array(call, named(path), x), tree)


def check_numbers(call: str, op: str, tree: PyTree) -> None:
    """Refuses arrays of which there is no such reduction.

    Args:
        call: who was called, for the error.
        op: "mean", "sum", "max" or "min".
        tree: what `as_arrays` returned.

    Raises:
        StepError: a leaf holds PRNG keys; or complex numbers, which have no order, for "max" and "min".
    """
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if is_key(x):
            raise StepError(
                f"{call}: {named(path)} is {x.dtype}{list(x.shape)}, PRNG keys, which have no {op}. Make the same key on "
                'every replica, or take that of the first: `jdist.aggregate(key, "first")`.'
            )
        if op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise StepError(
                f"{call}: {named(path)} is {x.dtype}{list(x.shape)}; complex numbers have no order and so no {op}. Take that "
                "of `abs(x)`, or of `x.real` and `x.imag`."
            )


def as_axis(call: str, axis: Any) -> int:
    """An axis to concatenate along, as a Python int.

    Raises:
        StepError: it is no int.
    """
    if isinstance(axis, int | np.integer) and not isinstance(axis, bool):
        return int(axis)
    raise StepError(f"{call}: `axis` is {axis!r}; it must be an int, the axis to concatenate along.")


def named(path: Any) -> str:
    """A leaf in an error, by its path."""
    return f"leaf {jax.tree_util.keystr(path)}" if path else "the value"


def floating(x: jax.Array) -> jax.Array:
    """As floating point, in which a mean of integers is: their sum might not fit their own dtype."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(x, float))


def countable(x: jax.Array) -> jax.Array:
    """As an array that can be added up: bools are counted."""
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
