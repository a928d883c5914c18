"""`jdist sweep`."""

from __future__ import annotations

from typing import Annotated

import tyro

from jdist.cli.run import ConfigFile, Flag, Overrides


def sweep(
    config: ConfigFile,
    overrides: Overrides = (),
    *,
    grid: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=V1,V2,...", help_behavior_hint="")
    ] = (),
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None,
    metric: Annotated[str | None, tyro.conf.arg(metavar="METRIC", help_behavior_hint="")] = None,
    mode: Annotated[str | None, tyro.conf.arg(metavar="max|min", help_behavior_hint="")] = None,
    fresh: Flag = False,
) -> int:
    """Run a config with each combination of values.

    One after the other: each run is a process and a folder of its own, runs/SWEEP/RUN, with its output in
    runs/SWEEP/RUN.log; one that fails does not end the others. In the end there is one table, sorted by a metric of the
    last evaluation (table.txt, table.csv, table.json), and one picture with the curves of all (curves.png), in runs/SWEEP.

    For example:
      jdist sweep configs/digits.yaml --grid train.optimizer.learning_rate=1e-3,3e-3,1e-2
      jdist sweep configs/digits.yaml train.steps=200 --grid train.seed=0,1,2 --grid strategy.name=mirrored,one_device
      jdist sweep configs/digits.yaml --grid 'train.optimizer={name: sgd, learning_rate: 0.1},{name: adam, learning_rate: 1e-3}'

    The same command goes on where an earlier one stopped or was killed; what is finished is not run again. Ctrl-C and
    SIGTERM save the running one and stop; a second one kills it.

    Exit codes: 0 all finished; 1 some failed; 2 what was asked for is not right; 130 or 143 stopped by Ctrl-C or SIGTERM.

    Args:
        config: the YAML file, as for `jdist run`.
        overrides: values that replace those of the file in every run.
        grid: a key and the values to try, as in YAML, with commas between; may be given several times.
        name: name of the sweep and of its folder; NAME-sweep of the config if not given.
        metric: sort by this evaluation metric; checkpoint.best of the config, else loss.
        mode: whether the greatest or the least value comes first; as checkpoint.mode or the metric's name says.
        fresh: start again; old run folders are kept under other names.
    """
    from jdist.runs.sweep import sweep as run_sweep

    return run_sweep(config, overrides, grid, name=name, metric=metric, mode=mode, fresh=fresh)
