"""PRNG keys among the arguments of a call: they travel as their data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdist.global_arrays import is_key

PyTree = Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["impl"])
@dataclasses.dataclass(frozen=True)
class KeyData:
    """Stands for a PRNG key, or an array of them.

    Attributes:
        data: the key's data.
        impl: makes it a key again.
    """

    data: Any
    impl: Any


def without_keys(tree: PyTree) -> PyTree:
    """A tree with `KeyData` in the place of each key."""
    return jax.tree.map(
        lambda x: KeyData(np.asarray(jax.random.key_data(x)), jax.random.key_impl(x)) if is_key(x) else x, tree
    )


def taking_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes arguments as `without_keys` gives them, and meets the keys."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(_key, (args, kwargs), is_leaf=lambda x: isinstance(x, KeyData))
        return function(*args, **kwargs)

    return call


def _key(x: Any) -> Any:
    return jax.random.wrap_key_data(x.data, impl=x.impl) if isinstance(x, KeyData) else x
