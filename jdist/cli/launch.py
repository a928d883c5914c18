"""`jdist launch`."""

from __future__ import annotations

from typing import Annotated

import tyro

from jdist.cli.run import Flag


def launch(
    command: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND ...", help_behavior_hint="")
    ],
    *,
    processes: Annotated[str | None, tyro.conf.arg(metavar="N|MIN:MAX", help_behavior_hint="(default: 2)")] = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    ps: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    devices_per_process: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    evaluator: Flag = False,
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
    a longer wait, and go on from their last checkpoint; an exception (exit code 1) counts, as a lost peer
    ends in one, too. Only exit codes 2 and 74 do not. With MIN:MAX the next attempt does without the process
    that failed, and those killed with it; after --regrow-s all are asked to save and leave, and MAX go on. If
    that fails within --regrow-s, the job goes back to fewer, uses up no restart, and waits twice as long
    before it tries again.

    With --workers and --ps COMMAND runs once, as the chief of a parameter server; workers and servers run `jdist
    serve`. One of these that dies is started again alone, at the same port; all end with the chief. --max-restarts
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
        devices_per_process: run on so many virtual CPU devices each.
        evaluator: start one more process, of task type evaluator. It ends with the job, and its failure does not
            stop the others.
        max_restarts: how often to start all again after a failure; 0 if not given, 3 with MIN:MAX.
        log_dir: where logs go; runs/launch-TIME if not given.
        grace_s: seconds that others get to end by themselves after a failure, then to end after SIGTERM.
        stop_timeout_s: seconds to save and leave when asked to stop, before SIGKILL.
        regrow_s: seconds to go on with fewer than MAX before trying to grow.
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
        log_dir=log_dir,
        grace_s=grace_s,
        stop_timeout_s=stop_timeout_s,
        regrow_s=regrow_s,
    ).exit_code
