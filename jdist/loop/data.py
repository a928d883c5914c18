"""Batches of a user's data for a strategy, and the epochs that they make."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jdist.core.strategy import Strategy
from jdist.data import from_arrays, from_rows
from jdist.data.adapters.recognize import adapted, is_known
from jdist.data.dataset import DistributedDataset
from jdist.data.sources.protocol import RandomAccessSource
from jdist.data.sources.rows import Epochs, RowsByNumber, RowSource
from jdist.errors import DatasetError
from jdist.support import checks
from jdist.typing import PyTree

if TYPE_CHECKING:  # brings gRPC
    from jdist.ps.coordinator.datasets import WorkerDataset

_PASSED, _PASS = "passed", "pass"
_PLAIN = (
    "it is a plain iterable. Arrays, `jdist.data.from_arrays(...)`, and a source with `num_steps`, `global_batch`, "
    "`fingerprint` and `batch_at(step)` have a position"
)


@dataclass(kw_only=True)
class Feed:
    """Batches for the calls of a step, and the begins of epochs among them."""

    batches: DistributedDataset | WorkerDataset  # once through them is a *pass*
    kind: str  # of the user's data, for messages
    steps_per_epoch: int | None  # None: each pass is an epoch
    num_steps: int | None  # of all epochs; None: unknown before the end
    advice: str = _PLAIN  # why data has no position, and which data has one
    pads: bool = False  # batches will be filled up, as far as that is known before
    is_begun: bool = False  # data without a position was read before, and continues there
    _pass: int = 0  # number of the pass
    _passed: int = 0  # batches of this pass, of a `WorkerDataset`
    _skip: int = 0  # batches that its next pass leaves out

    @property
    def has_position(self) -> bool:
        """Returns whether the data can go on at any batch without reading those before it."""
        return isinstance(self.batches, DistributedDataset) and self.batches.is_resumable

    def one_pass(self) -> Iterator[PyTree]:
        """Yields the batches from the position to the end of the pass."""
        skip, self._skip, self._passed = self._skip, 0, 0
        for batch in self.batches:
            self._passed += 1
            if self._passed > skip:
                yield batch
            del batch  # so that a worker sees when nobody wants it any more

    def end_pass(self) -> None:
        """Ends the pass: a position that is saved now is the beginning of the next one."""
        self._pass, self._passed = self._pass + 1, 0
        if isinstance(self.batches, DistributedDataset):
            self.batches.rewind()

    def state(self) -> dict[str, Any]:
        """Saves the position in the pass; of data that has none, the number of its batches that were handed out."""
        if not isinstance(self.batches, DistributedDataset):
            return {_PASSED: self._passed}
        return self.batches.state() if self.has_position else {_PASSED: self.batches.position, _PASS: self._pass}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Goes to a saved position; data without one is read again up to there, unless it is begun."""
        if state is None:
            return
        if self.has_position or _PASSED not in state:
            if isinstance(self.batches, DistributedDataset):
                self.batches.restore(state)
        elif not self.is_begun and isinstance(self.batches, DistributedDataset):
            self._pass = state.get(_PASS, 0)  # its order may depend on it
            self.batches.skip(state[_PASSED], number=self._pass)
        elif not self.is_begun:
            self._skip = state[_PASSED]


