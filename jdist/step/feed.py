"""The feed of a strategy: calls input pipelines, makes processes agree, puts batches on the devices."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jdist.core.context import own_settings
from jdist.core.strategy import Strategy
from jdist.data.adapters.recognize import adapted
from jdist.data.batch_axis import check_axes, is_first, turn_back, turn_source
from jdist.data.dataset import DistributedDataset
from jdist.data.feed import distributed_dataset
from jdist.data.lockstep import Peers
from jdist.data.options import FeedOptions, InputContext
from jdist.data.process_shard import ProcessShard
from jdist.data.sources.replica_batches import from_function
from jdist.data.sources.shards import Policy
from jdist.errors import DatasetError
from jdist.step.placement import rows_sharding, share_of
from jdist.support.arrays import put_rows

PyTree = Any


def feed_batches(strategy: Strategy, source: Iterable[PyTree], options: FeedOptions) -> DistributedDataset:
    """Cuts global batches among the replicas: `Strategy.distribute_dataset`."""
    check_axes(options.batch_axis, DatasetError)
    if options.input.replication == "per_replica":
        raise DatasetError(
            'replication="per_replica" calls a dataset function for each replica, but `distribute_dataset` has one '
            "source of global batches. Use `strategy.distribute_datasets_from_function(fn, options)`, or leave it "
            'at "per_worker"'
        )
    source = turn_source(source, options.batch_axis)
    return _onto_devices(strategy, source, options, _peers(strategy, share_of(strategy)), options.input.autoshard)


def feed_pipelines(strategy: Strategy, fn: Callable[[InputContext], Any], options: FeedOptions) -> DistributedDataset:
    """Joins the batches of one input pipeline, or of one for each replica: `Strategy.distribute_datasets_from_function`."""
    if options.input.autoshard in ("file", "data"):
        raise DatasetError(
            f"autoshard={options.input.autoshard!r} shares out one source of global batches, but a dataset function makes each "
            "process its own. Leave `autoshard` out, and share in the function by `jdist.data.shard(source, "
            "context.num_input_pipelines, context.input_pipeline_id)`"
        )
    check_axes(options.batch_axis, DatasetError)
    n, share = strategy.num_replicas, share_of(strategy)

    def make_one(context: InputContext) -> Any:
        return turn_source(adapted(fn(context)), options.batch_axis)

    each = n // share.count if options.input.replication == "per_replica" else 1  # pipelines of a process
    contexts = [
        InputContext(
            num_input_pipelines=each * share.count, input_pipeline_id=share.index * each + i, num_replicas_in_sync=n
        )
        for i in range(each)
    ]

    def make() -> Any:
        return from_function(make_one if callable(fn) else fn, contexts, num_replicas=n // share.count)

    peers = _peers(strategy, share)
    source = make() if peers is None else peers.together("the dataset function", make, lambda _: None)[0]
    return _onto_devices(strategy, source, options, peers, "off")


_orders: weakref.WeakKeyDictionary[Strategy, dict[str, bool]] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)  # of datasets; all processes make them in the same order


def _peers(strategy: Strategy, share: ProcessShard) -> Peers | None:
    """Finds the processes that feed the strategy; None: this one alone, or they cannot reach each other."""
    exchanges = strategy.cluster.exchanges
    if share.count == 1 or exchanges is None:
        return None
    return Peers(exchanges=exchanges, share=share, name=f"dataset {next(_numbers)}")


def _onto_devices(
    strategy: Strategy, source: Any, options: FeedOptions, peers: Peers | None, autoshard: Policy
) -> DistributedDataset:
    """Makes a dataset on the strategy's devices of a source whose batches have their rows first."""
    batch_axis, lead = options.batch_axis, int(options.steps_per_call > 1)
    share = share_of(strategy)

    def turn(batch: PyTree) -> PyTree:
        return turn_back(batch, batch_axis, lead=lead)[0]

    def place_spec(spec: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x, axis: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows_sharding(strategy, lead=axis)),
            *turn_back(spec, batch_axis, lead=lead),
        )

    def place(batch: PyTree) -> PyTree:
        batch, axes = turn_back(batch, batch_axis, lead=lead)
        shardings = jax.tree.map(lambda axis: rows_sharding(strategy, lead=axis), axes)
        with own_settings(strategy):  # of the thread that puts batches on the devices
            if share.count == 1:
                return jax.device_put(batch, shardings)
            return jax.tree.map(
                lambda x, s, axis: put_rows(x, s, share.count * x.shape[axis], axis), batch, shardings, axes
            )

    on_host = None if is_first(batch_axis) else turn
    return distributed_dataset(
        source,
        num_replicas=strategy.num_replicas,
        place=on_host if strategy.mesh is None else place,
        place_spec=on_host if strategy.mesh is None else place_spec,
        partial=options.partial,
        with_mask=options.with_mask,
        steps_per_call=options.steps_per_call,
        shapes=options.shapes,
        prefetch=options.input.prefetch,
        prefetch_to_device=options.input.prefetch_to_device,
        share=share,
        autoshard=autoshard,
        peers=peers,
        orders=_orders.setdefault(strategy, {}),
    )
