"""The feed of a strategy: calls input pipelines, makes processes agree, puts batches on the devices."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jdist.core.context import own_settings
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import check_axes, is_first, on_host, turn_back
from jdist.data.dataset import DistributedDataset
from jdist.data.feed import distributed_dataset
from jdist.data.lockstep import Peers
from jdist.data.options import FeedOptions, InputContext
from jdist.data.position import ProcessShard
from jdist.data.sources.replica_batches import from_function
from jdist.errors import DatasetError
from jdist.step.placement import rows_sharding, share_of
from jdist.support.arrays import put_rows
from jdist.typing import PyTree


def feed_batches(strategy: Strategy, source: Iterable[PyTree], options: FeedOptions) -> DistributedDataset:
    """Cuts global batches among the replicas: `Strategy.distribute_dataset`."""
    check_axes(options.batch_axis, DatasetError)
    if options.input.replication == "per_replica":
        raise DatasetError(
            'replication="per_replica" calls a dataset function for each replica, but `distribute_dataset` takes one source. '
            "Use `strategy.distribute_datasets_from_function(fn, options)`"
        )
    dataset = distributed_dataset(source, _onto_devices(strategy, options))

    def renew(dataset: DistributedDataset) -> None:
        ours = dataclasses.replace(options, num_replicas=strategy.num_replicas)
        dataset.renew(distributed_dataset(source, _onto_devices(strategy, ours)))

    strategy.cluster.follow(dataset, renew)
    return dataset


def feed_pipelines(strategy: Strategy, fn: Callable[[InputContext], Any], options: FeedOptions) -> DistributedDataset:
    """Joins the batches of one input pipeline, or of one for each replica: `Strategy.distribute_datasets_from_function`."""
    if options.input.autoshard in ("file", "data"):
        raise DatasetError(
            f"autoshard={options.input.autoshard!r} shares out one source, but a dataset function makes one for each process. "
            "In it use `jdist.data.shard(source, context.num_input_pipelines, context.input_pipeline_id)`"
        )
    check_axes(options.batch_axis, DatasetError)
    if strategy.cluster.is_elastic:
        raise DatasetError(
            '`on_loss` is "continue", and a dataset function makes datasets for a number of processes that may change. Give '
            "one source of global batches to `distribute_dataset` or `fit`, such as `jdist.data.from_files(...)`."
        )
    own = dataclasses.replace(options.input, autoshard="off")
    options = _onto_devices(strategy, dataclasses.replace(options, input=own))
    n, share, peers = strategy.num_replicas, options.share, options.peers
    each = n // share.count if own.replication == "per_replica" else 1  # pipelines of a process
    contexts = [
        InputContext(
            num_input_pipelines=each * share.count, input_pipeline_id=share.index * each + i, num_replicas_in_sync=n
        )
        for i in range(each)
    ]

    def make() -> Any:
        return from_function(fn, contexts, num_replicas=n // share.count, batch_axis=options.batch_axis)

    source = make() if peers is None else peers.together("the dataset function", make, lambda _: None)[0]
    return distributed_dataset(source, dataclasses.replace(options, batch_axis=0))  # their rows are first now


_orders: weakref.WeakKeyDictionary[Strategy, dict[str, bool]] = weakref.WeakKeyDictionary()


def _peers(strategy: Strategy, share: ProcessShard) -> Peers | None:
    """Finds the processes that feed the strategy; None: this one alone, or they cannot reach each other."""
    exchanges = strategy.cluster.exchanges
    if share.count == 1 or exchanges is None:
        return None
    return Peers(exchanges=exchanges, share=share, name=f"dataset {strategy.cluster.next_number('dataset')}")


def _onto_devices(strategy: Strategy, options: FeedOptions) -> FeedOptions:
    """Completes options of a feed: by whom batches are shared, and how they get onto the strategy's devices."""
    lead, share = int(options.steps_per_call > 1), share_of(strategy)
    is_turned = not is_first(options.batch_axis)
    sharding_of = functools.cache(lambda axis: rows_sharding(strategy, lead=axis))

    def turned_back(tree: PyTree) -> tuple[PyTree, PyTree]:
        if is_turned:
            return turn_back(tree, options.batch_axis, lead=lead)
        return tree, jax.tree.map(lambda _: lead, tree)

    def place(batch: PyTree) -> PyTree:
        with own_settings(strategy):  # of the thread that puts batches on the devices
            if share.count == 1 and not is_turned:
                return jax.device_put(batch, sharding_of(lead))
            batch, axes = turned_back(batch)
            shardings = jax.tree.map(sharding_of, axes)
            if share.count == 1:
                return jax.device_put(batch, shardings)
            return jax.tree.map(
                lambda x, s, axis: put_rows(x, s, share.count * x.shape[axis], axis), batch, shardings, axes
            )

    def place_spec(spec: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x, axis: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(axis)), *turned_back(spec)
        )

    if strategy.mesh is None:
        options = on_host(options)
    else:
        options = dataclasses.replace(options, place=place, place_spec=place_spec)
    orders = _orders.setdefault(strategy, {})
    return dataclasses.replace(options, share=share, peers=_peers(strategy, share), orders=orders)
