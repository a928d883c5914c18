"""The commands about configs and their runs: `jdist run`, `sweep`, `runs`, `checkpoint`, `plan`."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated, Any

import tyro

from jdist.cluster import tf_config
from jdist.errors import ConfigError


def metavar(name: str) -> Any:
    """Names an argument's value in the help, without a word on its default."""
    return tyro.conf.arg(metavar=name, help_behavior_hint="")


Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
ConfigFile = Annotated[str, tyro.conf.Positional, metavar("CONFIG")]
Overrides = Annotated[tuple[str, ...], tyro.conf.Positional, metavar("[KEY=VALUE ...]")]


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
        replay: CONFIG is a folder of a finished run: repeat it next to the old one, and say whether metrics and state are
            equal bit for bit.
        fresh: start again; the old run folder is kept under another name.
    """
    if dry_run and replay:
        raise ConfigError("--dry-run and --replay exclude each other: a replay runs. Leave one out.")
    # Readers in threads would hold up the loop for Python's 5 ms each (benchmarks/readers.py).
    sys.setswitchinterval(0.0005)
    if replay:
        if overrides:
            raise ConfigError(f"--replay repeats a run unchanged, so it takes no overrides: leave out {overrides[0]}.")
        from jdist.cli.runs.replay import replay as replay_run

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
        from jdist.experiment.run import follow

        return follow(checked, document)

    from jdist.cluster.environment import ATTEMPT
    from jdist.experiment.run import run as run_experiment

    start = ["jdist", "launch", "...", "--"] if ATTEMPT in os.environ else ["jdist", "run"]
    command = shlex.join([*start, config, *overrides])
    return run_experiment(checked, document, command=command, fresh=fresh)


def sweep(
    config: ConfigFile,
    overrides: Overrides = (),
    *,
    grid: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], metavar("KEY=V1,V2,...")] = (),
    name: Annotated[str | None, metavar("NAME")] = None,
    metric: Annotated[str | None, metavar("METRIC")] = None,
    mode: Annotated[str | None, metavar("max|min")] = None,
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
    from jdist.cli.runs.sweep import sweep as run_sweep

    return run_sweep(config, overrides, grid, name=name, metric=metric, mode=mode, fresh=fresh)


def runs(
    folders: Annotated[tuple[str, ...], tyro.conf.Positional, metavar("[FOLDER | A B]")] = (),
    *,
    json: Flag = False,
    timeline: Flag = False,
) -> int:
    """List runs, compare two, or show when one did what.

    With a folder, or none for runs/, it lists the runs below it: task, strategy, steps, the metric that matters, time
    and state. With two run folders it shows the config keys in which they differ, their last metrics, and draws the
    curves of both into A_and_B.png next to the first. With --timeline and one run it shows its attempts over time: steps,
    evaluations and checkpoints, the processes that `jdist launch` started, what killed them, and the steps that were done
    again; as a picture, RUN/timeline.svg, and as a trace for https://ui.perfetto.dev, RUN/timeline.json.

    For example:
      jdist runs
      jdist runs runs/digits-sweep
      jdist runs runs/digits runs/short
      jdist runs --json
      jdist runs --timeline runs/digits

    Exit codes: 0; 2 the run does not exist.

    Args:
        folders: a folder of runs; or two run folders, or their names in runs/.
        json: print JSON instead of tables.
        timeline: show when the run did what; a folder of `jdist launch`'s logs will do, too.
    """
    from jdist.cli.runs.show import show, show_timeline

    return (show_timeline if timeline else show)(folders, as_json=json)


def checkpoint(
    path: Annotated[str, tyro.conf.Positional, metavar("PATH")],
) -> int:
    """List what a checkpoint holds.

    Its step, the position in the data, metrics, and each leaf by the path that `only`, `rename` and `init_from` take,
    with dtype, shape and bytes. No array is read.

    For example:
      jdist checkpoint runs/digits
      jdist checkpoint runs/digits/checkpoints/step_00000500_save_00003
      jdist checkpoint model.safetensors

    Exit codes: 0 it is listed; 1 it is missing or damaged.

    Args:
        path: a run folder, a folder of checkpoints or a bucket's URL (the newest in it); one of the checkpoints;
            safetensors; or what Orbax has written to a disk.
    """
    from jdist.cli.runs.contents import show

    return show(path)


def plan(
    config: ConfigFile,
    overrides: Overrides = (),
    *,
    topology: Annotated[str, metavar("TOPOLOGY")],
    json: Flag = False,
    sweep: Annotated[str | None, metavar("global_batch=...")] = None,
    suggest: Flag = False,
    svg: Annotated[str | None, metavar("FILE")] = None,
    no_check: Flag = False,
) -> int:
    """Say what a config needs on hardware that is not here.

    Its real step is compiled, and nothing is run. Printed are: what each device needs of memory and whether
    that fits, what the devices exchange, and a model of the step's time. On cpu and gpu one real step is then
    made, to compare the memory with. For a TPU that is not here it needs libtpu, which holds the compiler
    (pip install 'jdist[plan-tpu]'), and for GPUs JAX's CUDA plugin (pip install 'jdist[plan-gpu]').

    For example:
      jdist plan configs/digits.yaml --topology v5p:8x8x8
      jdist plan configs/text.yaml train.global_batch=256 --topology v5e:2x4 --json
      jdist plan configs/digits.yaml --topology h100:4x8
      jdist plan configs/digits.yaml --topology cpu:8
      jdist plan configs/text.yaml --topology v5e:2x4 --sweep global_batch=256..65536
      jdist plan configs/text_7b.yaml --topology h100:8x8 --suggest
      jdist plan configs/text_7b.yaml --topology v5p:8x8x8 --svg plan.svg

    Exit codes: 0 it fits, or the memory is not known; 1 it does not fit (of several: none does); 2 what was
    asked for is not right.

    Args:
        config: the YAML file, as for `jdist run`.
        overrides: values that replace those of the file, the key written with dots.
        topology: a TPU as CHIP:SHAPE (v5e:2x4, v6e:16x16, or v5p:8x8x8,slices=2) or CHIP-SIZE (v5e-16); GPUs as CHIP:GPUS or
            CHIP:HOSTSxGPUS (h100:8, a100-80gb:4x8); cpu:8; gpu or gpu:4 for those that are here.
        json: print one JSON object instead of the table; of a sweep, a list.
        sweep: try these global batches (128,256,384, or 128..4096 for doublings) and name the largest that fits.
        suggest: try the state whole on each device, the optimiser's and all of it in parts, each also in microbatches, and say
            which fits and what to write.
        svg: draw the memory of a device against what the chip has, and the step's time by its parts, into this file.
        no_check: on cpu and gpu, do not make a real step to compare the memory with.
    """
    from jdist.experiment.load import load
    from jdist.experiment.validate import validate
    from jdist.strategies import absent_plugins

    absent_plugins.import_jax()  # whole: it may be asked for GPUs' kernels
    from jdist.plan.command import check_svg, parse_sweep, plan_command, suggest_command
    from jdist.plan.target import configure_platform, parse_target

    target = parse_target(topology)
    if suggest and sweep is not None:
        raise ConfigError("--suggest and --sweep exclude each other; leave one out.")
    if svg is not None:
        check_svg(svg, tries_several=suggest or sweep is not None)
    batches = None if sweep is None else parse_sweep(sweep)
    configure_platform(target, validate(load(config, overrides)).platform)  # before JAX looks for devices

    if suggest:
        return suggest_command(config, overrides, target, as_json=json)
    return plan_command(config, overrides, target, batches=batches, check=not no_check, as_json=json, svg=svg)
