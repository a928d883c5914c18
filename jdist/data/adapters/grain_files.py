"""Names the file and the record that an element of a Grain dataset comes from, for errors."""

from __future__ import annotations

from typing import Any

_SAME_INDEX = (
    "MapMapDataset",
    "RandomMapMapDataset",
    "MapWithIndexMapDataset",
    "FilterMapDataset",
    "_WithSeedMapDataset",
)


def row_text(dataset: Any, index: int, number: int, epoch: int) -> str:
    """Describes an element of a MapDataset: its number, and its record in the data source as far as that is known."""
    text = f"element {number:,} (from 0)" + (f" of epoch {epoch:,}" if epoch else "")
    try:
        found = _record(dataset, index)
    except (AttributeError, TypeError, ValueError):  # of another version of Grain, whose nodes look otherwise
        found = None
    return text if found is None else f"{text}, {found}"


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
        elif name not in _SAME_INDEX:
            return None
        (node,) = node.parents


def _file_of(source: Any, record: int) -> str:
    """Names the file of an `ArrayRecordDataSource`'s record, and its place in it."""
    if type(source).__name__ != "ArrayRecordDataSource":
        return ""
    reader, position = source._reader_idx_and_position(record)
    return f": record {position:,} of {source._paths[reader]!r}"
