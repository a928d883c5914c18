"""The command `jdist`. Each subcommand is a function here; what it needs is imported when it is called."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from jdist.cluster import ending, exit_codes, tf_config
from jdist.errors import JDistError


def run(
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG", help_behavior_hint="")],
    overrides: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY=VALUE ...]", help_behavior_hint="")
    ] = (),
    *,
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = False,
) -> int:
    """Train and evaluate what a config file describes.

    It writes runs/NAME/ with config.yaml (every value with its origin), metrics.jsonl, checkpoints/ and
    curves.png. The same command goes on where an earlier one stopped or was killed, and comes to the same
    parameters.

    For example:
      jdist run configs/digits.yaml
      jdist run configs/digits.yaml train.steps=500 strategy.name=one_device
      jdist run configs/digits.yaml name=faster train.optimizer.learning_rate=3e-3 platform.cpu_devices=8

    Ctrl-C finishes the running step, saves, and leaves with exit code 130; SIGTERM the same with 143; a
    second one leaves at once. Other exit codes: 0 finished; 1 training failed (a NaN, replicas that differ, a full
    disk); 2 what was asked for is not right; 75 another process of the job was lost, or did not come in time.
    JDIST_TRACEBACK=1 shows where in the code an error arose.

    In several processes (strategy.name=multi_worker) process 0 alone reports and writes metrics. In the evaluator of
    a TF_CONFIG it evaluates the checkpoints of the job that trains, into eval.jsonl.

    Args:
        config: the YAML file. Keys: name, task, strategy, train, eval, checkpoint, log, platform.
        overrides: values that replace those of the file, the key written with dots, the value as in YAML.
        fresh: start again; the old run folder is kept under another name.
    """
    from jdist.experiment.load import load
    from jdist.experiment.platform import apply_platform
    from jdist.experiment.validate import validate

    document = load(config, overrides)
    checked = validate(document)
    apply_platform(checked.platform)  # before JAX looks for devices

    spec = tf_config(os.environ)
    if spec is not None and spec.task_type == "evaluator":
        from jdist.experiment.follow import follow

        return follow(checked, document)

    from jdist.experiment.run import run as run_experiment

    command = shlex.join(["jdist", "run", config, *overrides])
    return run_experiment(checked, document, command=command, fresh=fresh)


def plan(
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG", help_behavior_hint="")],
    overrides: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY=VALUE ...]", help_behavior_hint="")
    ] = (),
    *,
    topology: Annotated[str, tyro.conf.arg(metavar="TOPOLOGY", help_behavior_hint="")],
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = False,
    sweep: Annotated[str | None, tyro.conf.arg(metavar="global_batch=...", help_behavior_hint="")] = None,
    no_check: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = False,
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
        topology: a TPU as CHIP:SHAPE (v5e:2x4, v6e:16x16, or v5p:8x8x8,slices=2), cpu:8, gpu or gpu:4.
        json: print one JSON object instead of the table; of a sweep, a list.
        sweep: try these global batches (128,256,384, or 128..4096 for doublings) and name the largest that fits.
        no_check: on cpu and gpu, do not make a real step to compare the memory with.
    """
    from jdist.experiment.load import load
    from jdist.experiment.validate import validate
    from jdist.plan.sweep import parse_sweep
    from jdist.plan.target import parse_target, settle

    target = parse_target(topology)
    batches = None if sweep is None else parse_sweep(sweep)
    settle(target, validate(load(config, overrides)).platform)  # before JAX looks for devices

    from jdist.plan.command import plan_command

    return plan_command(config, overrides, target, batches=batches, check=not no_check, as_json=json)


