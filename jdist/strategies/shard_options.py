"""The options that keep a strategy's states in parts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jdist.core.layout import axes_of
from jdist.core.operations import Parts, Shard
from jdist.core.rules import Rule
from jdist.core.strategy import Strategy
from jdist.errors import StrategyError
from jdist.sharded_state.operations import with_parts
from jdist.support import checks

DEFAULTS = {"of": "state", "within": None, "whole_below": 1024, "most_whole": 0.02, "mesh": None, "rules": ()}


def spread_state(strategy: Strategy, shard: Shard | Mapping[str, Any]) -> Strategy:
    """Makes a one-axis strategy keep the state in parts instead of a copy on every device."""
    # A mapping has `of`, `within`, `whole_below`, `most_whole`, `mesh` and `rules`, as
    # `jdist.sharded` takes them.
    given = dict(shard) if isinstance(shard, Mapping) else {"of": shard}
    checks.known_options("`shard`", given, DEFAULTS, StrategyError)
    options = {**DEFAULTS, **given}
    checks.choice("shard", options["of"], get_args(Shard), StrategyError)
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
    fewer = "Arrays of fewer elements stay whole."
    whole_below = checks.whole_number("whole_below", options["whole_below"], StrategyError, least=0, fix=fewer)
    most_whole = checks.as_real(options["most_whole"])
    if most_whole is None or not 0 <= most_whole <= 1:
        raise StrategyError(
            f"`most_whole` is {options['most_whole']!r}; it must be a share of the state's bytes, from 0 to 1."
        )
    (axis,) = strategy.axes
    model = _model_axes(options["mesh"], axis, len(strategy.devices))
    rules = _rules(options["rules"], model, axis)
    num_replicas = len(strategy.devices) // math.prod(model.values())
    size = _size_of_group(options["within"], num_replicas)
    if size == 1 and not model:
        return strategy
    if size in (1, num_replicas):
        axes, sizes = (axis,), (num_replicas,)
    else:
        # Neither is called `axis`: a collective of the user's own over one of them alone would be wrong without a word.
        axes, sizes = (f"{axis}_group", f"{axis}_in_group"), (num_replicas // size, size)
    if clash := [name for name in axes if name in model]:
        raise StrategyError(f"`mesh` has an axis {clash[0]!r}, as `within` calls one of its own. Give it another name.")
    devices = _by_replica(strategy.devices, math.prod(model.values()))
    grid = np.array(devices).reshape(*sizes, *model.values())
    return dataclasses.replace(
        strategy,
        devices=devices,
        mesh=Mesh(grid, (*axes, *model), axis_types=(AxisType.Auto,) * grid.ndim),
        axes=axes,
        operations=with_parts(strategy.operations),
        parts=Parts(
            of=options["of"],
            memory="device",
            axes=axes[-1:] if size > 1 else (),
            whole_below=whole_below,
            most_whole=most_whole,
            rules=rules,
        ),
    )


def _model_axes(mesh: Any, axis: str, num_devices: int) -> dict[str, int]:
    """Checks the sizes of a mesh's axes, and returns those inside a replica."""
    if mesh is None:
        return {}
    example = f'{{"{axis}": -1, "model": 4}}'
    mesh = dict(mesh.shape) if isinstance(mesh, Mesh) else mesh
    if not isinstance(mesh, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in mesh):
        raise StrategyError(f"`mesh` is {mesh!r}; it must be the sizes of the mesh's axes by name, such as {example}.")
    sizes = {name: checks.as_int(size, least=-1) for name, size in mesh.items()}
    wrong = [name for name, size in sizes.items() if not size]
    if wrong or list(sizes.values()).count(-1) > 1:
        raise StrategyError(f"`mesh` is {dict(mesh)!r}; sizes are 1 or more, and one of them may be -1: what is left.")
    if axis not in sizes:
        raise StrategyError(
            f"`mesh` has no axis {axis!r}, over which the replicas are: its axes are {', '.join(sizes)}. Write {example}, or "
            "name the replicas' axis by `axis`."
        )
    known = math.prod(size for size in sizes.values() if size is not None and size > 0)
    sizes = {name: num_devices // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(size or 0 for size in sizes.values()) != num_devices:
        raise StrategyError(
            f"`mesh` is {dict(mesh)!r}, which does not multiply up to the number of devices, {num_devices}."
        )
    return {name: size for name, size in sizes.items() if name != axis and size is not None}


def _rules(rules: Any, model: Mapping[str, int], axis: str) -> tuple[Rule, ...]:
    """Checks the rules of a state."""
    example = '[("mlp/up/kernel", (None, "model"))]'
    given = list(rules) if isinstance(rules, Sequence) and not isinstance(rules, str) else None
    if given is None or not all(isinstance(rule, Sequence) and len(rule) == 2 for rule in given):
        raise StrategyError(f"`rules` is {rules!r}; it must be pairs of a pattern and axes, such as {example}.")
    found = []
    for pattern, axes in given:
        is_list = isinstance(axes, list | tuple | PartitionSpec)
        entries = [tuple(x) if isinstance(x, list) else x for x in axes] if is_list else None
        if entries is None or not isinstance(pattern, str):
            raise StrategyError(f"the rule {(pattern, axes)!r} is no pair of a pattern and axes, such as {example}.")
        rule = Rule(pattern, tuple(entries))
        try:
            rule.matches("")
        except re.error as exc:
            raise StrategyError(f"the pattern {pattern!r} of a rule is no regular expression: {exc}.") from None
        if not all(
            x is None or isinstance(x, str) or (isinstance(x, tuple) and all(map(_is_text, x))) for x in entries
        ):
            raise StrategyError(
                f"the rule {(pattern, axes)!r} has an entry that is neither None nor a name, nor a tuple of names of mesh axes."
            )
        names = axes_of(entries)
        unknown = [name for name in names if name not in model]
        if unknown or len(names) != len(set(names)) or not names:
            of_replicas = f" (over {axis!r} the state is cut anyway: see `shard`)" if axis in unknown else ""
            raise StrategyError(
                f"the rule {(pattern, axes)!r} names {', '.join(map(repr, names)) or 'no axis'}{of_replicas}; it must name one "
                f"or more of the mesh's axes inside a replica, each once: {', '.join(model) or 'there are none, see `mesh`'}."
            )
        found.append(rule)
    return tuple(found)


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _by_replica(devices: Sequence[Any], size: int) -> tuple[Any, ...]:
    """Orders devices so that those of each replica are in one process."""
    if size == 1:
        return tuple(devices)
    ordered = tuple(sorted(devices, key=lambda device: device.process_index))
    for i in range(0, len(ordered), size):
        processes = sorted({device.process_index for device in ordered[i : i + size]})
        if len(processes) > 1:
            raise StrategyError(
                f"a replica of {size} devices would span the processes {', '.join(map(str, processes))}, each of which reads "
                "the rows of its own replicas. Take a number of devices that divides those of a process."
            )
    return ordered


def _size_of_group(within: Any, num_replicas: int) -> int:
    """Checks how many replicas hold one state together; None: all of them."""
    size = num_replicas if within is None else checks.as_int(within, least=1)
    if size is None or num_replicas % size:
        divisors = [n for n in range(1, num_replicas + 1) if num_replicas % n == 0]
        raise StrategyError(
            f"`within` is {within!r}; it must divide the number of replicas, {num_replicas}: one of "
            f"{', '.join(map(str, divisors))}."
        )
    return size
