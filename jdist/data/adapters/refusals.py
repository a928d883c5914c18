"""Refusals that several adapters share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist.data.leaves import differences, tree_spec
from jdist.errors import BatchError, DatasetError


def refuse_rows(kind: str, global_batch: int | None) -> None:
    """Raises a `DatasetError` for a `global_batch` of a dataset that has batches of its own."""
    if global_batch is not None:
        raise DatasetError(
            f"`global_batch` is {global_batch}, but `data` is a {kind}, which has batches of its own. Leave `global_batch` "
            "out: it makes batches of a dataset of rows, without a loader and without `.batch`."
        )


def refuse_unlike_rows(rows: Sequence[Any], names: Sequence[str], kind: str) -> None:
    """Raises a `BatchError` that names the first row that cannot be stacked."""
    if (unlike := unlike_row(rows, names)) is not None:
        raise BatchError(
            f"in the {kind} {' '.join(unlike)}. All rows need one structure, one dtype a leaf and one shape: pad, crop or "
            "convert"
        ) from None


def unlike_row(rows: Sequence[Any], names: Sequence[str]) -> tuple[str, str] | None:
    """Finds the name of the first row that cannot be stacked with those before, and what differs; None if all can."""
    specs = [tree_spec(jax.tree.map(np.atleast_2d, row)) for row in rows]
    for name, spec in zip(names, specs, strict=False):  # the last batch of a stream may be short
        if spec != specs[0]:
            return name, f"differs from {names[0]}: {differences(specs[0], spec)}"
    return None
