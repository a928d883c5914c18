"""Names the file and the record that an element of a Grain dataset comes from, for errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


class _Unknown(Exception):
    """A transformation after which nobody knows which elements came."""


def nodes(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and all those that it is made of."""
    yield dataset
    interleaved = getattr(dataset, "_datasets", None) or ()  # of worker processes too, which Grain interleaves
    for parent in (*(getattr(dataset, "parents", ()) or ()), *(interleaved if isinstance(interleaved, list) else ())):
        yield from nodes(parent)


def row_text(dataset: Any, index: int, number: int, epoch: int) -> str:
    """Describes an element of a MapDataset: its number, and its record in the data source as far as that is known."""
    text = f"element {number:,} (from 0)" + (f" of epoch {epoch:,}" if epoch else "")
    try:
        found = _record(dataset, index)
    except (AttributeError, TypeError, ValueError):  # of another version of Grain, whose nodes look otherwise
        found = None
    return text if found is None else f"{text}, {found}"


def batch_text(dataset: Any, number: int, error: Exception) -> str | None:
    """Describes the MapDataset elements in a batch of an IterDataset; None if they are unknown."""
    # The elements are read again, one by one: the one that raises the same error again is named, or
    # else all of them. They are unknown behind a filter, a mixture or packing, or if a worker died,
    # which reading would do to this process.
    if isinstance(error, RuntimeError) and "terminated unexpectedly" in str(error):
        return None
    try:
        found = list(_elements(dataset, number, 0, 1, ()))
    except (_Unknown, AttributeError, TypeError, ValueError):
        return None
    for node, index, maps in found:
        try:
            element = node[index]
            for function in maps:
                element = function(element)
        except Exception as again:  # noqa: BLE001 - compared; the first one is raised
            if type(again) is type(error) and str(again) == str(error):
                return row_text(node, index, *_within_epoch(node, index))
    texts = [row_text(node, index, *_within_epoch(node, index)) for node, index, _ in found]
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
        raise _Unknown


def _indexed(node: Any, index: int, maps: tuple) -> Iterator[tuple[Any, int, tuple]]:
    """Yields the elements of a MapDataset's element: those in it if it is a batch."""
    names = [type(each).__name__ for each in nodes(node)]
    if any(name == "FilterMapDataset" for name in names):  # its elements are left out of the iteration
        raise _Unknown
    if "BatchMapDataset" not in names:
        if index < len(node):
            yield node, index, maps
        return
    while type(node).__name__ in _SAME_INDEX:
        (node,) = node.parents
    if type(node).__name__ != "BatchMapDataset":
        raise _Unknown
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
