"""Grain's datasets: a `MapDataset` has random access, an `IterDataset` and a `DataLoader` have a state."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import flags  # comes with Grain

from jdist.data.adapters.recognize import refuse_rows
from jdist.data.sources.elements import Elements, content_hash
from jdist.data.sources.rows import BatchSource, RowSource
from jdist.data.sources.sequential import Batches, SequentialSource
from jdist.errors import DatasetError
from jdist.typing import PyTree

_WORKERS = 4  # threads that read batches; Grain's own default is 16, which hold 500 batches
# Transformations of one element each, which has the same number before and after.
_SAME_INDEX = (
    "MapMapDataset",
    "RandomMapMapDataset",
    "MapWithIndexMapDataset",
    "FilterMapDataset",
    "_WithSeedMapDataset",
)
_SAME_ORDER = (
    "MapIterDataset",
    "RandomMapIterDataset",
    "MapWithIndexIterDataset",
    "WithOptionsIterDataset",
    "_WithSeedIterDataset",
    "_OutputIterDataset",
    "ThreadPrefetchIterDataset",
    "ProcessPrefetchIterDataset",
    "_MpContextIterDataset",
    "_LazyWorkerSliceIterDataset",
    "_DataLoaderStateIterDataset",
    "_DataLoaderPipelineMarkerIterDataset",
)
_MOST_NAMED = 8  # elements in one message


class GrainElements(Elements):
    """The elements of a `grain.MapDataset`; a random one changes them in each epoch."""

    # `stack` joins a list of elements to a batch; None: the elements are batches. `is_fresh`:
    # nobody else has the memory of what they return.

    kind = "grain MapDataset"

    def __init__(self, dataset: Any, stack: Callable[[list[Any]], PyTree] | None, *, is_fresh: bool):
        self._dataset = dataset
        self._stack_rows = stack
        self.is_fresh = is_fresh

    def __len__(self) -> int:
        return len(self._dataset)

    def name(self, number: int, epoch: int) -> str:
        return _row_text(self._dataset, epoch * len(self) + number, number, epoch)

    def _read(self, number: int, epoch: int) -> PyTree:
        element = self._dataset[epoch * len(self) + number]
        if element is None:
            raise DatasetError(
                f"element {number:,} of the grain MapDataset is None: a filter has left it out, so its rows cannot be counted "
                "by number. Convert it before batching: `dataset.to_iter_dataset().batch(...)`"
            )
        return element

    def _stack(self, rows: list[PyTree]) -> PyTree:
        assert self._stack_rows is not None, "the elements are rows"
        batch = self._stack_rows(rows)
        return jax.tree.map(np.array, batch) if len(rows) == 1 else batch  # else a view of the row

    def _identify(self) -> dict[str, str]:
        sources = [node for node in _nodes(self._dataset) if not getattr(node, "parents", ())]
        return {"pipeline": _pipeline_hash(self._dataset), "content": content_hash(sources)}


def map_dataset(dataset: Any, global_batch: int | None) -> RowSource | BatchSource:
    """Adapts a `grain.MapDataset`: of batches, or with `global_batch` of rows."""
    is_batched = any(type(node).__name__ == "BatchMapDataset" for node in _nodes(dataset))
    if global_batch is not None:
        if is_batched:
            refuse_rows("grain MapDataset", global_batch)
        dataset = dataset.batch(global_batch)
    # Only a batch that Grain itself stacks is the same whether its rows are stacked together or in parts.
    if type(dataset).__name__ == "BatchMapDataset" and _is_of_grain(dataset._batch_fn):
        return RowSource(
            elements=GrainElements(dataset.parents[0], dataset._batch_fn, is_fresh=True),
            global_batch=dataset._batch_size,
            drop_short=dataset._drop_remainder,
            workers=_WORKERS,
        )
    return BatchSource(elements=GrainElements(dataset, None, is_fresh=False), workers=_WORKERS)


def _is_of_grain(function: Any) -> bool:
    return getattr(function, "__module__", type(function).__module__).partition(".")[0] == "grain"


def _pipeline_hash(dataset: Any) -> str:
    """Hashes the transformations of a dataset: their names and their numbers, such as seeds and sizes."""
    steps = []
    for node in _nodes(dataset):
        settings = {
            name: value
            for name, value in vars(node).items()
            # Values that change in use do not count: `has_child`, and what a class computes under the same name.
            if isinstance(value, str | bool | int | float) and name != "has_child" and not hasattr(type(node), name)
        }
        steps.append([type(node).__name__, sorted(settings.items())])
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", json.dumps(steps)).encode()).hexdigest()[:12]


class GrainSource(SequentialSource):
    """Batches of what Grain iterates over: its iterators have `get_state` and `set_state`."""

    how_to_share = (
        "`shard_options=grain.sharding.ShardByJaxProcess()` of a DataLoader, or `dataset[process_index::num_processes]` of "
        "the MapDataset that it begins with"
    )

    def __init__(
        self,
        kind: str,
        make: Callable[[], Any],
        pipeline: str,
        own_part: tuple[int, int] | None = None,
        dataset: Any = None,
    ):
        self.kind = kind
        self._make = make
        self._pipeline = pipeline
        self.own_part = own_part
        self._dataset = dataset  # makes the batches; None: not known

    def open(self, epoch: int, state: Any) -> Batches:
        if not flags.FLAGS.is_parsed():  # by absl's `app.run`; Grain's workers ask for their defaults
            flags.FLAGS.mark_as_parsed()
        iterator = self._make()
        if state is not None:
            iterator.set_state(state)
        return ((batch, self._state(iterator)) for batch in iterator)

    @property
    def fingerprint(self) -> str:
        return f"kind={self.kind.replace(' ', '_')} pipeline={self._pipeline}"

    def describe_batch(self, number: int, error: Exception) -> str | None:
        return None if self._dataset is None else _batch_text(self._dataset, number, error)

    def _state(self, iterator: Any) -> Any:
        return iterator.get_state()


class DataLoaderSource(GrainSource):
    """Batches of a `grain.DataLoader`; its state is kept as values, and written when a pass is opened."""

    # Its iterators write their state as JSON, which would be most of the adapter's cost.

    def open(self, epoch: int, state: Any) -> Batches:
        return super().open(epoch, _written(state))

    def _state(self, iterator: Any) -> Any:
        inner: Any = getattr(iterator, "_iterator", None)
        # Of another version of Grain, or with a FlatMap, the state is written otherwise.
        is_known = type(inner).__name__ == "_DataLoaderStateDatasetIterator"
        return inner.get_state() if is_known else iterator.get_state()


def _written(state: Any) -> Any:
    """Writes the state of a DataLoader's iterator as its own `get_state` does."""
    return json.dumps(state, indent=4).encode() if isinstance(state, dict) else state


