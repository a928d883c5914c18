"""Weights into safetensors files: gathered leaf by leaf, large ones in several files with an index."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.checkpoint import leaves as codec
from jdist.checkpoint.fit import Only, Selection, first_few, name_of
from jdist.checkpoint.folder import check_room, describe_error, fsync
from jdist.cluster.runtime import Runtime, alone, together
from jdist.core.remote import fetched
from jdist.core.sharded_leaf import is_sharded_leaf, whole_on_host
from jdist.core.step_state import pack
from jdist.errors import CheckpointError
from jdist.support import checks
from jdist.support.file_lock import hold
from jdist.typing import PyTree
from jdist.weights.axes import View
from jdist.weights.files import DTYPES, INDEX, METADATA, NAME, local_path
from jdist.weights.rules import Rule, Rules, Source, parse_rules, sources_of

_TIMEOUT_S = 600.0
_CODES = {jnp.dtype(name): code for code, name in DTYPES.items()}
_MOST_FILES = 99_999


@dataclass
class _Tensor:
    """A tensor to write: its leaves and their views of it, and where it goes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    parts: list[tuple[str, View]]
    file: int = 0
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save(
    tree: PyTree,
    path: str | os.PathLike[str],
    rules: Rules | None = None,
    *,
    only: Only | None = None,
    max_file_bytes: int = 5_000_000_000,
    cluster: Runtime | None = None,
) -> tuple[Path, ...]:
    """Saves weights as safetensors files, which any strategy and number of devices can load again to the bit.

    A host holds one whole leaf and its tensor at a time. What is being written has a hidden name until all of it is on the
    disk; of several files the index comes last.

    Args:
        tree: parameters, or a state with `only`: arrays in any strategy's layout.
        path: a file, `.../model.safetensors`, or a folder for `model.safetensors`. More than `max_file_bytes` go into
            `model-00001-of-00002.safetensors` and so on, with `model.safetensors.index.json`, as Hugging Face's do.
        rules: which leaf is which tensor, as of `load`. None: names of leaves with "." between them.
        only: which leaves to save, as of `Checkpointer.restore`.
        max_file_bytes: how many bytes a file has at most; one tensor is in one file.
        cluster: the processes, `strategy.cluster`, which all call this; process 0 writes. None: this one alone.

    Returns:
        The files, the index last.

    Raises:
        CheckpointError: there is such a file already, a leaf has no rule, the rules do not fill a tensor, or the disk fails.

    Example:
        >>> import tempfile, jax.numpy as jnp, jdist
        >>> files = jdist.weights.save({"w": jnp.ones(4), "b": jnp.ones(4)}, tempfile.mkdtemp(), max_file_bytes=16)
        >>> [file.name for file in files]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json']
    """
    most = checks.whole_number("max_file_bytes", max_file_bytes, CheckpointError)
    selection = Selection(only)
    parsed = None if rules is None else parse_rules(rules)
    cluster = cluster or alone()
    leaves = codec.flatten(pack(fetched(tree)))
    with cluster.blocked():
        with together("saving weights", _TIMEOUT_S, cluster):
            names = {key: name_of(key) for key in leaves}
            selection.check_paths(list(names.values()))
            leaves = {names[key]: leaf for key, leaf in leaves.items() if selection.takes(names[key])}
            for name, leaf in leaves.items():
                codec.check_savable(name, leaf, cluster.num_processes)
            tensors = _tensors(leaves, parsed)
            count = _allot(tensors, most)
            folder = local_path(path)
            target = folder if folder.suffix == ".safetensors" else folder / NAME
            files = _file_names(target, count)
            # They must not be in one folder: readers differ in the one that they take.
            taken = dict.fromkeys([*files, target, _index_of(target)])
            if cluster.is_chief:
                _check_free(taken)
        _write_together(tensors, leaves, files, cluster)
    return tuple(files)


def _file_names(target: Path, count: int) -> list[Path]:
    if count == 1:
        return [target]
    if count > _MOST_FILES:
        raise CheckpointError(f"`max_file_bytes` makes {count:,} files of these weights; {_MOST_FILES:,} are possible")
    parts = [target.with_name(f"{target.stem}-{i:05d}-of-{count:05d}{target.suffix}") for i in range(1, count + 1)]
    return [*parts, _index_of(target)]


def _check_free(files: Iterable[Path]) -> None:
    """Refuses to save over a file."""
    for file in files:
        if file.exists():
            raise CheckpointError(f"{file}: is there already. Save elsewhere, or remove it first")


def _index_of(target: Path) -> Path:
    return target.with_name(target.name + INDEX)


