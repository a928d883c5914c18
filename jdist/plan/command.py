"""`jdist plan` once JAX may start: plans, prints, and says by its exit code whether the step fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from jdist.cluster import exit_status
from jdist.experiment.load import load
from jdist.experiment.validate import validate
from jdist.plan.plan import Plan, make_plan
from jdist.plan.sweep import sweep
from jdist.plan.table import show, show_sweep, sweep_row
from jdist.plan.target import Target


def plan_command(
    config: str,
    overrides: Sequence[str],
    target: Target,
    *,
    batches: list[int] | None = None,
    check: bool = True,
    as_json: bool = False,
) -> int:
    """Plan a config file, or a sweep over its global batch, and print the result.

    Args:
        config: the YAML file.
        overrides: `key=value` each.
        target: what to compile for; `settle` was called for it.
        batches: global batches to try, in rising order; None for the config's own.
        check: where the devices are here, compare the memory with that of a real step.
        as_json: print JSON instead of a table.

    Returns:
        The exit code: 1 if the step, or every one of a sweep, does not fit; else 0.
    """

    def plan(more: Sequence[str] = (), *, check: bool) -> Plan:
        document = load(config, [*overrides, *more])
        return make_plan(validate(document), document, target, check=check)

    if batches is None:
        planned = plan(check=check)
        print(json.dumps(planned.as_json(), indent=2) if as_json else show(planned))
        return 1 if planned.fits is False else 0
    plans, interrupted = [], False
    try:
        for each in sweep(batches, lambda batch: plan([f"train.global_batch={batch}"], check=False)):
            plans.append(each)
            # Not with the result: a large batch may take the compiler minutes.
            print(sweep_row(each), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted after {len(plans)} of {len(batches)} global batches", file=sys.stderr)
    print(json.dumps([p.as_json() for p in plans], indent=2) if as_json else show_sweep(plans))
    if interrupted:
        return exit_status.INTERRUPTED
    return 1 if all(p.fits is False for p in plans) else 0
