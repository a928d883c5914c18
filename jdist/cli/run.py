"""`jdist run`."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import tyro

from jdist.cluster import tf_config
from jdist.errors import ConfigError


def run(
    config: ConfigFile,
    overrides: Overrides = (),
    *,
    dry_run: Flag = False,
    replay: Flag = False,
    fresh: Flag = False,
) -> int:
    """Train and evaluate what a config file describes.

    It writes runs/NAME/ with config.yaml (every value with its origin), metrics.jsonl, checkpoints/, curves.png, and
    what it takes to repeat the run: environment.json and result.json. The same command goes on where an earlier one
    stopped or was killed, and comes to the same parameters.

    For example:
      jdist run configs/digits.yaml
      jdist run configs/digits.yaml train.steps=500 strategy.name=one_device
      jdist run configs/digits.yaml name=faster train.optimizer.learning_rate=3e-3 platform.cpu_devices=8
      jdist run configs/digits.yaml --dry-run
      jdist run --replay runs/digits

    Ctrl-C finishes the running step, saves, and leaves with exit code 130; SIGTERM the same with 143; a
    second one leaves at once. Other exit codes: 0 finished; 1 training failed (a NaN, replicas that differ), or a
    replay differs; 2 what was asked for is not right; 74 a disk is full; 75 another process of the job was lost, or did
    not come in time. JDIST_TRACEBACK=1 shows where in the code an error arose.

    In several processes (strategy.name=multi_worker) process 0 alone reports and writes metrics. In the evaluator of
    a TF_CONFIG it evaluates the checkpoints of the job that trains, into eval.jsonl.

    Args:
        config: the YAML file. Keys: name, task, strategy, train, eval, checkpoint, callbacks, log, platform.
        overrides: values that replace those of the file, the key written with dots, the value as in YAML.
        dry_run: check everything, make one batch and compile the steps; train and write nothing.
        replay: CONFIG is a folder of a finished run: repeat it beside the old one, and say whether metrics and state are
            equal bit for bit.
        fresh: start again; the old run folder is kept under another name.
    """
    if dry_run and replay:
        raise ConfigError("--dry-run and --replay are given; a replay runs, so take one of them.")
    if replay:
        if overrides:
            raise ConfigError(f"--replay repeats a run as it was, so it takes no overrides: leave out {overrides[0]}.")
        from jdist.runs.replay import replay as replay_run

        return replay_run(config, fresh=fresh)

    from jdist.experiment.load import load
    from jdist.experiment.platform import apply_platform
    from jdist.experiment.validate import validate

    document = load(config, overrides)
    checked = validate(document)
    apply_platform(checked.platform)  # before JAX looks for devices

    if dry_run:
        from jdist.experiment.dry_run import dry_run as try_out

        return try_out(checked, document, fresh=fresh)

    spec = tf_config(os.environ)
    if spec is not None and spec.task_type == "evaluator":
        from jdist.experiment.follow import follow

        return follow(checked, document)

    from jdist.cluster.environment import ATTEMPT
    from jdist.experiment.run import run as run_experiment

    start = ["jdist", "launch", "...", "--"] if ATTEMPT in os.environ else ["jdist", "run"]
    command = shlex.join([*start, config, *overrides])
    return run_experiment(checked, document, command=command, fresh=fresh)


Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
ConfigFile = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG", help_behavior_hint="")]
Overrides = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY=VALUE ...]", help_behavior_hint="")
]
