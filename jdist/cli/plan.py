"""`jdist plan`."""

from __future__ import annotations

from typing import Annotated

import tyro

from jdist.cli.run import ConfigFile, Flag, Overrides


def plan(
    config: ConfigFile,
    overrides: Overrides = (),
    *,
    topology: Annotated[str, tyro.conf.arg(metavar="TOPOLOGY", help_behavior_hint="")],
    json: Flag = False,
    sweep: Annotated[str | None, tyro.conf.arg(metavar="global_batch=...", help_behavior_hint="")] = None,
    no_check: Flag = False,
) -> int:
    """Say what a config needs on hardware that is not here.

    Its real step is compiled, and nothing is run. Printed are: what each device needs of memory and whether
    that fits, what the devices exchange, and a model of the step's time. On cpu and gpu one real step is then
    made, to compare the memory with. For a TPU it needs libtpu, which holds the compiler: pip install
    'jdist[plan-tpu]'.

    For example:
      jdist plan configs/digits.yaml --topology v5p:8x8x8
      jdist plan configs/text.yaml train.global_batch=256 --topology v5e:2x4 --json
      jdist plan configs/digits.yaml --topology cpu:8
      jdist plan configs/text.yaml --topology v5e:2x4 --sweep global_batch=256..65536

    Exit codes: 0 it fits, or the memory is not known; 1 it does not fit (of a sweep: none does); 2 what was
    asked for is not right.

    Args:
        config: the YAML file, as for `jdist run`.
        overrides: values that replace those of the file, the key written with dots.
        topology: a TPU as CHIP:SHAPE (v5e:2x4, v6e:16x16, or v5p:8x8x8,slices=2) or CHIP-SIZE (v5e-16), cpu:8, gpu or gpu:4.
        json: print one JSON object instead of the table; of a sweep, a list.
        sweep: try these global batches (128,256,384, or 128..4096 for doublings) and name the largest that fits.
        no_check: on cpu and gpu, do not make a real step to compare the memory with.
    """
    from jdist.experiment.load import load
    from jdist.experiment.validate import validate
    from jdist.plan.sweep import parse_sweep
    from jdist.plan.target import configure_platform, parse_target

    target = parse_target(topology)
    batches = None if sweep is None else parse_sweep(sweep)
    configure_platform(target, validate(load(config, overrides)).platform)  # before JAX looks for devices

    from jdist.plan.sweep import plan_command

    return plan_command(config, overrides, target, batches=batches, check=not no_check, as_json=json)
