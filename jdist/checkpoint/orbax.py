"""Checkpoints of Orbax, read into a state of any layout; `orbax_export` writes them.

Leaves are matched by their names, whatever the nodes between are: an attribute, a key and a position are written alike.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.checkpoint import folder as disk
from jdist.checkpoint import leaves as codec
from jdist.checkpoint.bucket import check_is_path
from jdist.checkpoint.checkpointer import CheckpointWarning
from jdist.checkpoint.fit import check_has_values, first_few
from jdist.checkpoint.folder import describe_error
from jdist.checkpoint.job import Job
from jdist.checkpoint.pieces import groups_of
from jdist.core.remote import shapes_of
from jdist.core.sharded_leaf import is_sharded_leaf
from jdist.core.step_state import pack, unpack
from jdist.errors import CheckpointError
from jdist.support import checks
from jdist.support.arrays import is_key
from jdist.support.leaves import names_in
from jdist.support.tracebacks import callers_level
from jdist.support.words import did_you_mean
from jdist.typing import PyTree

Names = tuple[str, ...]

TIMEOUT_S = 600.0
_TOGETHER_BYTES = 64 << 20  # each call reads the description of the whole tree again
_STEP = re.compile(r"(?:.*_)?(\d+)")
CARRIED = re.compile(r"(loss scale|residuals of |kept )(.*)", re.DOTALL)


def from_orbax(
    path: str | os.PathLike[str], like: PyTree, *, step: int | None = None, item: str | None = None
) -> PyTree:
    """Reads a checkpoint that Orbax wrote, of flax's `TrainState`, of nnx or of any other tree, into a state's layout.

    Leaf by leaf: a host holds its share of the state and, of the leaves beyond 64 MB, one at a time.

    Args:
        path: what Orbax was given: a checkpoint, or a `CheckpointManager`'s directory: the newest in it.
        like: the tree to fill, of arrays or of what `strategy.shapes` returns; the leaves take its shapes, dtypes and
            shardings. Leaves that only the checkpoint has are not read, with a warning that names them.
        step: of a `CheckpointManager`'s directory, the step to read.
        item: the name under which the tree was saved, where there are several.

    Returns:
        The state.

    Raises:
        CheckpointError: Orbax did not write it, it cannot be read, or a leaf is missing or has another shape or dtype.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, orbax.checkpoint as ocp, jdist
        >>> folder = tempfile.mkdtemp() + "/saved"
        >>> with ocp.StandardCheckpointer() as checkpointer:
        ...     checkpointer.save(folder, {"w": jnp.arange(4.0)})
        >>> strategy = jdist.mirrored(jax.devices()[:2])
        >>> like = strategy.shapes({"w": jnp.zeros(4)})
        >>> jdist.train.from_orbax(folder, like)["w"].sharding.num_devices
        2
    """
    ocp = import_orbax(path)
    directory = _find(ocp, path, step, item)
    like = pack(shapes_of(like))
    wanted = codec.flatten(like)
    leaves = list(wanted.values())
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        tree, saved = Job(lambda: _describe(handler, directory)).result(TIMEOUT_S, f"reading {directory}")
        places = _fit(directory, saved, wanted)
        paths = list(wanted)
        check_has_values(directory, wanted, {paths[i] for i in places.values()})
        for group in groups_of({names: _num_bytes(saved[names]) for names in places}, _TOGETHER_BYTES):
            read = Job(lambda group=group: _read(ocp, handler, directory, tree, group))
            arrays = read.result(TIMEOUT_S, f"reading {directory}")
            for names in group:
                i = places[names]
                leaves[i] = codec.place(paths[i], arrays.pop(names), _key_kind(leaves[i]), leaves[i])
            jax.block_until_ready([leaves[places[names]] for names in group])  # the host's arrays are kept until then
    return unpack(jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_sharded_leaf), leaves))


def list_orbax(path: str | os.PathLike[str]) -> tuple[str, list[dict[str, Any]]]:
    """Returns the folder of a tree that Orbax wrote, and descriptions of its leaves, as a manifest has them."""
    ocp = import_orbax(path)
    directory = _find(ocp, path, None, None)
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        _, saved = Job(lambda: _describe(handler, directory)).result(TIMEOUT_S, f"reading {directory}")
    return str(directory), [{"path": "/".join(names), **leaf} for names, leaf in saved.items()]


def import_orbax(path: Any) -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise CheckpointError(
            f"{path}: Orbax cannot be imported here: {error}. Install it: pip install orbax-checkpoint"
        ) from error
    return ocp


def as_orbax_takes(path: str | os.PathLike[str]) -> str:
    check_is_path(path)
    return str(path) if "://" in str(path) else str(Path(path).expanduser().absolute())


def _find(ocp: Any, path: str | os.PathLike[str], step: int | None, item: str | None) -> Any:
    return Job(lambda: _find_tree(ocp, path, step, item)).result(TIMEOUT_S, f"looking for {path}")


def _find_tree(ocp: Any, path: str | os.PathLike[str], step: int | None, item: str | None) -> Any:
    """Finds the folder of a tree: the path itself, an item in it, or one in the folder of a step."""
    from etils import epath  # comes with Orbax

    if step is not None:
        step = checks.whole_number("step", step, CheckpointError, least=0, fix="None takes the newest.")
    directory = epath.Path(as_orbax_takes(path))
    if (ours := _ours(directory)) is not None:
        raise CheckpointError(
            f"{directory}: jdist wrote it, not Orbax. `jdist.train.Checkpointer({str(ours)!r}).restore(like)` reads it"
        )
    if directory.is_file():
        raise CheckpointError(
            f"{directory}: is a file, and Orbax's checkpoints are folders. Read flax's msgpack by flax: "
            "flax.training.checkpoints.restore_checkpoint"
        )
    if not directory.is_dir():
        there = directory.parent.iterdir() if directory.parent.is_dir() else ()
        near = did_you_mean(directory.name, [each.name for each in there])
        raise CheckpointError(
            f"{directory}: the folder does not exist.{near} Give a checkpoint's folder, or that of a `CheckpointManager`."
        )
    steps: dict[int, Any] = {}
    for each in directory.iterdir():
        match = _STEP.fullmatch(each.name)
        if match and each.is_dir() and ocp.path.step.is_path_finalized(each):
            steps[int(match[1])] = each
    is_tree = (directory / "_METADATA").exists()
    if step is not None or (not is_tree and steps and not _items(directory)):
        chosen = max(steps, default=None) if step is None else step
        if chosen not in steps:
            raise CheckpointError(f"{directory}: has no step {step}; there are {sorted(steps)}")
        directory, is_tree = steps[chosen], (steps[chosen] / "_METADATA").exists()
    if is_tree and item is None:
        return directory
    items = _items(directory)
    if item is None and len(items) == 1:
        item = items[0]
    if item not in items:
        if not items:
            text = "this folder has no checkpoint of a tree by Orbax (no file _METADATA)"
            old = " Read one of an old Orbax, or flax's msgpack, by its own library" if any(directory.iterdir()) else ""
            raise CheckpointError(f"{directory}: {text}.{old}")
        raise CheckpointError(f"{directory}: holds the items {', '.join(items)}; say which by `item`, not {item!r}")
    return directory / item


def _ours(directory: Any) -> Any:
    """Finds the folder of jdist's checkpoints that a path is, or that is above or below it, or returns None."""
    if disk.NAME.fullmatch(directory.name):
        return directory.parent
    folders = (folder for folder in (directory, directory / "checkpoints") if folder.is_dir())
    return next((each for each in folders if any(disk.NAME.fullmatch(path.name) for path in each.iterdir())), None)


