"""The needs of a config's step on hardware that need not be here: memory, collectives and a model of its time.

target       "v5p:8x8x8", "cpu:8", "gpu" -> devices, and the config's strategy on them
compile      the step that `jdist run` would compile, its FLOPs; compiled: memory, bytes accessed, text; also of a real step
hlo          the text of a compiled program -> instructions, and how often each runs
collectives  exchanges of the devices: kind, count, bytes, mesh axis; copies to and from their hosts
roofline     a model of the step's time from public figures of each chip, in jdist/support/chips.yaml
plan         all of it in order; table prints it, picture draws it, command plans several

A chip is an entry of that file; what devices there may be, and how they are named, is in target alone.

May import: experiment and what is below it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdist.plan.picture import draw as draw
    from jdist.plan.plan import Plan as Plan
    from jdist.plan.plan import plan_config as plan_config
    from jdist.plan.table import show as show

__all__ = ["Plan", "draw", "plan_config", "show"]
# `jdist plan` configures JAX before it is imported.
_LAZY = {
    "Plan": "jdist.plan.plan",
    "plan_config": "jdist.plan.plan",
    "show": "jdist.plan.table",
    "draw": "jdist.plan.picture",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jdist.plan' has no attribute {name!r}")
