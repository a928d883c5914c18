"""Strategies by name, for config files and notebooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from jdist.cluster.communication import CommunicationOptions
from jdist.cluster.spec import ClusterSpec
from jdist.core.operations import Shard
from jdist.core.replica_mesh import Transform
from jdist.core.strategy import Strategy
from jdist.errors import StrategyError
from jdist.reduction.by_name import AllReduce
from jdist.strategies.default import default
from jdist.strategies.multi_worker import OnLoss, multi_worker
from jdist.strategies.over_devices import central_storage, mirrored, one_device, sharded, tpu
from jdist.strategies.parameter_server import PsKeywords, parameter_server
from jdist.support import checks
from jdist.support.tracebacks import without_own_frames
from jdist.support.words import did_you_mean

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "default": default,
    "one_device": one_device,
    "mirrored": mirrored,
    "tpu": tpu,
    "multi_worker": multi_worker,
    "sharded": sharded,
    "central_storage": central_storage,
    "parameter_server": parameter_server,
}


class StrategyKeywords(PsKeywords, total=False):
    """The arguments of all strategies, as an editor and a type checker see them; each takes its own."""

    cluster: ClusterSpec | None
    device: Any
    devices: Sequence[Any] | None
    transform: Transform
    all_reduce: AllReduce | None
    topology: str | None
    name: str | None
    communication: CommunicationOptions | Mapping[str, Any] | None
    shard: Shard | Mapping[str, Any] | None
    on_loss: OnLoss
    within: int | None
    whole_below: int
    most_whole: float
    mesh: Mapping[str, int] | None
    rules: Sequence[tuple[str, Sequence[Any]]]


@without_own_frames
def make_strategy(name: str, /, **options: Unpack[StrategyKeywords]) -> Strategy:
    """Builds a strategy by name.

    Args:
        name: "default", "one_device", "mirrored", "tpu", "multi_worker", "sharded", "central_storage" or
            "parameter_server".
        **options: arguments of the function of that name.

    Returns:
        The Strategy.

    Raises:
        StrategyError: an unknown name or option; lists the known ones and the nearest.

    Example:
        >>> import jdist
        >>> jdist.make_strategy("one_device", device="cpu:0").num_replicas
        1
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise StrategyError(
            f"unknown strategy {name!r}.{did_you_mean(name, STRATEGIES)} Known: {', '.join(STRATEGIES)}."
        )
    known = inspect.signature(STRATEGIES[name]).parameters
    checks.known_options(f"strategy {name!r}", options, known, StrategyError)
    return STRATEGIES[name](**options)
