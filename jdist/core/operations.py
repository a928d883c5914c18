"""The differences between kinds of strategies: the functions behind the methods of `Strategy`, and states in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jdist.core.remote import Coordinator
from jdist.data.options import FeedOptions
from jdist.typing import PyTree

if TYPE_CHECKING:
    from jdist.core.state_report import StateReport
    from jdist.data.dataset import DistributedDataset

Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file


Shard = Literal["state", "optimizer"]


@dataclass(frozen=True)
class Parts:
    """A strategy's options for states in parts."""

    of: Shard  # "state": parameters and the optimiser's state; "optimizer": the latter alone
    memory: Literal["device", "host"]  # of the state between steps
    # the mesh axes over which they are spread; over the others there are copies
    axes: tuple[str, ...]
    whole_below: int = 0  # arrays of fewer elements stay in full
    most_whole: float = 1.0  # the share of a state's bytes that may stay in full
    # leaves divided inside a replica, besides those that flax's metadata divides
    rules: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Operations:
    """A kind of strategy's functions, which take the strategy first, and its coordinator."""

    # `(strategy, fn, args) -> state` in the strategy's layout
    init: Callable[[Strategy, Callable[..., PyTree], tuple[PyTree, ...]], PyTree]
    # `(strategy, state) -> state`, in full, on the host
    fetch: Callable[[Strategy, PyTree], PyTree]
    # `(strategy, state) -> None`, raises if replicas differ
    check: Callable[[Strategy, PyTree], None]
    # `(strategy, fn, args, kwargs) -> PerReplica results`
    run: Callable[[Strategy, Callable[..., PyTree], tuple[PyTree, ...], dict[str, PyTree]], PyTree]
    # `(strategy, source, options) -> DistributedDataset`
    feed_batches: Callable[[Strategy, Iterable[PyTree], FeedOptions], DistributedDataset]
    # the same, from a function that makes sources
    feed_pipelines: Callable[[Strategy, Callable[..., Any], FeedOptions], DistributedDataset | Iterable[Any]]
    # `(strategy, step, options) -> callable step`
    distribute: Callable[[Strategy, Callable[..., Any], Any], Callable[..., Any]]
    describe: Callable[[Strategy], str]  # `(strategy) -> str`, the strategy's place in a few words
    # `(strategy, state) -> StateReport`; without a state, of the devices alone
    report: Callable[[Strategy, PyTree | None], StateReport]
    # schedules functions on other processes; None if all run the same program
    coordinator: Coordinator | None = None
