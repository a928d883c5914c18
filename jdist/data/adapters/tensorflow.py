"""`tf.data`: its datasets have no position that a JSON could hold."""

from __future__ import annotations

from typing import Any

from jdist.data.adapters.recognize import refuse_rows
from jdist.data.sources.sequential import PlainSource


def dataset(dataset: Any, global_batch: int | None) -> PlainSource:
    """Adapts a `tf.data.Dataset`: of batches, or with `global_batch` of rows."""
    if global_batch is not None and _is_batched(dataset):
        refuse_rows("tf.data.Dataset", global_batch)
    if global_batch is not None:
        dataset = dataset.batch(global_batch)
    count = int(dataset.cardinality())
    return PlainSource(
        kind="tf.data.Dataset",
        begin=lambda _: iter(dataset.as_numpy_iterator()),
        advice="only TensorFlow's own checkpoints can save the iterator of a `tf.data.Dataset`. A grain MapDataset, or "
        "`jdist.data.from_rows(...)`, has a position",
        how_to_share="`dataset.shard(num_processes, process_index)`",
        num_steps=count if count >= 0 else None,  # below: without end, or not known
    )


def _is_batched(dataset: Any) -> bool:
    """Returns whether the elements are batches, as far as known: a function of `map` may do anything."""
    made_by = type(dataset).__name__
    if "Batch" in made_by and "Unbatch" not in made_by:
        return True
    inputs = dataset._inputs()
    if not inputs or any(word in made_by for word in ("Unbatch", "FlatMap", "Interleave")):
        return False
    return all(map(_is_batched, inputs))
