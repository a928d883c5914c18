"""`lax.scan`, unrolled where a loop would be slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jdist import dataflow
from jdist.strategy import Strategy


def scan(strategy: Strategy, body: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any) -> tuple[Any, Any]:
    """As `lax.scan`; unrolled where XLA's CPU backend would run convolutions more than 20 times slower inside a loop.

    `benchmarks/loops_on_cpu.py` measures it.
    """
    platform = strategy.devices[0].platform if strategy.devices else jax.default_backend()
    unroll = False
    if platform == "cpu":
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
        unroll = dataflow.contains_primitive(jax.make_jaxpr(body)(init, first), "conv_general_dilated")
    return jax.lax.scan(body, init, xs, unroll=unroll or 1)