def open_feed(
    data: Any,
    strategy: Strategy,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    global_batch: int | None = None,
    shuffle_seed: int | None = None,
    steps_per_epoch: int | None = None,
    steps_per_call: int = 1,
    batch_axis: Any = 0,
) -> Feed:
    """Distributes a user's data to a strategy's replicas, with arguments of `jdist.fit`."""
    # At most one of `epochs` and `steps` is given; neither means one pass. `steps_per_epoch` comes
    # with `steps`. `batch_axis` is the step's.
    kind = _kind(data)
    if is_arrays(data):
        if global_batch is None:
            raise DatasetError(
                "`global_batch` is missing: for arrays give the rows of a step over all replicas, for example "
                "global_batch=128."
            )
        _check_mask_has_a_place(data, strategy, global_batch)
        data = from_arrays(
            data,
            global_batch=global_batch,
            shuffle_seed=shuffle_seed,
            epochs=None if steps is not None else epochs or 1,
        )
    else:
        _check_is_data(data)
        data = _taken(data, kind, global_batch, shuffle_seed)
        if isinstance(data, Epochs) and data.steps_per_epoch is not None:
            data = _with_epochs(data, epochs, steps)
    if isinstance(data, Epochs) and data.steps_per_epoch is not None:
        batches = strategy.distribute_dataset(data, steps_per_call=steps_per_call, batch_axis=batch_axis)
        return Feed(
            batches=batches,
            kind=kind,
            steps_per_epoch=steps_per_epoch or data.steps_per_epoch,
            num_steps=data.num_steps,
            pads=_has_to_fill_up(data, strategy, steps),
        )
    if isinstance(data, DistributedDataset) or (strategy.coordinator is not None and _is_of_workers(data)):
        batches: Any = data
    elif callable(data):
        function: Any = data
        batches = strategy.distribute_datasets_from_function(
            function, steps_per_call=steps_per_call, batch_axis=batch_axis
        )
    else:
        batches = strategy.distribute_dataset(data, steps_per_call=steps_per_call, batch_axis=batch_axis)
    if epochs is not None and isinstance(batches, DistributedDataset) and batches.is_endless:
        raise DatasetError(
            f"`epochs` is {epochs}, but `data` is a {type(data).__name__} without end, so no epoch ends. Give "
            "`steps_per_epoch`, the length of an epoch, or `steps` instead of `epochs`."
        )
    num_steps = None
    if isinstance(batches, DistributedDataset) and batches.steps_per_pass is not None:
        num_steps = batches.steps_per_pass * (epochs or 1) - batches.position % batches.steps_per_pass
    return Feed(
        batches=batches,
        kind=kind,
        advice=getattr(data, "advice", _PLAIN),
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        is_begun=_is_begun(data),
    )


def _taken(data: Any, kind: str, global_batch: int | None, shuffle_seed: int | None) -> Any:
    """Makes a source of another library's dataset, in batches of its own or with `global_batch` of its rows."""
    if not is_known(data):
        for name, value in (("global_batch", global_batch), ("shuffle_seed", shuffle_seed)):
            if value is not None:
                raise DatasetError(
                    f"`{name}` is {value}, but `data` is {kind}, which has batches of its own. Leave it out, or give "
                    "arrays: a dict of numpy arrays of one length. For rows by number, such as a list of them, use "
                    "`jdist.data.from_rows(data, global_batch=...)`."
                )
        return data
    source = adapted(data, global_batch)
    if shuffle_seed is None:
        return source
    if global_batch is None or not isinstance(source, RowSource):
        raise DatasetError(
            f"`shuffle_seed` is {shuffle_seed}, but `data` is {kind}, and jdist does not shuffle that. Leave it out, and "
            "shuffle it by its own library."
        )
    return from_rows(data, global_batch=global_batch, shuffle_seed=shuffle_seed)


def check_filled(data: Any, global_batch: int | None) -> None:
    """Refuses batches of more than twice the rows that there are: they would be mostly padding."""
    if global_batch is not None:
        global_batch = checks.whole_number("global_batch", global_batch, DatasetError)
        data = adapted(data, global_batch)
    if isinstance(data, RowsByNumber):
        rows, batch = data.num_rows, data.global_batch
    elif is_arrays(data) and global_batch is not None:
        rows, batch = max((np.shape(leaf) or (0,))[0] for leaf in jax.tree.leaves(data)), global_batch
    else:
        return
    if batch > 2 * rows > 0:
        raise DatasetError(
            f"`global_batch` is {batch:,}, more than twice the {rows:,} rows that there are to train on: most of every step "
            f"would be padding. For all rows in every step say global_batch={rows}; a dataset that you distribute yourself, "
            "`strategy.distribute_dataset(jdist.data.from_arrays(...))`, is used unchanged."
        )


