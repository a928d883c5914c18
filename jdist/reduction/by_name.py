"""All-reduce algorithms by name, for config files and notebooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jdist.errors import StrategyError
from jdist.reduction.algorithm import Reduction, psum
from jdist.reduction.bucketed import bucketed
from jdist.reduction.compressed import compressed
from jdist.reduction.staged import hierarchical, ring, to_one_device
from jdist.support import checks
from jdist.support.words import did_you_mean

REDUCTIONS: dict[str, Callable[..., Reduction]] = {
    "psum": psum,
    "bucketed": bucketed,
    "hierarchical": hierarchical,
    "ring": ring,
    "to_one_device": to_one_device,
    "compressed": compressed,
}
AllReduce = str | Mapping[str, Any] | Reduction


def make_reduction(all_reduce: AllReduce) -> Reduction:
    """Makes an all-reduce algorithm of a name, or of a name and options; returns a given one.

    Args:
        all_reduce: a name; a mapping with "name" and that algorithm's options; or a `Reduction` of your own.

    Returns:
        The Reduction.

    Raises:
        StrategyError: the name or an option is not known, an option is missing or not allowed, or the value is not one of
            these three.

    Example:
        >>> make_reduction({"name": "bucketed", "bytes_per_pack": 50}).name
        'bucketed(50)'
    """
    if isinstance(all_reduce, Reduction):
        return all_reduce
    options = dict(all_reduce) if isinstance(all_reduce, Mapping) else {"name": all_reduce}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in REDUCTIONS:
        suggestion = did_you_mean(name, REDUCTIONS) if isinstance(name, str) else ""
        raise StrategyError(
            f"`all_reduce` is {all_reduce!r}.{suggestion} Allowed are the names {', '.join(map(repr, REDUCTIONS))}; a mapping "
            'such as {"name": "bucketed", "bytes_per_pack": 4_000_000}; and a `jdist.reduction.Reduction` of your own.'
        )
    known = inspect.signature(REDUCTIONS[name]).parameters
    checks.known_options(f"`all_reduce` {name!r}", options, known, StrategyError)
    required = [option for option, of in known.items() if of.default is of.empty]
    missing = [option for option in required if option not in options]
    if missing:
        raise StrategyError(
            f"`all_reduce` {name!r} needs {' and '.join(f'`{option}`' for option in missing)}: write "
            f"`jdist.reduction.{name}({', '.join(f'{option}=...' for option in required)})`, or a mapping with these keys."
        )
    return REDUCTIONS[name](**options)
