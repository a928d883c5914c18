"""Weights out of safetensors files, straight into a strategy's layout: each process reads what its devices take."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.checkpoint import leaves as codec
from jdist.checkpoint.checkpointer import CheckpointWarning
from jdist.checkpoint.fit import Only, Selection, check_has_values, first_few, name_of
from jdist.cluster.runtime import Runtime, alone, together
from jdist.core.remote import fetched, shapes_of
from jdist.core.sharded_leaf import is_sharded_leaf
from jdist.core.step_state import pack, unpack
from jdist.errors import CheckpointError
from jdist.support.arrays import promote_types
from jdist.support.tracebacks import callers_level
from jdist.typing import PyTree
from jdist.weights.axes import View
from jdist.weights.files import CONFIG, Reader, Tensor
from jdist.weights.rules import Rule, Rules, Source, parse_rules, sources_of

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class _Part:
    """A tensor that is a part of a leaf; `is_duplicate` if one that was read before is the same part."""

    tensor: Tensor
    view: View
    is_duplicate: bool


def load(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    like: PyTree,
    rules: Rules | None = None,
    *,
    only: Only | None = None,
    skip_mismatch: bool = False,
    cast: bool = False,
    cluster: Runtime | None = None,
) -> PyTree:
    """Loads weights from safetensors files into a strategy's layout, leaf by leaf.

    No process reads more of a file than the parts of its own devices, and none holds more on its host than that, one leaf,
    and what is being read of a tensor for it.
    All that the files' headers show is checked before anything is read.

    Args:
        files: a `.safetensors` file; several; an index (`model.safetensors.index.json`), or a folder with the one or the other.
        like: the tree to fill, of arrays or of what `strategy.shapes` returns: leaves take its shapes, dtypes and shardings.
        rules: which tensor is which leaf, such as `jdist.weights.gpt2()`: see docs/weights.md. None: a tensor is called as its
            leaf with "." between the names, as `save` without rules writes it.
        only: which leaves are loaded, as of `Checkpointer.restore`; the others keep their values in `like`.
        skip_mismatch: leave a leaf that does not fit, and a tensor that is for none, and warn of them; otherwise that is an
            error.
        cast: round tensors to a narrower dtype of the leaf, such as float32 to bfloat16. A wider one, which holds each value,
            is always taken.
        cluster: the processes, `strategy.cluster`, which all call this: what one cannot read is then an error of all.

    Returns:
        The tree; leaves are where those of `like` are.

    Raises:
        CheckpointError: a file is not there, cut off or no safetensors; a tensor is missing, left over, misshapen, of another
            dtype, of a model with another number of heads, or not the same as another for the same leaf. `like` is unchanged.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, jdist
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> _ = jdist.weights.save({"dense": {"kernel": jnp.ones((2, 3))}}, path)
        >>> like = jdist.mirrored().shapes({"dense": {"kernel": jnp.zeros((2, 3))}})
        >>> jdist.weights.load(path, like)["dense"]["kernel"].shape
        (2, 3)
    """
    return load_part(files, like, rules, only=only, skip_mismatch=skip_mismatch, cast=cast, cluster=cluster)[0]


def load_part(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    like: PyTree,
    rules: Rules | None,
    *,
    only: Only | None,
    skip_mismatch: bool,
    cast: bool = False,
    cluster: Runtime | None,
) -> tuple[PyTree, tuple[str, ...]]:
    """Loads weights as `load` does; also returns the paths of the leaves that keep their values."""
    selection = Selection(only, None, skip_mismatch)
    parsed = None if rules is None else parse_rules(rules)
    cluster = cluster or alone()
    tree = pack(shapes_of(like) if selection.is_all else fetched(like))
    leaves = codec.flatten(tree)
    with cluster.blocked(), together("loading weights", _TIMEOUT_S, cluster), Reader(files) as reader:
        plan, problems = _plan(reader, leaves, parsed, selection, cast)
        if problems and not skip_mismatch:
            raise CheckpointError(f"the weights do not fit the state, which is unchanged:\n  {first_few(problems)}")
        if not plan:
            raise CheckpointError(f"no tensor fits a leaf, so there is nothing to load:\n  {first_few(problems)}")
        check_has_values("the weights", leaves, plan)
        loaded = {path: _read_leaf(reader, path, leaves[path], parts) for path, parts in plan.items()}
    if problems:
        text = f"{len(leaves) - len(loaded):,} of {len(leaves):,} leaves keep their values. What does not fit:\n  "
        warnings.warn(text + first_few(problems), CheckpointWarning, stacklevel=callers_level())
    filled = [loaded.get(path, leaf) for path, leaf in leaves.items()]
    loaded_tree = unpack(jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_sharded_leaf), filled))
    return loaded_tree, tuple(name_of(path) for path in leaves if path not in loaded)


def _plan(
    reader: Reader, leaves: Mapping[str, Any], rules: Sequence[Rule] | None, selection: Selection, cast: bool
) -> tuple[dict[str, list[_Part]], list[str]]:
    """Finds the tensors of each leaf to load, and all that is wrong with them, in words."""
    names = {path: name_of(path) for path in leaves}
    selection.check_paths(list(names.values()))
    plan: dict[str, list[_Part]] = {}
    problems: list[str] = []
    known: set[str] = set()
    for path, name in names.items():
        takes = selection.takes(name)
        groups = sources_of(rules, name, np.shape(leaves[path]))
        known |= {each for group in groups for source in group for each in source.names}
        if takes:
            parts, wrong = _parts(reader, name, leaves[path], groups, cast)
            problems += wrong
            if not wrong:
                plan[path] = parts
    problems += _left_over(reader, rules, known, selection)
    return plan, problems


def _parts(
    reader: Reader, name: str, leaf: Any, groups: list[list[Source]], cast: bool
) -> tuple[list[_Part], list[str]]:
    """Finds the tensors of a leaf, and what is wrong with them."""
    codec.describe_leaf(name, leaf)
    if not hasattr(leaf, "shape") or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return [], [f"leaf {name}: is a {type(leaf).__name__}; only arrays of numbers are in such files"]
    if not groups:
        return [], [f"leaf {name}: no rule is for it"]
    parts, problems, count = list[_Part](), list[str](), 0
    for group in groups:
        there = [(reader.tensors[each], source) for source in group for each in source.names if each in reader.tensors]
        if not there:
            wanted = dict.fromkeys(each for source in group for each in source.names)
            problems.append(f"leaf {name}: tensor {' or '.join(wanted)} is not in the files")
        for i, (tensor, source) in enumerate(there):
            view = source.view(tensor.shape)
            if view is None:
                problems.append(
                    f"{tensor}: has shape {list(tensor.shape)}, which does not fit leaf {name} of shape {list(leaf.shape)} "
                    f"(axes: {source.axes.text})"
                )
            elif (heads := reader.heads[tensor.file]) and view.sizes.get("heads", heads[0]) not in heads:
                problems.append(
                    f"{tensor}: the {CONFIG} next to it says that its model has {heads[0]} attention heads, and leaf {name} of "
                    f"shape {list(leaf.shape)} has {view.sizes['heads']} (axes: {source.axes.text})"
                )
            elif text := _refuse_dtype(tensor.numpy_dtype, jnp.dtype(leaf.dtype), cast):
                problems.append(f"{tensor}: has dtype {tensor.numpy_dtype}, and leaf {name} {leaf.dtype}: {text}")
            else:
                parts.append(_Part(tensor, view, is_duplicate=i > 0))
                count += 0 if i else np.prod([b - a for a, b in view.extent], dtype=int)
    if not problems and count != np.prod(leaf.shape, dtype=int):
        problems.append(
            f"leaf {name}: the rules for it give {count:,} of its {np.prod(leaf.shape, dtype=int):,} elements"
        )
    return parts, problems


def _refuse_dtype(saved: np.dtype, wanted: Any, cast: bool) -> str | None:
    """Explains why values of one dtype do not go into another; None where they do."""
    if saved == wanted:
        return None
    if not (jnp.issubdtype(saved, jnp.floating) and jnp.issubdtype(wanted, jnp.floating)):
        return "only floating-point numbers are converted, into others"
    if cast or promote_types(saved, wanted) == wanted:
        return None
    return f"{wanted} cannot hold each value of it; `jdist.weights.load(..., cast=True)` rounds"


def _left_over(reader: Reader, rules: Sequence[Rule] | None, known: set[str], selection: Selection) -> list[str]:
    """Finds the tensors that go nowhere."""
    problems = []
    for name, tensor in reader.tensors.items():
        if name in known:
            continue
        places = [name.replace(".", "/")] if rules is None else [rule.path_of(name) for rule in rules]
        place = next((place for place in places if place is not None), None)
        if place is None:
            problems.append(f"{tensor}: no rule is for it. Add one, or (name, None) to leave it out")
        elif place and selection.takes(place):
            problems.append(f"{tensor}: is for {place}, which the state does not have")
    return problems


def _read_leaf(reader: Reader, path: str, like: Any, parts: Sequence[_Part]) -> Any:
    """Reads what this process needs of a leaf, and puts it onto its devices."""
    array = np.empty(like.shape, jnp.dtype(like.dtype))
    needed = codec.needed(like)
    extents = [None] if needed is None else _once(needed)
    for part, extent in itertools.product(parts, extents):
        for box, ranges in part.view.boxes(extent):
            values = reader.read(part.tensor, box)
            if not part.is_duplicate:
                part.view.write(values, ranges, array)
            elif not part.view.is_in(values, ranges, array):
                raise CheckpointError(
                    f"{part.tensor}: has other values than another tensor of the same leaf. Take a model with a leaf "
                    "for each, or leave one of them out by a rule"
                )
    return jax.block_until_ready(codec.place(path, array, None, like))  # until then the host's array is kept


def _once(extents: Sequence[Any]) -> list[Any]:
    """Lists boxes that several devices have copies of once each."""
    return [list(each) for each in dict.fromkeys(tuple((int(a), int(b)) for a, b in extent) for extent in extents)]
