"""Checkpoints of jdist's, rewritten by Orbax for programs that use it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jdist.checkpoint import folder as disk
from jdist.checkpoint.bucket import open_path
from jdist.checkpoint.checkpointer import Checkpointer, CheckpointWarning
from jdist.checkpoint.folder import describe_error
from jdist.checkpoint.job import Job
from jdist.checkpoint.orbax import CARRIED, TIMEOUT_S, Names, as_orbax_takes, import_orbax
from jdist.checkpoint.pieces import read_leaves
from jdist.core.sharded_leaf import is_sharded_leaf
from jdist.errors import CheckpointError
from jdist.support import checks
from jdist.support.arrays import is_key
from jdist.support.leaves import names_in
from jdist.support.tracebacks import callers_level
from jdist.typing import PyTree


def to_orbax(
    directory: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    step: int | None = None,
    like: PyTree | None = None,
) -> int:
    """Rewrites a checkpoint of jdist's by Orbax's `CheckpointManager`, for programs that read those.

    Such a program needs no change: `CheckpointManager(to).restore(step)` gives the tree by names, and its custom metadata has
    the position in the data, metrics and metadata. Arrays without elements, which Orbax does not take, are left out with a
    warning; with `like` they are refused. The whole checkpoint passes through this host's memory.

    Args:
        directory: of the `Checkpointer`.
        to: the `CheckpointManager`'s directory, made if need be.
        step: which step; None: the one saved last.
        like: the state; with it the tree is written with its own nodes, those without leaves among them (optax's), so that
            a program can restore into the same `TrainState`. Without it nodes are dicts and lists, and no code of the
            state's is needed.

    Returns:
        The step that was written.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, Orbax has that step already or refuses.

    Example:
        >>> import tempfile, jax.numpy as jnp, orbax.checkpoint as ocp, jdist
        >>> folder, to = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> with jdist.train.Checkpointer(folder) as checkpoints:
        ...     checkpoints.save(10, {"w": jnp.arange(3.0)})
        >>> jdist.train.to_orbax(folder, to)
        10
        >>> with ocp.CheckpointManager(to) as manager:
        ...     manager.restore(10, args=ocp.args.StandardRestore())["w"].tolist()
        [0.0, 1.0, 2.0]
    """
    ocp = import_orbax(to)
    path = _find_saved(directory, step)
    if like is None:
        body, tree = _tree_of_names(path)
    else:
        with Checkpointer(directory) as checkpoints:
            restored = checkpoints.restore(like, step=disk.step_of(path))  # and none before it
        assert restored is not None, "there is this step"
        tree = jax.tree.map(_on_host, restored.state, is_leaf=is_sharded_leaf)
        body = {name: getattr(restored, name) for name in ("step", "data", "metrics", "metadata")}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    try:
        with ocp.CheckpointManager(as_orbax_takes(to), options=options) as manager:
            if body["step"] in manager.all_steps():
                raise CheckpointError(f"{to}: Orbax has step {body['step']} here; give another directory")
            notes = {name: body[name] for name in ("data", "metrics", "metadata")}
            manager.save(body["step"], args=ocp.args.StandardSave(tree), custom_metadata=notes, force=True)
            manager.wait_until_finished()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{to}: Orbax cannot write step {body['step']}: {describe_error(error)}") from error
    return body["step"]


def _find_saved(directory: str | os.PathLike[str], step: int | None) -> disk.Place:
    """Finds the checkpoint of jdist's that was saved last, or last of a step."""
    if step is not None:
        step = checks.whole_number("step", step, CheckpointError, least=0, fix="None takes the newest.")
    folder = open_path(directory, TIMEOUT_S)
    paths = disk.list_committed(folder)
    if step is not None:
        paths = [path for path in paths if disk.step_of(path) == step]
    if not paths:
        raise CheckpointError(f"{folder}: found no checkpoint{'' if step is None else f' of step {step}'}")
    return paths[-1]


def _tree_of_names(path: disk.Place) -> tuple[dict[str, Any], PyTree]:
    """Reads a checkpoint of jdist's as nested dicts and lists; also returns the body of its manifest."""
    body = disk.read_manifest(path)
    leaves: dict[Names, Any] = {}
    left: list[str] = []
    begun_s = time.monotonic()
    reading = read_leaves(path, body, dict.fromkeys(range(len(body["leaves"]))))
    while (arrays := Job(lambda: next(reading, None)).result(TIMEOUT_S, f"reading {path}", begun_s)) is not None:
        for number, array in arrays.items():
            leaf = body["leaves"][number]
            if not array.size:
                left.append(leaf["path"])
                continue
            added = CARRIED.match(leaf["path"])
            names = (added[1].strip(), *names_in(added[2])) if added else names_in(leaf["path"]) or ("state",)
            leaves[names] = _value(array, leaf)
    if left:
        text = f"{path}: Orbax takes no arrays without elements; left out: {', '.join(left)}"
        warnings.warn(text, CheckpointWarning, stacklevel=callers_level())
    return body, _with_lists(unflatten_dict(leaves))


def _value(array: np.ndarray, leaf: Mapping[str, Any]) -> Any:
    if leaf["dtype"].startswith("python "):
        return array.item()
    return jax.random.wrap_key_data(jnp.asarray(array), impl=leaf["key"]) if leaf.get("key") else array


def _on_host(leaf: Any) -> Any:
    return leaf if is_key(leaf) else np.asarray(leaf)


def _with_lists(tree: Any) -> Any:
    """Turns nodes named 0, 1, 2, ... into lists."""
    if not isinstance(tree, dict):
        return tree
    nodes = {name: _with_lists(node) for name, node in tree.items()}
    numbers = [str(i) for i in range(len(nodes))]
    return [nodes[number] for number in numbers] if nodes and set(nodes) == set(numbers) else nodes
