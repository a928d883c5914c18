"""What a config's step needs on hardware that need not be here: memory, collectives and a model of its time.

target       "v5p:8x8x8", "cpu:8", "gpu" -> devices, and the config's strategy on them
step         the step that `jdist run` would compile, and the shapes it is called with
compile      that step compiled: memory, bytes accessed, text
hlo          the text of a compiled program -> instructions, and how often each runs
collectives  what the devices exchange: kind, count, bytes, mesh axis
host         what a device and its host copy to each other
flops        matmuls and convolutions of a step
hardware     public figures of each chip, from chips.yaml
roofline     a model of the step's time from all of these
check        the prediction beside what a run allocates, where the devices are here
plan         all of it in order; table prints it

May import: experiment and what is below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdist.plan.plan import Plan as Plan
    from jdist.plan.plan import plan_config as plan_config
    from jdist.plan.table import show as show

__all__ = ["Plan", "plan_config", "show"]


def __getattr__(name: str) -> Any:  # lazily: `jdist plan` settles the devices before anything imports JAX
    if name in ("Plan", "plan_config"):
        from jdist.plan import plan

        return getattr(plan, name)
    if name == "show":
        from jdist.plan.table import show

        return show
    raise AttributeError(f"module 'jdist.plan' has no attribute {name!r}")
