"""How a strategy whose replicas one process drives is fed: options settled, input pipelines called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jdist.data.distribute import DistributedDataset
from jdist.data.input_context import InputContext
from jdist.data.input_options import InputOptions
from jdist.data.replica_batches import from_function
from jdist.errors import DatasetError
from jdist.strategy import Strategy
from jdist.transforms import placement

PyTree = Any


def distribute_dataset(strategy: Strategy, source: Iterable[PyTree], options: dict[str, Any]) -> DistributedDataset:
    """`Strategy.distribute_dataset`."""
    chosen = settle(options["options"], options["prefetch"])
    if chosen.replication == "per_replica":
        raise DatasetError(
            'replication="per_replica" calls a dataset function for each replica, but `distribute_dataset` has one '
            "source of global batches. Use `strategy.distribute_datasets_from_function(fn, options)`, or leave it "
            'at "per_worker"'
        )
    return _feed(strategy, source, chosen, options)


def distribute_datasets_from_function(
    strategy: Strategy, fn: Callable[[InputContext], Any], options: dict[str, Any]
) -> DistributedDataset:
    """`Strategy.distribute_datasets_from_function`: one input pipeline, or one for each replica."""
    chosen = settle(options["options"], prefetch=None)
    n = strategy.num_replicas
    pipelines = n if chosen.replication == "per_replica" else 1
    contexts = [
        InputContext(num_input_pipelines=pipelines, input_pipeline_id=i, num_replicas_in_sync=n)
        for i in range(pipelines)
    ]
    return _feed(strategy, from_function(fn, contexts, num_replicas=n), chosen, options)


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


def _feed(strategy: Strategy, source: Any, chosen: InputOptions, options: dict[str, Any]) -> DistributedDataset:
    given = options | {"prefetch": chosen.prefetch, "prefetch_to_device": chosen.prefetch_to_device}
    del given["options"]
    return placement.distribute_dataset(strategy, source, given)