def iter_dataset(dataset: Any, global_batch: int | None) -> GrainSource:
    """Adapts a `grain.IterDataset`: of batches, or with `global_batch` of rows."""
    if global_batch is not None:
        if any(type(node).__name__.startswith("Batch") for node in _nodes(dataset)):
            refuse_rows("grain IterDataset", global_batch)
        dataset = dataset.batch(global_batch)
    return GrainSource("grain IterDataset", lambda: iter(dataset), _pipeline_hash(dataset), dataset=dataset)


def data_loader(loader: Any, global_batch: int | None) -> GrainSource:
    """Adapts a `grain.DataLoader`; its state names its sampler and its source."""
    refuse_rows("grain DataLoader", global_batch)
    options = loader._shard_options
    part = (options.shard_index, options.shard_count) if options.shard_count > 1 else None
    return DataLoaderSource("grain DataLoader", lambda: iter(loader), "its_own", part, loader._dataset)


def iterator(iterator: Any, global_batch: int | None) -> GrainSource:
    """Adapts an iterator of Grain, which goes on where it is, and to which each pass returns."""
    kind = f"grain {type(iterator).__name__}"
    refuse_rows(kind, global_batch)
    begin = iterator.get_state()

    def make() -> Any:
        iterator.set_state(begin)
        return iterator

    return GrainSource(kind, make, "its_own")


