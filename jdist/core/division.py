"""The division of a state: the leaves in parts, and the axes that they are cut on."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.layout import Form, Layout
from jdist.core.rules import Rule, rules_of
from jdist.core.sharded_leaf import ShardedLeaf, is_sharded_leaf
from jdist.errors import StepError
from jdist.support.tracebacks import callers_level
from jdist.typing import PyTree

Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file
_SMALL_STATE = 1 << 20  # bytes; a state of less fits anywhere, in parts or not
_OPTIMIZER = re.compile(r"opt(im(i[sz]er)?)?(_?states?)?")


def forms(strategy: Strategy, state: PyTree, *, is_all: bool = True) -> list[Form]:
    """Decides how each leaf of a state is kept; refuses if too many bytes would stay in full."""
    chosen, refusal = forms_or_refusal(strategy, state, is_all=is_all)
    if refusal is not None:
        raise StepError(refusal)
    return chosen


def forms_or_refusal(strategy: Strategy, state: PyTree, *, is_all: bool = True) -> tuple[list[Form], str | None]:
    """Decides as `forms`; returns `(forms, refusal)`, the latter None if the state is allowed."""
    # The refusal names the leaves and the option that allows them.
    parts, layout = strategy.parts, Layout.of(strategy)
    assert parts is not None
    leaves = jax.tree.leaves_with_path(state, is_leaf=is_sharded_leaf)
    described = [_described(x) for _, x in leaves]
    is_of_optimizer, is_found = of_optimizer(state)
    rules = rules_of(strategy, state, is_of_optimizer, is_all=is_all)
    models = [() if rule is None else rule.axes for rule in rules]
    sizes = [_num_bytes(*each) for each in described]
    chosen = [
        layout.form(shape, model) if layout.takes_parts(shape, dtype) else Form.whole(shape, model)
        for (shape, dtype), model in zip(described, models, strict=True)
    ]
    if parts.of == "optimizer":
        if not is_found and sum(sizes) >= _SMALL_STATE:
            named = ", ".join(jax.tree_util.keystr(path) for path, _ in leaves[:5])
            warnings.warn(
                f'shard="optimizer" keeps the optimiser\'s state in parts, and this state of {sum(sizes):,} bytes '
                f"({named}, ...) has none that can be told apart: neither a state of optax nor a field or key called opt_state "
                'or optimizer. All of it is whole on every device. Rename the field, or take shard="state".',
                stacklevel=callers_level(),
            )
        return [
            form if of_optimizer else Form.whole(form.of, form.model)
            for form, of_optimizer in zip(chosen, is_of_optimizer, strict=True)
        ], None
    # Of what is not cut among the replicas each device has its share of the replica's.
    on_device = [
        size * layout.num_elements(f) // max(1, math.prod(f.of)) for size, f in zip(sizes, chosen, strict=True)
    ]
    whole = [(size, path) for size, f, (path, _) in zip(on_device, chosen, leaves, strict=True) if not f.is_cut]
    share = sum(size for size, _ in whole) / max(1, sum(sizes))
    if share <= parts.most_whole or sum(sizes) < _SMALL_STATE or layout.num_parts == 1:
        return chosen, None
    whole.sort(key=lambda entry: -entry[0])
    named = ", ".join(f"{jax.tree_util.keystr(path)} ({size:,} bytes)" for size, path in whole[:5])
    pairs = zip(chosen, described, strict=True)
    of_rules = any(any(f.model) and not f.is_cut and layout.takes_parts(*each) for f, each in pairs)
    small = f"Arrays of fewer than {layout.whole_below:,} elements and PRNG keys stay whole. Lower `whole_below`"
    ruled = (
        "A leaf that a rule divides is cut on another axis among the replicas, and here no axis divides well: name "
        "another axis in the rule, or use fewer devices a replica"
    )
    return chosen, (
        f"{share:.1%} of the state's {sum(sizes):,} bytes would stay whole on every device: {named}"
        f"{f' and {len(whole) - 5} more' if len(whole) > 5 else ''}. {ruled if of_rules else small}, or allow it: "
        f"`most_whole={math.ceil(share * 100) / 100}`."
    )


def rules_by_leaf(strategy: Strategy, state: PyTree, *, is_all: bool = True) -> list[Rule | None]:
    """Finds the rule of each leaf, if it has one; see `rules_of`."""
    return rules_of(strategy, state, of_optimizer(state)[0], is_all=is_all)


def _described(x: Any) -> tuple[tuple[int, ...], Any]:
    x = x if hasattr(x, "dtype") else jax.typeof(jnp.asarray(x))
    return x.shape, x.dtype


def _num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * getattr(dtype, "itemsize", 4)


def of_optimizer(state: PyTree) -> tuple[list[bool], bool]:
    """Finds the leaves of optax states, and of fields or keys named like an optimiser."""
    # Also returns whether there is such a state at all, which may have no leaves.

    def is_optax(node: Any) -> bool:
        return isinstance(node, tuple) and type(node).__module__.split(".")[0] == "optax"

    flags, is_found = list[bool](), False
    for path, node in jax.tree.leaves_with_path(state, is_leaf=lambda x: is_sharded_leaf(x) or is_optax(x)):
        names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
        inside = is_optax(node) or any(map(_OPTIMIZER.fullmatch, names))
        is_found |= inside
        flags += [inside] * len(jax.tree.leaves(node, is_leaf=is_sharded_leaf))
    return flags, is_found


def shapes(strategy: Strategy, state: PyTree, *, is_all: bool = True) -> PyTree:
    """Describes a state, of arrays, structs or `ShardedLeaf`s of these, as a strategy lays it out."""
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_sharded_leaf)
    if strategy.parts is None:
        sharding = strategy.replicated_sharding
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in map(aval_of, leaves)]
    else:
        layout, chosen = Layout.of(strategy), forms(strategy, state, is_all=is_all)
        structs = [struct_of(layout, x, form) for x, form in zip(leaves, chosen, strict=True)]
    return jax.tree.unflatten(treedef, structs)


def aval_of(x: Any) -> Any:
    """Returns what has the shape and dtype of a leaf: an array, a number, a struct or a `ShardedLeaf`."""
    return x if isinstance(x, ShardedLeaf | jax.ShapeDtypeStruct) else jax.typeof(x)


def struct_of(layout: Layout, x: Any, form: Form) -> Any:
    """Makes the `ShapeDtypeStruct` of a stored leaf; `x` is an array, a struct or a `ShardedLeaf` of one."""
    stored = jax.ShapeDtypeStruct(form.stored, aval_of(x).dtype, sharding=layout.kept(form))
    return ShardedLeaf(stored, form.of) if form.is_cut else stored


class FormsByPath:
    """Finds how a gradient is stored: like the leaf of the state that it belongs to."""

    def __init__(self, layout: Layout, paths: Sequence[str], forms: Sequence[Form]):
        self.layout = layout
        self._by_name = {path.removeprefix("."): form for path, form in zip(paths, forms, strict=True)}
        self._by_shape: dict[tuple[int, ...], list[tuple[str, Form]]] = {}
        for path, form in zip(paths, forms, strict=True):
            self._by_shape.setdefault(form.of, []).append((path, form))

    def of_leaf(self, name: str | None, shape: tuple[int, ...]) -> Form | None:
        """Returns the form of the leaf of this name, as `strategy.report` writes it, if it has this shape."""
        form = None if name is None else self._by_name.get(name)
        return form if form is not None and form.of == shape else None

    def find(self, path: str, shape: tuple[int, ...], dtype: Any) -> Form:
        """Returns the form of an array of this shape; `path` is where it is in a tree like the parameters."""
        if not self.layout.takes_parts(shape, dtype):
            return Form.whole(shape)
        leaves = self._by_shape.get(shape, [])
        cut = [(at, form) for at, form in leaves if form.is_cut]
        if not cut:
            return Form.whole(shape) if leaves else self.layout.form(shape)
        return next((form for at, form in cut if at.endswith(path)), cut[0][1])

    def of_part(self, shape: tuple[int, ...], part: tuple[int, ...]) -> Form:
        """Returns the form of an array of this shape with parts of that one."""
        known = (form for _, form in self._by_shape.get(shape, ()) if form.is_cut)
        return next((form for form in known if form.part(self.layout.num_parts) == part), self.layout.form(shape))


def is_in_place(layout: Layout, x: Any, form: Form) -> bool:
    """Returns whether a leaf is stored in this form, on the strategy's devices."""
    stored = x.stored if is_sharded_leaf(x) else x
    is_array = isinstance(stored, jax.Array) and not jax.typeof(stored).weak_type
    return is_array and is_sharded_leaf(x) == form.is_cut and stored.sharding == layout.kept(form)
