"""The commands about processes and machines: `jdist launch`, `serve`, `doctor`."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import tyro

from jdist.cli.configs import Flag, metavar

Count = Annotated[int | None, metavar("N")]
Address = Annotated[str | None, metavar("HOST:PORT")]
File = Annotated[str | None, metavar("FILE")]


def launch(
    command: Annotated[tuple[str, ...], tyro.conf.Positional, metavar("-- COMMAND ...")],
    *,
    processes: Annotated[str | None, tyro.conf.arg(metavar="N|MIN:MAX", help_behavior_hint="(default: 2)")] = None,
    workers: Count = None,
    ps: Count = None,
    devices_per_process: Count = None,
    evaluator: Flag = False,
    max_restarts: Count = None,
    on_loss: Literal["stop", "continue"] = "stop",
    spares: Annotated[int, metavar("N")] = 0,
    host: Annotated[str | None, metavar("ADDRESS")] = None,
    join: Address = None,
    log_dir: Annotated[str | None, metavar("DIR")] = None,
    grace_s: float = 10.0,
    stop_timeout_s: float = 300.0,
    regrow_s: float = 300.0,
    no_compilation_cache: Flag = False,
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
      jdist launch --processes 2:8 --spares 1 --on-loss continue -- train.py
      jdist launch --join node1:4711 --processes 2 -- train.py

    When a process fails, the others are ended. With restarts left all are then started again, each time after a
    longer wait, and go on from their last checkpoint; after exit codes 2 and 74 they are not, as that would not
    help. With MIN:MAX the next attempt does without the process that failed, and those killed with it; after
    --regrow-s all are asked to save and leave, and MAX go on. If that fails within --regrow-s, the job goes back
    to fewer, uses up no restart, and waits twice as long before it tries again.

    With --on-loss continue, for a program with jdist.multi_worker(on_loss="continue"), the others go on without a process
    that fails or is killed; one more is started in its place, and comes in after a step. With --join processes of
    another machine come in as well: the first launcher says at which address, which --host makes reachable, and both
    need the same JDIST_TOKEN in their environment. The exit code is 0 if all that are in the job at its end end with 0.

    With --workers and --ps COMMAND runs once, as the chief of a parameter server; workers and servers run `jdist
    serve`. One of these that dies is restarted alone, at the same port; all end with the chief. --max-restarts
    then counts the chief's.

    Ctrl-C and SIGTERM are passed on once: all save and leave. A second one kills them.

    Exit codes: 0 all ended well; 130 or 143 stopped by Ctrl-C or SIGTERM; else that of the process that failed
    first, 128 plus the signal's number if it was killed. 75 is that of a process which lost a peer and names no
    other; 2 means that what was asked for is not right, 74 that a disk is full.

    Args:
        command: what each process runs.
        processes: how many; MIN:MAX to start with MAX and go on with fewer, down to MIN, after failures.
        workers: how many workers of a parameter server; goes with --ps.
        ps: how many processes keep its parameters.
        devices_per_process: run on this many virtual CPU devices each.
        evaluator: start one more process, of task type evaluator. It ends with the job, and its failure does not
            stop the others.
        max_restarts: how often to start all again after a failure; 0 if not given, 3 with MIN:MAX or --on-loss
            continue, where each process that is started again counts as well.
        on_loss: what the others do when a process is lost: stop, or continue without it.
        spares: how many processes more stand ready to take a lost one's place.
        host: this machine's address for processes of other machines; 127.0.0.1 if not given.
        join: join the job of another launcher, at this address.
        log_dir: folder of the logs; runs/launch-TIME if not given.
        grace_s: seconds that others get to end by themselves after a failure, then again after SIGTERM.
        stop_timeout_s: seconds to save and leave when asked to stop, before SIGKILL.
        regrow_s: seconds to run with fewer than MAX before trying to grow.
        no_compilation_cache: keep no compiled programs. They are kept in DIR/compiled, or runs/compiled, unless
            JAX_COMPILATION_CACHE_DIR is set; a config has platform.compilation_cache.
    """
    from jdist.launcher.launch import launch as start

    return start(
        command,
        processes=processes,
        workers=workers,
        ps=ps,
        evaluator=evaluator,
        devices_per_process=devices_per_process,
        max_restarts=max_restarts,
        on_loss=on_loss,
        spares=spares,
        host=host,
        join=join,
        log_dir=log_dir,
        grace_s=grace_s,
        stop_timeout_s=stop_timeout_s,
        regrow_s=regrow_s,
        compilation_cache=not no_compilation_cache,
    ).exit_code


def serve(
    *,
    role: Annotated[str | None, tyro.conf.DisallowNone, metavar("worker|ps")] = None,
    address: Address = None,
    grace_s: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 300.0,
    tls_cert: File = None,
    tls_key: File = None,
    tls_ca: File = None,
    health_address: Address = None,
    allow_custom_call: Annotated[tuple[str, ...], metavar("NAME")] = (),
    script: File = None,
    insecure: Flag = False,
    with_parent: Flag = False,
) -> int:
    """Be a worker, or a parameter server, of an asynchronous job.

    It has none of the job's code: the coordinator sends what it runs. TF_CONFIG says what it is and where it
    listens. It serves clients that have the secret in JDIST_TOKEN and, with TLS, a certificate of the authority in
    JDIST_TLS_CA; beyond loopback it needs both.

    For example:
      jdist serve
      jdist serve --role ps --address 127.0.0.1:4710
      jdist serve --role worker --address 0.0.0.0:2222 --tls-cert w.pem --tls-key w.key --tls-ca ca.pem

    Probes may ask grpc.health.v1.Health at the same address, without a token.

    Exit codes: 0 the coordinator has ended it; 75 nobody called for --grace-s, or the port is taken; 143 after
    SIGTERM; 2 what was asked for is not right.

    Args:
        role: worker or ps, instead of what TF_CONFIG says.
        address: where to listen, instead of what TF_CONFIG says; without both, a free port of loopback, which is
            printed.
        grace_s: seconds without a call after which it ends.
        tls_cert: its certificate, PEM; else JDIST_TLS_CERT.
        tls_key: its private key, PEM; else JDIST_TLS_KEY.
        tls_ca: certificates of the authority that signed all others', PEM; else JDIST_TLS_CA.
        health_address: answer probes here as well, without TLS, and nothing else.
        allow_custom_call: custom calls that received functions may make, in addition to XLA's own.
        script: the program; its functions may make datasets on a worker.
        insecure: listen beyond loopback without TLS or token.
        with_parent: end when standard input is closed or the parent process is gone, and not for lack of calls.
    """
    from jdist.cluster import exit_status
    from jdist.ps.serve import place
    from jdist.ps.serve import serve as start
    from jdist.ps.transport.security import AUTHORITY, CERTIFICATE, KEY, read_security

    security = read_security(os.environ, {CERTIFICATE: tls_cert, KEY: tls_key, AUTHORITY: tls_ca})
    served_role, served_address = place(role, address, os.environ)
    return start(
        served_role,
        served_address,
        security=security,
        grace_s=grace_s,
        allow=allow_custom_call,
        script=script,
        with_parent=with_parent,
        insecure=insecure,
        health_address=health_address,
        leave=exit_status.leave,
    )


def doctor(
    *,
    json: Flag = False,
    alone: Flag = False,
    timeout_s: Annotated[float, metavar("SECONDS")] = 60.0,
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
    from jdist.cli.doctor.report import examine, report

    return report(examine(alone=alone, timeout_s=timeout_s), as_json=json)
