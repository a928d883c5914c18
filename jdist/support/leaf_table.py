"""Tables of a tree's leaves and where they live; nothing is computed or copied for them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding

from jdist.support.html import table

PyTree = Any
_MOST_LEAVES = 50
_HEADER = ("leaf", "shape", "dtype", "where it lives")


def has_arrays(tree: PyTree) -> bool:
    """Whether a tree has leaves with shapes."""
    return any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(tree))


def tree_table(tree: PyTree, *, title: str, whereabouts: str | None = None) -> str:
    """Writes an HTML table of leaf, shape, dtype and place; of large trees the first leaves."""
    # Arrays may have been donated. `whereabouts` is the place of all leaves, if they do not tell.
    return table(_rows(tree, whereabouts), header=_HEADER, title=title)


def tree_text(tree: PyTree, *, title: str) -> str:
    """Writes the table of `tree_table` as text."""
    rows = [_HEADER, *_rows(tree, None)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n  ".join([title, *lines])


def whereabouts_of(leaf: object) -> str:
    """Describes the place of a tree's leaf."""
    if hasattr(type(leaf), "whereabouts"):
        return leaf.whereabouts  # type: ignore[attr-defined]  # a type that tells by itself
    if isinstance(leaf, Tracer):
        return "traced: known when the program runs"
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "only its shape is known" if leaf.sharding is None else f"planned: {_place(leaf.sharding, leaf.shape)}"
    if isinstance(leaf, jax.Array):
        return ("deleted (donated to a step): was " if leaf.is_deleted() else "") + _place(leaf.sharding, leaf.shape)
    return "host, a NumPy array" if isinstance(leaf, np.ndarray | np.generic) else "host, a Python value"


def _rows(tree: PyTree, whereabouts: str | None) -> list[tuple[str, ...]]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda node: hasattr(type(node), "whereabouts"))
    rows = [
        (
            jax.tree_util.keystr(path).removeprefix(".") or "itself",
            _shape(leaf),
            str(getattr(leaf, "dtype", type(leaf).__name__)),
            whereabouts or whereabouts_of(leaf),
        )
        for path, leaf in leaves[:_MOST_LEAVES]
    ]
    if len(leaves) > _MOST_LEAVES:
        rows.append((f"… {len(leaves) - _MOST_LEAVES:,} more", "", "", ""))
    return rows


def _shape(leaf: object) -> str:
    shape = getattr(leaf, "shape", () if isinstance(leaf, int | float | complex) else None)
    return "" if shape is None else str(tuple(shape))


def _place(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
    """Describes the devices of an array, and what each of them holds."""
    kind = sharding.memory_kind
    memory = f", in {kind.replace('_', ' ')} memory" if kind is not None and kind.endswith("host") else ""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return f"{sharding.spec} of an abstract mesh{memory}"
    devices = sharding.device_set
    (platform, *others) = sorted({device.platform for device in devices})
    if len(devices) == 1 and not others:
        (device,) = devices
        return f"{platform}:{device.id}{memory}"
    hosts = len({device.process_index for device in devices})
    where = f"{len(devices):,} {'/'.join([platform, *others])} devices" + (
        f" of {hosts:,} processes" if hosts > 1 else ""
    )
    if sharding.is_fully_replicated:
        return f"a copy on each of {where}{memory}"
    return f"a part {sharding.shard_shape(shape)} on each of {where}{memory}"
