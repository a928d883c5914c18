"""What differs between kinds of strategies: what stands behind the methods of `Strategy`, and which states are in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jdist.core.remote import Coordinator
from jdist.data.options import FeedOptions

if TYPE_CHECKING:
    from jdist.core.state_picture import StatePicture
    from jdist.data.dataset import DistributedDataset

PyTree = Any
Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file


Shard = Literal["state", "optimizer"]


@dataclass(frozen=True)
class Parts:
    """How a strategy keeps states in parts.

    Attributes:
        of: "state": parameters and the optimiser's state; "optimizer": the latter alone.
        memory: where they are between steps.
        axes: the mesh axes over which they are spread; over the others there are copies.
        whole_below: arrays of fewer elements stay whole.
        most_whole: how much of a state may stay whole, as a share of its bytes.
        rules: which leaves are divided over the mesh axes inside a replica, beside those that flax's metadata divide.
    """

    of: Shard
    memory: Literal["device", "host"]
    axes: tuple[str, ...]
    whole_below: int = 0
    most_whole: float = 1.0
    rules: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The plain functions behind the methods of a kind of strategy, which take the strategy first, and its coordinator.

    Attributes:
        init: `(strategy, fn, args) -> state` laid out as the strategy wants it.
        fetch: `(strategy, state) -> state` whole, on the host.
        check: `(strategy, state) -> None`, raises where replicas differ.
        run: `(strategy, fn, args, kwargs) -> PerReplica results`.
        feed_batches: `(strategy, source, options) -> DistributedDataset`.
        feed_pipelines: `(strategy, fn, options) -> DistributedDataset`, of a function that makes sources.
        distribute: `(strategy, step, options) -> callable step`.
        describe: `(strategy) -> str`, where the strategy runs, in a few words.
        show: `(strategy, state) -> StatePicture`; of the devices alone where the state is None.
        coordinator: schedules functions on other processes, by hand; None where all of them run the same program.
    """

    init: Callable[[Strategy, Callable[..., PyTree], tuple[PyTree, ...]], PyTree]
    fetch: Callable[[Strategy, PyTree], PyTree]
    check: Callable[[Strategy, PyTree], None]
    run: Callable[[Strategy, Callable[..., PyTree], tuple[PyTree, ...], dict[str, PyTree]], PyTree]
    feed_batches: Callable[[Strategy, Iterable[PyTree], FeedOptions], DistributedDataset]
    feed_pipelines: Callable[[Strategy, Callable[..., Any], FeedOptions], DistributedDataset | Iterable[Any]]
    distribute: Callable[[Strategy, Callable[..., Any], Any], Callable[..., Any]]
    describe: Callable[[Strategy], str]
    show: Callable[[Strategy, PyTree | None], StatePicture]
    coordinator: Coordinator | None = None