def _tensors(leaves: Mapping[str, Any], rules: Sequence[Rule] | None) -> list[_Tensor]:
    """Lists the tensors that leaves make, those of one leaf one after the other."""
    sources: dict[str, list[tuple[str, Source]]] = {}
    problems: list[str] = []
    for name, leaf in leaves.items():
        if jnp.issubdtype(getattr(leaf, "dtype", np.int8), jax.dtypes.prng_key):
            problems.append(f"leaf {name}: is of PRNG keys; only arrays of numbers are in such files")
            continue
        groups = sources_of(rules, name, np.shape(leaf))
        if not groups:
            problems.append(f"leaf {name}: no rule is for it. Add one, or leave it out by `only`")
        for group in groups:
            sources.setdefault(group[0].names[0], []).append((name, group[0]))
    tensors = []
    for name, parts in sources.items():
        if name == METADATA:
            problems.append(f"leaf {parts[0][0]}: the file format reserves the tensor name {name}. Rename it by a rule")
            continue
        try:
            tensors.append(_tensor(name, parts, leaves))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"these weights cannot be saved:\n  {first_few(problems)}")
    if not tensors:
        raise CheckpointError("the state has no leaves to save")
    return tensors


def _tensor(name: str, parts: Sequence[tuple[str, Source]], leaves: Mapping[str, Any]) -> _Tensor:
    picked: dict[str, set[int]] = {}
    for _, source in parts:
        for axis, i in source.index.items():
            if axis in source.axes.of_tensor:
                picked.setdefault(axis, set()).add(i)
    lengths = {axis: max(indices) + 1 for axis, indices in picked.items()}
    views = [(leaf, View(source.axes, {**lengths, **source.sizes}, source.index)) for leaf, source in parts]
    shapes = {view.tensor_shape for _, view in views}
    dtypes = {np.dtype(_dtype(leaves[leaf])) for leaf, _ in views}
    named = ", ".join(leaf for leaf, _ in views[:5])
    if len(shapes) > 1 or len(dtypes) > 1:
        raise CheckpointError(f"tensor {name}: its leaves {named} do not agree on its shape or dtype")
    (shape,), (dtype,) = shapes, dtypes
    leaf_of: dict[frozenset[tuple[str, int]], str] = {}
    for leaf, source in parts:
        index = frozenset((axis, i) for axis, i in source.index.items() if axis in picked)
        if (other := leaf_of.setdefault(index, leaf)) != leaf:
            part = f"part {dict(index)}" if index else "all"
            raise CheckpointError(f"tensor {name}: leaf {other} and leaf {leaf} are both {part} of it")
    sizes = sum(
        math.prod(view.sizes[axis] for axis in view.axes.of_tensor if axis not in view.index) for _, view in views
    )
    if sizes != math.prod(shape):
        raise CheckpointError(f"tensor {name}: its leaves {named} fill {sizes:,} of its {math.prod(shape):,} elements")
    if dtype not in _CODES:
        raise CheckpointError(f"leaf {views[0][0]}: has dtype {dtype}; safetensors takes {', '.join(map(str, _CODES))}")
    return _Tensor(name, dtype, shape, views)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _allot(tensors: Sequence[_Tensor], most: int) -> int:
    """Assigns each tensor a file and an offset in it; returns the number of files."""
    file = used = 0
    for tensor in tensors:
        if used and used + tensor.num_bytes > most:
            file, used = file + 1, 0
        tensor.file = file
        used += tensor.num_bytes
    for _, group in itertools.groupby(tensors, key=lambda tensor: tensor.file):
        offset = 0
        # By size of elements, so that each tensor is aligned; as safetensors itself orders them.
        for tensor in sorted(group, key=lambda tensor: -tensor.dtype.itemsize):
            tensor.offset = offset
            offset += tensor.num_bytes
    return file + 1


def _header(tensors: Sequence[_Tensor]) -> bytes:
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}  # without it transformers refuses the file
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        at = [tensor.offset, tensor.offset + tensor.num_bytes]
        entries[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": at}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_together(
    tensors: Sequence[_Tensor], leaves: Mapping[str, Any], files: Sequence[Path], cluster: Runtime
) -> None:
    """Writes the files on process 0; the others take part in gathering the leaves, whatever befalls it."""
    with together("writing weights", _TIMEOUT_S, cluster), contextlib.ExitStack() as ends:
        writer = _Writer(tensors, files) if cluster.is_chief else None
        if writer is not None:
            writer.attempt(writer.begin, ends)
        for name, leaf in leaves.items():
            whole = _gather(leaf)  # by all processes, in the same order
            if writer is not None:
                writer.attempt(writer.add, name, whole)
            del whole
        if writer is not None:
            writer.attempt(writer.commit)
            if isinstance(writer.failure, OSError):
                raise CheckpointError(
                    f"{files[-1]}: cannot be written: {describe_error(writer.failure)}. Free or mend the disk."
                ) from writer.failure
            if writer.failure is not None:
                raise writer.failure


