"""`jdist doctor`."""

from __future__ import annotations

from typing import Annotated

import tyro

from jdist.cli.run import Flag


def doctor(
    *,
    json: Flag = False,
    alone: Flag = False,
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