def _nodes(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and all those that it is made of."""
    yield dataset
    interleaved = getattr(dataset, "_datasets", None) or ()  # of worker processes too, which Grain interleaves
    for parent in (*(getattr(dataset, "parents", ()) or ()), *(interleaved if isinstance(interleaved, list) else ())):
        yield from _nodes(parent)


def _row_text(dataset: Any, index: int, number: int, epoch: int) -> str:
    """Describes an element of a MapDataset: its number, and its record in the data source as far as that is known."""
    text = f"element {number:,} (from 0)" + (f" of epoch {epoch:,}" if epoch else "")
    try:
        found = _record(dataset, index)
    except (AttributeError, TypeError, ValueError):  # another version of Grain, with other nodes
        found = None
    return text if found is None else f"{text}, {found}"


def _batch_text(dataset: Any, number: int, error: Exception) -> str | None:
    """Describes the MapDataset elements in a batch of an IterDataset; None if they are unknown."""
    # The elements are read again, one by one: the one that raises the same error again is named, or
    # else all of them. They are unknown behind a filter, a mixture or packing, or if a worker died,
    # which reading would do to this process.
    if isinstance(error, RuntimeError) and "terminated unexpectedly" in str(error):
        return None
    try:
        found = list(_elements(dataset, number, 0, 1, ()))
    except (AttributeError, TypeError, ValueError):
        return None
    for node, index, maps in found:
        try:
            element = node[index]
            for function in maps:
                element = function(element)
        except Exception as again:  # noqa: BLE001 - compared; the first one is raised
            if type(again) is type(error) and str(again) == str(error):
                return _row_text(node, index, *_within_epoch(node, index))
    texts = [_row_text(node, index, *_within_epoch(node, index)) for node, index, _ in found]
    more = len(texts) - _MOST_NAMED
    return "one of " + "; ".join(texts[:_MOST_NAMED]) + (f"; and {more:,} more" if more > 0 else "")


def _within_epoch(node: Any, index: int) -> tuple[int, int]:
    epoch, number = divmod(index, len(node))
    return number, epoch


def _elements(node: Any, number: int, worker: int, workers: int, maps: tuple) -> Iterator[tuple[Any, int, tuple]]:
    """Yields the MapDatasets and indexes that element `number` of a dataset is made of."""
    # `worker` of `workers` processes makes it; each has every n-th element. `maps` are applied to
    # each element before a batch is made.
    name = type(node).__name__
    if name == "InterleaveIterDataset" and isinstance(node._datasets, list) and workers == 1:
        count = len(node._datasets)
        yield from _elements(node._datasets[number % count], number // count, number % count, count, maps)
    elif name == "BatchIterDataset":
        for row in range(number * node._batch_size, (number + 1) * node._batch_size):
            yield from _elements(node.parents[0], row, worker, workers, ())
    elif name == "PrefetchIterDataset":
        yield from _indexed(node.parents[0], worker + workers * number, maps)
    elif name in _SAME_ORDER and not getattr(node, "_sequential_slice", False):
        if name == "MapIterDataset":
            maps = (node._map_fn, *maps)
        yield from _elements(node.parents[0], number, worker, workers, maps)
    else:
        raise ValueError("a transformation after which nobody knows which elements came")


def _indexed(node: Any, index: int, maps: tuple) -> Iterator[tuple[Any, int, tuple]]:
    """Yields the elements of a MapDataset's element: those in it if it is a batch."""
    names = [type(each).__name__ for each in _nodes(node)]
    if any(name == "FilterMapDataset" for name in names):  # its elements are left out of the iteration
        raise ValueError("a transformation after which nobody knows which elements came")
    if "BatchMapDataset" not in names:
        if index < len(node):
            yield node, index, maps
        return
    while type(node).__name__ in _SAME_INDEX:
        (node,) = node.parents
    if type(node).__name__ != "BatchMapDataset":
        raise ValueError("a transformation after which nobody knows which elements came")
    (rows,) = node.parents
    epoch, within = divmod(index, len(node))
    for row in range(within * node._batch_size, min((within + 1) * node._batch_size, len(rows))):
        yield rows, epoch * len(rows) + row, ()


def _record(node: Any, index: int) -> str | None:
    """Follows an index through shuffles, slices and maps down to the source; None where another transformation is met."""
    while True:
        name = type(node).__name__
        if name == "SourceMapDataset":
            source = node._source
            record = index % len(source)
            return f"record {record:,} of the {type(source).__name__}{_file_of(source, record)}"
        if name in ("ShuffleMapDataset", "WindowShuffleMapDataset"):
            index = node._shuffled_index(index)
        elif name == "SliceMapDataset":
            index = node._sliced_index(index)
        elif name == "RepeatMapDataset":
            index = index if node._reseed_each_epoch else index % len(node.parents[0])
        elif name == "_SamplerMapDataset":
            options = node._shard_options
            index = node._sampler[index * options.shard_count + options.shard_index].record_key
        elif name not in _SAME_INDEX:
            return None
        (node,) = node.parents


def _file_of(source: Any, record: int) -> str:
    """Names the file of an `ArrayRecordDataSource`'s record, and its place in it."""
    if type(source).__name__ != "ArrayRecordDataSource":
        return ""
    reader, position = source._reader_idx_and_position(record)
    return f": record {position:,} of {source._paths[reader]!r}"
