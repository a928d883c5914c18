"""Where each leaf of a state is, and what it takes of a device's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.division import forms_or_refusal, of_optimizer, rules_by_leaf
from jdist.core.layout import Form, Layout, names_in
from jdist.core.rules import Rule
from jdist.core.sharded_leaf import ShardedLeaf, is_sharded_leaf
from jdist.core.step_state import pack
from jdist.errors import StepError
from jdist.support.html import table

PyTree = Any
Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file
_HEADER = ("leaf", "array", "bytes", "how it is kept", "bytes a device")
_MOST_LEAVES = 100


@dataclass(frozen=True)
class LeafReport:
    """One leaf of a state."""

    path: str  # in the state
    array: str  # its dtype and shape
    num_bytes: int  # of the full array
    kept: str
    bytes_per_device: int  # in the device's own memory, with padding
    of_optimizer: bool = False


@dataclass(frozen=True)
class StateReport:
    """Each device's part of a state: `print` it, or show it in a notebook."""

    title: str  # describes the strategy
    leaves: Sequence[LeafReport]  # in the order of the state
    refusal: str | None = None  # why the strategy refuses such a state

    @property
    def num_bytes(self) -> int:
        """Bytes of the state."""
        return sum(leaf.num_bytes for leaf in self.leaves)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that each device holds of it."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    def _rows(self) -> list[tuple[str, ...]]:
        shown = self.leaves[:_MOST_LEAVES]
        rows = [(x.path, x.array, f"{x.num_bytes:,}", x.kept, f"{x.bytes_per_device:,}") for x in shown]
        if len(self.leaves) > len(shown):
            rows.append((f"… {len(self.leaves) - len(shown):,} more", "", "", "", ""))
        share = f"{self.bytes_per_device / max(1, self.num_bytes):.1%} of the state"
        return [*rows, ("all", "", f"{self.num_bytes:,}", share, f"{self.bytes_per_device:,}")]

    def __str__(self) -> str:
        rows = [_HEADER, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        numbers = (2, 4)
        lines = [
            "  ".join(
                x.rjust(w) if i in numbers else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n  ".join([self._heading, *(line.rstrip() for line in lines)])

    @property
    def _heading(self) -> str:
        return self.title if self.refusal is None else f"{self.title}\n  Refused: {self.refusal}"

    def _repr_html_(self) -> str:
        return table(self._rows(), header=_HEADER, title=self._heading)


def report(strategy: Strategy, state: PyTree) -> StateReport:
    """Describes where a strategy keeps each leaf of a state: `Strategy.report`."""
    if callable(state) and any(x is state for x in jax.tree.leaves(state)):
        raise StepError(
            "strategy.report got a function; it takes a state, or its shapes: `strategy.report(jax.eval_shape(create, key))`."
        )
    state = pack(state)
    leaves = jax.tree.leaves_with_path(state, is_leaf=is_sharded_leaf)
    layout = None if strategy.parts is None else Layout.of(strategy)
    chosen, refusal, rules = [None] * len(leaves), None, [None] * len(leaves)
    if layout is not None:
        chosen, refusal = forms_or_refusal(strategy, state, is_all=False)
        rules = rules_by_leaf(strategy, state, is_all=False)
    rows = [
        _leaf(strategy, layout, jax.tree_util.keystr(path).removeprefix(".") or "itself", leaf, form, rule)
        for (path, leaf), form, rule in zip(leaves, chosen, rules, strict=True)
    ]
    rows = [replace(row, of_optimizer=each) for row, each in zip(rows, of_optimizer(state)[0], strict=True)]
    return StateReport(str(strategy), rows, refusal)


def _leaf(
    strategy: Strategy, layout: Layout | None, path: str, leaf: Any, form: Form | None, rule: Rule | None
) -> LeafReport:
    x = leaf if isinstance(leaf, ShardedLeaf | jax.ShapeDtypeStruct) else jax.typeof(jnp.asarray(leaf))
    itemsize = itemsize_of(x.dtype)
    num_bytes = math.prod(x.shape) * itemsize
    array = f"{x.dtype}{list(x.shape)}"
    if layout is None or form is None:
        if isinstance(leaf, jax.Array) and not leaf.is_deleted() and not leaf.sharding.is_fully_replicated:
            kept, on_device = "a part with each replica", math.prod(leaf.sharding.shard_shape(x.shape)) * itemsize
            return LeafReport(path, array, num_bytes, kept, on_device)
        kept = "on the device" if strategy.num_replicas == 1 else "whole on every device"
        return LeafReport(path, array, num_bytes, kept, num_bytes)
    on_device = 0 if layout.on_host and form.is_cut else layout.num_elements(form) * itemsize
    if form.is_cut:
        what = f"axis {form.axis} cut" if form.shape == form.of else f"as {list(form.shape)}, cut"
        where = " in host memory" if layout.on_host else ""
        copies = strategy.num_replicas // layout.num_parts
        kept = f"{what} in {layout.num_parts} parts {list(form.part(layout.num_parts))}{where}"
        kept += f", {copies} copies" if copies > 1 else ""
    else:
        of = "replica" if rule is not None else "device"
        kept = f"whole on every {of}" if len(strategy.devices) > 1 else "on the device"
        kept += _why_whole(layout, x, rule) if num_bytes and layout.num_parts > 1 else ""
    return LeafReport(path, array, num_bytes, kept + _by_rule(strategy, form, rule), on_device)


def _why_whole(layout: Layout, x: Any, rule: Rule | None) -> str:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return ": a PRNG key"
    if not layout.takes_parts(x.shape, x.dtype):
        return f": fewer than {max(layout.whole_below, layout.num_parts):,} elements"
    return ": no state of an optimiser" if rule is None else ": no other axis divides well, or no state of an optimiser"


def _by_rule(strategy: Strategy, form: Form, rule: Rule | None) -> str:
    if rule is None or strategy.mesh is None:
        return ""
    sizes = strategy.mesh.shape
    over = [
        f"axis {i} over {' x '.join(f'{name}={sizes[name]}' for name in names_in(entry))}"
        for i, entry in enumerate(form.model)
        if entry is not None
    ]
    return f"; {', '.join(over)} by {'the metadata' if rule.pattern is None else repr(rule.pattern)}"


def itemsize_of(dtype: Any) -> int:
    """Counts the bytes of an element; of a PRNG key those of its data."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return data.size * data.dtype.itemsize
    return dtype.itemsize
