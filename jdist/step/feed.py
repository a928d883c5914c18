"""How a strategy is fed: options settled, input pipelines called, several processes made to agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from jdist.core.strategy import Strategy
from jdist.data.batch_axis import check_axes, is_first, turned
from jdist.data.dataset import DistributedDataset
from jdist.data.options import InputContext, InputOptions
from jdist.data.peers import Peers
from jdist.data.process_shard import ProcessShard
from jdist.data.sources.replica_batches import from_function
from jdist.errors import DatasetError
from jdist.step import placement

PyTree = Any


def distribute_dataset(strategy: Strategy, source: Iterable[PyTree], options: dict[str, Any]) -> DistributedDataset:
    """`Strategy.distribute_dataset`."""
    chosen = settle(options["options"], options["prefetch"])
    check_axes(options["batch_axis"], DatasetError)
    if chosen.replication == "per_replica":
        raise DatasetError(
            'replication="per_replica" calls a dataset function for each replica, but `distribute_dataset` has one '
            "source of global batches. Use `strategy.distribute_datasets_from_function(fn, options)`, or leave it "
            'at "per_worker"'
        )
    source = turned(source, options["batch_axis"])
    return _feed(strategy, source, chosen, options, _peers(strategy, placement.share_of(strategy)))


def distribute_datasets_from_function(
    strategy: Strategy, fn: Callable[[InputContext], Any], options: dict[str, Any]
) -> DistributedDataset:
    """`Strategy.distribute_datasets_from_function`: one input pipeline, or one for each replica."""
    chosen = settle(options["options"], prefetch=None)
    if chosen.autoshard in ("file", "data"):
        raise DatasetError(
            f"autoshard={chosen.autoshard!r} shares out one source of global batches, but a dataset function makes each "
            "process its own. Leave `autoshard` out, and share in the function by `jdist.data.shard(source, "
            "context.num_input_pipelines, context.input_pipeline_id)`"
        )
    check_axes(options["batch_axis"], DatasetError)
    n, share = strategy.num_replicas, placement.share_of(strategy)

    def make_one(context: InputContext) -> Any:
        return turned(fn(context), options["batch_axis"])

    each = n // share.count if chosen.replication == "per_replica" else 1  # pipelines of a process
    contexts = [
        InputContext(
            num_input_pipelines=each * share.count, input_pipeline_id=share.index * each + i, num_replicas_in_sync=n
        )
        for i in range(each)
    ]

    def make() -> Any:
        return from_function(
            fn if is_first(options["batch_axis"]) else make_one, contexts, num_replicas=n // share.count
        )

    peers = _peers(strategy, share)
    source = make() if peers is None else peers.together("the dataset function", make, lambda _: None)[0]
    return _feed(strategy, source, replace(chosen, autoshard="off"), options, peers)


def settle(options: InputOptions | None, prefetch: int | None) -> InputOptions:
    """The input options, whichever way they were given.

    Args:
        options: all of them, or None.
        prefetch: the one that has a keyword of its own, or None.

    Raises:
        DatasetError: both were given, or `options` is something else.
    """
    if options is None:
        return InputOptions() if prefetch is None else InputOptions(prefetch=prefetch)
    if not isinstance(options, InputOptions):
        raise DatasetError(f"`options` must be a `jdist.InputOptions`, but it is a {type(options).__name__}")
    if prefetch is not None:
        raise DatasetError(
            f"`prefetch` is given twice: prefetch={prefetch!r}, and {options.prefetch} in `options`. Leave out the "
            f"keyword and write `options=jdist.InputOptions(prefetch={prefetch!r}, ...)`"
        )
    return options


_numbers = itertools.count(1)  # of the datasets of several processes, which make them in the same order


def _peers(strategy: Strategy, share: ProcessShard) -> Peers | None:
    """The processes that feed the strategy; None: this one alone, or they cannot reach each other."""
    exchanges = None if strategy.cluster is None else strategy.cluster.exchanges
    if share.count == 1 or exchanges is None:
        return None
    return Peers(exchanges=exchanges, share=share, name=f"dataset {next(_numbers)}")


def _feed(
    strategy: Strategy, source: Any, chosen: InputOptions, options: dict[str, Any], peers: Peers | None
) -> DistributedDataset:
    given = options | {
        "prefetch": chosen.prefetch,
        "prefetch_to_device": chosen.prefetch_to_device,
        "autoshard": chosen.autoshard,
        "peers": peers,
    }
    del given["options"]
    return placement.distribute_dataset(strategy, source, given)
