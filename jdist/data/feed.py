"""The way from a source to the dataset that feeds replicas: checks, the readers of this process, options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jdist.data.adapters.recognize import adapted
from jdist.data.batching import PARTIALS, DatasetOptions, Partial, check_divisible
from jdist.data.dataset import DistributedDataset
from jdist.data.lockstep import Peers
from jdist.data.process_shard import WHOLE, ProcessShard
from jdist.data.readers import GlobalReader, make_reader
from jdist.data.sources.arrays import ArraySource
from jdist.data.sources.protocol import RandomAccessSource, check_source, whole_number
from jdist.data.sources.replica_batches import RandomAccessReplicaBatches, ReplicaBatches
from jdist.data.sources.rows import RowSource
from jdist.data.sources.shards import Policy
from jdist.errors import DatasetError
from jdist.support.suggest import did_you_mean

PyTree = Any


def distributed_dataset(
    source: Iterable[PyTree] | RandomAccessSource,
    *,
    num_replicas: int,
    place: Callable[[PyTree], PyTree] | None,
    place_spec: Callable[[PyTree], PyTree] | None = None,
    partial: Partial = "pad",
    with_mask: bool = False,
    steps_per_call: int = 1,
    shapes: int = 1,
    prefetch: int = 2,
    prefetch_to_device: bool = True,
    share: ProcessShard = WHOLE,
    autoshard: Policy = "auto",
    peers: Peers | None = None,
    orders: dict[str, bool] | None = None,
) -> DistributedDataset:
    """Feeds the batches of a source to replicas; `strategy.distribute_dataset` calls this.

    Args:
        source: an iterable of numpy pytrees with leaves [rows, ...], one global batch each; or a random-access source.
        num_replicas: how many replicas share the rows of a global batch.
        place: puts a host batch with leaves [rows, ...] ([steps, rows, ...] with `steps_per_call` above 1) on the devices;
            called from the prefetch thread (see `prefetch_to_device`), where a consumer's `with
            jax.default_device(...)` or the like does not reach. None leaves batches on the host.
        place_spec: maps the tree of `element_spec`, for example to add shardings. None leaves it.
        partial: what to do with a batch that has fewer rows than the first: "pad" fills it up and masks the filling,
            "drop" leaves it out, "error" refuses it. "pad" also rounds the global batch up to a multiple of
            `num_replicas`; the others require that it divides.
        with_mask: yield `(batch, mask)`; else a dict gains a `mask` leaf, and other trees have no mask.
        steps_per_call: stack this many batches on a new leading axis. The rest at the end comes as a smaller stack, which
            compiles a step once more.
        shapes: how many shapes the batches may have, see `Strategy.distribute_dataset`.
        prefetch: how many (stacks of) batches a background thread makes ahead; 0: none, and no thread.
        prefetch_to_device: whether that thread calls `place`; False: the consumer's does, when it takes a batch.
        share: which rows of each global batch this process makes; `place` gets these alone.
        autoshard: how several processes share the source, see `jdist.InputOptions`.
        peers: by which several processes agree on what each has; None: they all read the same.
        orders: of the shuffled sources that were read to their end under the same strategy, so that a repeat is told.

    Raises:
        DatasetError: the source is empty or not a source, an option is out of range, or the processes' sources do
            not go together.
        BatchError: the global batch of a random-access source does not divide where `partial` requires it.

    Example:
        >>> import numpy as np
        >>> from jdist.data import distributed_dataset, from_arrays
        >>> source = from_arrays({"x": np.arange(3)}, global_batch=2)
        >>> [b["mask"].tolist() for b in distributed_dataset(source, num_replicas=2, place=None)]
        [[True, True], [True, False]]
    """
    if partial not in PARTIALS:
        hint = did_you_mean(partial, PARTIALS)
        raise DatasetError(f"`partial` must be one of {', '.join(PARTIALS)}, but it is {partial!r}.{hint}")
    whole_number(num_replicas, name="num_replicas", least=1)
    whole_number(steps_per_call, name="steps_per_call", least=1)
    whole_number(prefetch, name="prefetch", least=0)
    if whole_number(shapes, name="shapes", least=1) > 1 < steps_per_call:
        raise DatasetError(
            f"`shapes` is {shapes} and `steps_per_call` is {steps_per_call}: the batches of one call are stacked, so they need "
            "one shape. Leave one of them at 1"
        )
    source = adapted(source)
    check_source(source)
    reader = make_reader(
        source, share=share, num_replicas=num_replicas, autoshard=autoshard, peers=peers, shapes=shapes
    )
    if partial == "drop" and isinstance(reader, GlobalReader) and isinstance(reader.source, ArraySource | RowSource):
        # So that its steps count, and number, the batches that are left.
        reader = GlobalReader(reader.source.without_short(), share, num_replicas, shapes=reader.shapes)
    options = DatasetOptions(
        num_replicas=num_replicas,
        place=place,
        place_spec=place_spec,
        partial=partial,
        with_mask=with_mask,
        steps_per_call=steps_per_call,
        shapes=shapes,
        prefetch=prefetch,
        prefetch_to_device=prefetch_to_device,
        share=share,
        copy=not (
            isinstance(source, ArraySource | RandomAccessReplicaBatches | ReplicaBatches)
            or getattr(source, "is_fresh", False)
        ),
    )
    if reader.resumable is not None and reader.full is not None:
        check_divisible(reader.full, options)
    return DistributedDataset(reader, options, orders)