def _gather(leaf: Any) -> np.ndarray:
    """Copies a whole leaf to the host, from all processes that have parts of it, and keeps no other copy there."""
    stored = leaf.stored if is_sharded_leaf(leaf) else leaf
    if isinstance(stored, jax.Array) and not (stored.is_fully_addressable or stored.is_fully_replicated):
        return whole_on_host(leaf)
    (local,) = codec.to_host([leaf], codec.HostMemory(), is_chief=True)
    if [box.values.shape for box in local.boxes] == [local.shape]:
        return local.boxes[0].values
    whole = np.empty(local.shape, local.dtype)
    for start, values in local.boxes:
        whole[tuple(slice(at, at + size) for at, size in zip(start, values.shape, strict=True))] = values
    return whole


class _Writer:
    """Writes tensors into hidden files, in any order, and then gives these their names."""

    def __init__(self, tensors: Sequence[_Tensor], files: Sequence[Path]):
        self.failure: Exception | None = None
        self._tensors = tensors
        self._files = files
        self._hidden = [file.with_name(f".saving_{file.name}") for file in files]
        self._starts: list[int] = []
        self._by_leaf: dict[str, list[tuple[_Tensor, View]]] = {}
        for tensor in tensors:
            for leaf, view in tensor.parts:
                self._by_leaf.setdefault(leaf, []).append((tensor, view))
        self._begun: dict[str, tuple[np.ndarray, int]] = {}  # tensors of several leaves, and how many are there

    def attempt(self, do: Callable[..., None], *args: Any) -> None:
        """Calls a function unless an earlier one failed, and remembers its failure: others may wait for this process."""
        if self.failure is None:
            try:
                do(*args)
            except Exception as error:  # noqa: BLE001 - not swallowed: raised when all leaves are gathered
                self.failure = error

    def begin(self, ends: contextlib.ExitStack) -> None:
        """Makes the files, with their headers; `ends` removes those that have not got their names, at its end."""
        folder = self._files[0].parent
        folder.mkdir(parents=True, exist_ok=True)
        try:
            ends.enter_context(hold(self._hidden[0]))
        except BlockingIOError as error:
            raise CheckpointError(
                f"{self._files[0]}: is being saved already. Processes of one job save together, with "
                "`cluster=strategy.cluster`; others save elsewhere"
            ) from error
        ends.callback(self._clean)
        _check_free(self._files)  # another may have ended since
        check_room(folder, sum(tensor.num_bytes for tensor in self._tensors))
        groups = itertools.groupby(self._tensors, key=lambda tensor: tensor.file)
        for hidden, (_, group) in zip(self._hidden, groups, strict=False):  # the index comes at the end
            header = _header(list(group))
            self._starts.append(len(header))
            hidden.write_bytes(header)

    def add(self, leaf: str, values: np.ndarray) -> None:
        """Writes what a leaf makes whole."""
        values = np.ascontiguousarray(values).reshape(values.shape)  # which makes one axis of none
        for tensor, view in self._by_leaf[leaf]:
            array, count = self._begun.pop(tensor.name, (None, 0))
            array = np.empty(tensor.shape, tensor.dtype) if array is None else array
            view.read(values, array)
            if count + 1 < len(tensor.parts):
                self._begun[tensor.name] = array, count + 1
                continue
            with self._hidden[tensor.file].open("r+b") as file:
                file.seek(self._starts[tensor.file] + tensor.offset)
                file.write(array.reshape(-1).view(np.uint8).data)

    def commit(self) -> None:
        """Flushes the files and gives them their names, the index last."""
        if len(self._files) > 1:
            total = sum(tensor.num_bytes for tensor in self._tensors)
            where = {tensor.name: self._files[tensor.file].name for tensor in self._tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            self._hidden[-1].write_text(json.dumps(index, indent=2) + "\n")
        for hidden in self._hidden:
            fsync(hidden)
        for hidden, file in zip(self._hidden, self._files, strict=True):
            hidden.rename(file)
        fsync(self._files[0].parent)

    def _clean(self) -> None:
        """Removes what has not got its name."""
        for hidden in self._hidden:
            hidden.unlink(missing_ok=True)
