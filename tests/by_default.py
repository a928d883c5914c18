"""Which of a test's cases run by default: what takes long in more than one way of the same runs with `make full`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Parameters of a test, of which those in `default` run always, and the others with `make full`."""
    values = list(values)
    assert all(value in values for value in default)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in default else pytest.mark.full
        )
        for value in values
    ]