def launch(
    command: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND ...", help_behavior_hint="")
    ],
    *,
    processes: Annotated[str | None, tyro.conf.arg(metavar="N|MIN:MAX", help_behavior_hint="(default: 2)")] = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    ps: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    devices_per_process: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    evaluator: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = False,
    max_restarts: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    log_dir: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None,
    grace_s: float = 10.0,
    stop_timeout_s: float = 300.0,
    regrow_s: float = 300.0,
) -> int:
    """Run a config or a script in several processes of this machine.

    COMMAND is a config (.yaml, .yml) with overrides, a script (.py) with arguments, -m with a module, or any
    program. The processes find each other by TF_CONFIG. Their output is shown line by line, each line with the
    index of its process, and kept in DIR/attempt_A/process_I.log. None is left when the launcher ends, however
    it ends.

    For example:
      jdist launch --processes 2 --devices-per-process 4 -- configs/digits.yaml train.steps=500
      jdist launch --processes 2 --max-restarts 3 -- train.py --learning-rate 1e-3
      jdist launch --processes 1:4 -- -m my_package.train
      jdist launch --workers 2 --ps 2 -- train.py

    When a process fails, the others are ended. With restarts left all are then started again, each time after
    a longer wait, and go on from their last checkpoint; an exception (exit code 1) counts, as a lost peer or a
    full disk ends in one, too. Only exit code 2 does not. With MIN:MAX the next attempt does without the process
    that failed, and those killed with it; after --regrow-s all are asked to save and leave, and MAX go on. If
    that fails within --regrow-s, the job goes back to fewer, uses up no restart, and waits twice as long
    before it tries again.

    With --workers and --ps COMMAND runs once, as the chief of a parameter server; workers and servers run `jdist
    serve`. One of these that dies is started again alone, at the same port; all end with the chief. --max-restarts
    then counts the chief's.

    Ctrl-C and SIGTERM are passed on once: all save and leave. A second one kills them.

    Exit codes: 0 all ended well; 130 or 143 stopped by Ctrl-C or SIGTERM; else that of the process that failed
    first, 128 plus the signal's number if it was killed. 75 is that of a process which lost a peer and names no
    other; 2 means that what was asked for is not right.

    Args:
        command: what each process runs.
        processes: how many; MIN:MAX to start with MAX and go on with fewer, down to MIN, after failures.
        workers: how many workers of a parameter server; goes with --ps.
        ps: how many processes keep its parameters.
        devices_per_process: run on so many virtual CPU devices each.
        evaluator: start one more process, of task type evaluator. It ends with the job, and its failure does not
            stop the others.
        max_restarts: how often to start all again after a failure; 0 if not given, 3 with MIN:MAX.
        log_dir: where logs go; runs/launch-TIME if not given.
        grace_s: seconds that others get to end by themselves after a failure, then to end after SIGTERM.
        stop_timeout_s: seconds to save and leave when asked to stop, before SIGKILL.
        regrow_s: seconds to go on with fewer than MAX before trying to grow.
    """
    from jdist.cluster.launcher.launch import launch as start

    return start(
        command,
        processes=processes,
        workers=workers,
        ps=ps,
        evaluator=evaluator,
        devices_per_process=devices_per_process,
        max_restarts=max_restarts,
        log_dir=log_dir,
        grace_s=grace_s,
        stop_timeout_s=stop_timeout_s,
        regrow_s=regrow_s,
    ).exit_code


def doctor(
    *,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = False,
    alone: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = False,
    timeout_s: Annotated[float, tyro.conf.arg(metavar="SECONDS", help_behavior_hint="")] = 60.0,
) -> int:
    """Check this machine and its cluster.

    Each line passes, warns or fails, with the remedy: versions, disk, the cluster found in the environment with the
    variable that each value is from, names and ports, clocks, devices, and a small all-reduce with its speed. In a
    cluster it runs as every process at the same time, like the job itself. In one with parameter servers it runs as
    any task: token and certificates, whether each server lets it in, and whether each worker reaches each ps.

    For example:
      jdist doctor
      srun jdist doctor
      jdist launch --processes 2 -- jdist doctor
      jdist launch --workers 2 --ps 1 -- jdist doctor
      jdist doctor --alone --json

    Exit codes: 0 a job can run; 1 a check failed.

    Args:
        json: print a JSON list of findings.
        alone: leave out what needs the other processes of the cluster.
        timeout_s: how long to wait for them.
    """
    from jdist.doctor.report import examine, report

    return report(examine(alone=alone, timeout_s=timeout_s), as_json=json)