def _items(directory: Any) -> list[str]:
    return sorted(each.name for each in directory.iterdir() if each.is_dir() and (each / "_METADATA").exists())


def _is_metadata(x: Any) -> bool:
    return x is not None and not isinstance(x, dict | list | tuple)


def _describe(handler: Any, directory: Any) -> tuple[PyTree, dict[Names, dict[str, Any]]]:
    """Reads the tree of a checkpoint, and describes its leaves by their names, as a manifest does."""
    try:
        tree = handler.metadata(directory)
    except Exception as error:
        raise CheckpointError(f"{directory}: Orbax cannot read what it holds: {describe_error(error)}") from error
    tree = getattr(tree, "tree", tree)
    described: dict[Names, dict[str, Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_metadata):
        names = _names_of(path)
        if type(leaf).__name__ == "StringMetadata":
            described[names] = {"shape": [], "dtype": "string"}
        elif getattr(leaf, "dtype", None) is not None:
            is_number = type(leaf).__name__ == "ScalarMetadata"
            kind = "python float" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "python int"
            shape = list(getattr(leaf, "shape", None) or ())
            described[names] = {"shape": shape, "dtype": kind if is_number else str(np.dtype(leaf.dtype))}
    return tree, described


def _names_of(path: Any) -> Names:
    return names_in(jax.tree_util.keystr(path))


def _plain(names: Names) -> Names:
    """Leaves out the `value` in which nnx keeps an array."""
    return names[:-1] if names and names[-1] in ("value", "raw_value") else names


def _fit(directory: Any, saved: Mapping[Names, dict[str, Any]], wanted: Mapping[str, Any]) -> dict[Names, int]:
    """Finds the number of the wanted leaf for each saved one; refuses what does not fit, and names it."""
    by_name = {_plain(names): names for names in saved}
    places: dict[Names, int] = {}
    problems: list[str] = []
    for i, (path, leaf) in enumerate(wanted.items()):
        if CARRIED.match(path):
            continue  # what a step adds to the user's state stays
        names = by_name.get(_plain(names_in(path)))
        if names is None:
            problems.append(f"leaf {path}: not in the checkpoint")
            continue
        there, here = saved[names], codec.describe_leaf(path, leaf)
        if is_key(leaf):
            here = {"shape": list(jax.eval_shape(jax.random.key_data, leaf).shape), "dtype": "uint32"}
        dtypes = (there["dtype"], here["dtype"])
        fits = dtypes[0] == dtypes[1] or (there["shape"] == [] and any(dtype.startswith("python ") for dtype in dtypes))
        if there["shape"] != here["shape"] or not fits or there["dtype"] == "string":
            problems.append(f"leaf {path}: saved {dtypes[0]}{there['shape']}, the state has {dtypes[1]}{here['shape']}")
        places[names] = i
    left = [".".join(names) for names in saved if names not in places]
    if problems:
        there = f"\n  in the checkpoint alone: {', '.join(left[:5])}{', ...' * (len(left) > 5)}" if left else ""
        raise CheckpointError(
            f"{directory}: does not fit the state, which is unchanged:\n  {first_few(problems)}{there}"
        )
    if left:
        text = f"{directory}: {len(left)} leaves are not in the state and were left out: {', '.join(left[:5])}"
        warnings.warn(text + ", ..." * (len(left) > 5), CheckpointWarning, stacklevel=callers_level())
    return places


def _num_bytes(leaf: dict[str, Any]) -> int:
    is_number = leaf["dtype"].startswith("python ")
    return math.prod(leaf["shape"]) * (8 if is_number else jnp.dtype(leaf["dtype"]).itemsize)


def _read(ocp: Any, handler: Any, directory: Any, tree: PyTree, group: list[Names]) -> dict[Names, np.ndarray]:
    """Reads some leaves of a checkpoint, whole, into this host's memory."""
    wanted = set(group)
    reads, skips = ocp.RestoreArgs(restore_type=np.ndarray), ocp.PLACEHOLDER
    item = jax.tree.map_with_path(lambda path, _: 0 if _names_of(path) in wanted else skips, tree, is_leaf=_is_metadata)
    restore_args = jax.tree.map(lambda _: reads, tree, is_leaf=_is_metadata)
    try:
        read = handler.restore(directory, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args))
    except Exception as error:
        raise CheckpointError(f"{directory}: Orbax cannot read it: {describe_error(error)}") from error
    leaves = ((_names_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(read))
    return {
        names: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for names, leaf in leaves
        if names in wanted
    }


def _key_kind(leaf: Any) -> str | None:
    # JAX tells the kind of an array, not of its shape.
    return str(jax.random.key_impl(jax.lax.full((), 0, leaf.dtype))) if is_key(leaf) else None
