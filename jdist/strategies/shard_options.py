"""The options that keep a strategy's states in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from jax.sharding import AxisType, Mesh

from jdist.core.operations import Parts, Shard
from jdist.core.strategy import Strategy
from jdist.errors import StrategyError
from jdist.sharded_state.operations import with_parts
from jdist.support.checks import as_int, as_real
from jdist.support.suggest import did_you_mean

DEFAULTS = {"of": "state", "within": None, "whole_below": 1024, "most_whole": 0.02}


def spread_state(strategy: Strategy, shard: Shard | Mapping[str, Any]) -> Strategy:
    """Makes of a strategy that keeps a copy of the state on every device one that keeps parts.

    Args:
        strategy: over a mesh of one axis.
        shard: what is in parts; or a mapping of `of`, `within`, `whole_below` and `most_whole`, as `jdist.sharded` takes them.

    Raises:
        StrategyError: an option is not allowed, or does not go with the strategy's others.
    """
    given = dict(shard) if isinstance(shard, Mapping) else {"of": shard}
    for option in given:
        if option not in DEFAULTS:
            raise StrategyError(
                f"`shard` has no option {option!r}.{did_you_mean(option, DEFAULTS)} It has: {', '.join(DEFAULTS)}."
            )
    options = {**DEFAULTS, **given}
    if options["of"] not in get_args(Shard):
        raise StrategyError(f"`shard` is {options['of']!r}; allowed are {', '.join(map(repr, get_args(Shard)))}.")
    if strategy.transform != "shard_map":
        raise StrategyError(
            f'`shard` keeps the state in parts, which takes transform="shard_map"; `transform` is {strategy.transform!r}. '
            "Leave it out."
        )
    if strategy.reduction.name != "psum":
        raise StrategyError(
            f"`all_reduce` is {strategy.reduction.name}, and `shard` keeps the state in parts: gradients are then summed part "
            "by part, each where it is needed. Leave one of them out."
        )
    whole_below, most_whole = as_int(options["whole_below"], least=0), as_real(options["most_whole"])
    if whole_below is None:
        raise StrategyError(
            f"`whole_below` is {options['whole_below']!r}; it must be a number of elements, 0 or more: arrays of fewer stay "
            "whole."
        )
    if most_whole is None or not 0 <= most_whole <= 1:
        raise StrategyError(
            f"`most_whole` is {options['most_whole']!r}; it must be a share of the state's bytes, from 0 to 1."
        )
    size = _size_of_group(options["within"], strategy.num_replicas)
    if size == 1:
        return strategy
    (axis,), mesh, axes = strategy.axes, strategy.mesh, strategy.axes
    assert mesh is not None  # a strategy with a transform has one
    if size < strategy.num_replicas:
        # Neither is called `axis`: a collective of the user's own over one of them alone would be wrong without a word.
        axes = (f"{axis}_group", f"{axis}_in_group")
        mesh = Mesh(mesh.devices.reshape(-1, size), axes, axis_types=(AxisType.Auto,) * 2)
    return dataclasses.replace(
        strategy,
        mesh=mesh,
        axes=axes,
        operations=with_parts(strategy.operations),
        parts=Parts(of=options["of"], memory="device", axes=axes[-1:], whole_below=whole_below, most_whole=most_whole),
    )


def _size_of_group(within: Any, num_devices: int) -> int:
    """Checks how many devices hold one state together; None: all of them."""
    size = num_devices if within is None else as_int(within, least=1)
    if size is None or num_devices % size:
        divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise StrategyError(
            f"`within` is {within!r}; it must divide the number of devices, {num_devices}: one of "
            f"{', '.join(map(str, divisors))}."
        )
    return size