def serve(
    *,
    role: Annotated[
        str | None,
        tyro.conf.DisallowNone,
        tyro.conf.arg(metavar="worker|ps", help_behavior_hint=""),
    ] = None,
    address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="")] = None,
    grace_s: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 300.0,
    tls_cert: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    tls_key: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    tls_ca: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    health_address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="")] = None,
    allow_custom_call: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = (),
    script: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    insecure: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = False,
    with_parent: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = False,
) -> int:
    """Be a worker, or a parameter server, of an asynchronous job.

    It holds no code of the job's: what it runs, the coordinator sends. TF_CONFIG says what it is and where it
    listens. It serves those who show the secret in JDIST_TOKEN and, with TLS, a certificate of the authority in
    JDIST_TLS_CA; beyond loopback it wants both.

    For example:
      jdist serve
      jdist serve --role ps --address 127.0.0.1:4710
      jdist serve --role worker --address 0.0.0.0:2222 --tls-cert w.pem --tls-key w.key --tls-ca ca.pem

    Probes may ask grpc.health.v1.Health at the same address, without a token.

    Exit codes: 0 when the coordinator says that it is over; 75 when nobody asked for anything for --grace-s, or the
    port is taken; 143 after SIGTERM; 2 what was asked for is not right.

    Args:
        role: worker or ps, whatever TF_CONFIG says.
        address: where to listen, whatever TF_CONFIG says; without both, a free port of loopback, which is printed.
        grace_s: seconds without a call after which it ends.
        tls_cert: its certificate, PEM; else JDIST_TLS_CERT.
        tls_key: its private key, PEM; else JDIST_TLS_KEY.
        tls_ca: certificates of the authority that signed all others', PEM; else JDIST_TLS_CA.
        health_address: answer probes here, too: without TLS, and nothing else.
        allow_custom_call: custom calls that received functions may have, beside those of XLA's own operations.
        script: the program, of which a worker may be asked to make datasets by functions that are defined in it.
        insecure: listen beyond loopback without TLS or token.
        with_parent: end when standard input is closed, or the parent process is gone, and not for lack of calls.
    """
    from jdist.ps.security import AUTHORITY, CERTIFICATE, KEY, read_security
    from jdist.ps.serve import place
    from jdist.ps.serve import serve as start

    security = read_security(os.environ, {CERTIFICATE: tls_cert, KEY: tls_key, AUTHORITY: tls_ca})
    found, at = place(role, address, os.environ)
    return start(
        found,
        at,
        security=security,
        grace_s=grace_s,
        allow=allow_custom_call,
        script=script,
        with_parent=with_parent,
        insecure=insecure,
        health_address=health_address,
    )


COMMANDS = {"run": run, "plan": plan, "launch": launch, "serve": serve, "doctor": doctor}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows `jdist`; those of the process if None.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = _dispatch(arguments)
        if code != exit_codes.FINISHED:
            ending.unfinished(f"exit code {code}")
        return code
    except JDistError as exc:
        if os.environ.get("JDIST_TRACEBACK"):
            raise
        print(f"jdist: {exc}", file=sys.stderr)
        code = exit_codes.of(exc)
    except KeyboardInterrupt:
        print("jdist: interrupted", file=sys.stderr)
        code = exit_codes.INTERRUPTED
    ending.failed(code)
    return code


def _dispatch(arguments: Sequence[str]) -> int:
    """Hand a known subcommand its arguments; list the subcommands otherwise."""
    if arguments and arguments[0] == "run":  # its flags have no values, and so may stand before an override as well
        arguments = sorted(arguments, key=lambda each: each.startswith("-"))
    if arguments and arguments[0] in COMMANDS:
        return tyro.cli(COMMANDS[arguments[0]], prog=f"jdist {arguments[0]}", args=arguments[1:])
    app = tyro.extras.SubcommandApp()  # by itself it would show the whole help of every subcommand
    for name, command in COMMANDS.items():
        app.command(name=name, help=(command.__doc__ or "").partition("\n")[0])(command)
    return app.cli(prog="jdist", description="Distribute a JAX train step.", args=arguments)