def _is_begun(data: Any) -> bool:
    """Returns whether data without a position was read before by this program."""
    if inspect.isgenerator(data):
        return inspect.getgeneratorstate(data) != inspect.GEN_CREATED
    return isinstance(data, DistributedDataset) and not data.is_resumable and data.position > 0


def _check_is_data(data: Any) -> None:
    """Refuses what is neither arrays nor a source of batches."""
    if isinstance(data, str | bytes | os.PathLike):
        raise DatasetError(
            f"`data` is the path {data!r}, not data. Give a dataset that reads it: `jdist.data.from_files([...], read, "
            "global_batch=...)`, or a dataset of Grain, Hugging Face or another library."
        )
    if isinstance(data, Mapping | tuple):
        leaves = jax.tree_util.tree_leaves_with_path(data, is_leaf=lambda x: not isinstance(x, Mapping | tuple))
        if not leaves:
            raise DatasetError(f"`data` is {data!r}, which has no arrays.")
        path, leaf = next((path, leaf) for path, leaf in leaves if not is_arrays(leaf))
        raise DatasetError(
            f"`data` has a {type(leaf).__name__} at {jax.tree_util.keystr(path)}, where an array of rows should be. Make it "
            "one: `np.asarray(...)`."
        )
    if not (callable(data) or isinstance(data, Iterable | RandomAccessSource)):
        raise DatasetError(
            f"`data` is a {type(data).__name__}: neither arrays nor a source of batches. After the step and the state give the "
            'data, such as {"x": x, "y": y}.'
        )


def _has_to_fill_up(source: Epochs, strategy: Strategy, steps: int | None) -> bool:
    """Returns whether a batch must be filled up before `steps` are made, as far as that is known."""
    if not isinstance(source, RowsByNumber):
        return False
    if source.global_batch % strategy.num_replicas:
        return True
    full, short = divmod(source.num_rows, source.global_batch)
    return bool(short) and not source.drop_short and (steps is None or steps > full)


def _check_mask_has_a_place(data: Any, strategy: Strategy, global_batch: int) -> None:
    """Refuses arrays outside of a dict where batches must be filled up."""
    if isinstance(data, Mapping):
        return
    rows = len(jax.tree.leaves(data)[0])
    if rows % global_batch or global_batch % strategy.num_replicas:
        raise DatasetError(
            f"`data` has {rows:,} rows, which do not divide into batches of {global_batch:,} over "
            f"{strategy.num_replicas} replicas: a batch must be filled up, and a mask says which of its rows are real. Give "
            'a dict, which has a place for the mask: {"x": data}, with batch["x"] and batch["mask"] in the step.'
        )


def _with_epochs(source: Epochs, epochs: int | None, steps: int | None) -> Epochs:
    """Sets a source's epochs: each draws a new order, which a second pass over the source would not do."""
    if epochs is not None and source.epochs not in (None, 1):
        raise DatasetError(
            f"`epochs` is {epochs}, and `data` has {source.epochs} epochs already. Leave one of them out."
        )
    if epochs is not None:
        return dataclasses.replace(source, epochs=epochs)
    return source if steps is None else dataclasses.replace(source, epochs=None)


def is_arrays(data: Any) -> bool:
    """Returns whether data is arrays of rows, no batches: a dict or tuple of arrays, or one array."""
    if isinstance(data, Mapping | tuple):
        leaves: Sequence[Any] = jax.tree.leaves(dict(data) if isinstance(data, Mapping) else data)
        return bool(leaves) and all(isinstance(x, np.ndarray | jax.Array) for x in leaves)
    return isinstance(data, np.ndarray | jax.Array)


def _is_of_workers(data: Any) -> bool:
    from jdist.ps.coordinator.datasets import WorkerDataset  # brings gRPC

    return isinstance(data, WorkerDataset)


def _kind(data: Any) -> str:
    if is_arrays(data):
        return "arrays"
    if isinstance(data, DistributedDataset) or not isinstance(data, Iterable):
        return f"a {type(data).__name__}"
    return f"a {type(data).__name__} of batches"
