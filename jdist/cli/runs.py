"""`jdist runs`."""

from __future__ import annotations

from typing import Annotated

import tyro

from jdist.cli.run import Flag


def runs(
    folders: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER | A B]", help_behavior_hint="")
    ] = (),
    *,
    json: Flag = False,
) -> int:
    """List runs, or compare two.

    With a folder, or none for runs/, it lists the runs below it: task, strategy, steps, the metric that matters, time
    and state. With two run folders it shows the config keys in which they differ, their last metrics, and draws the
    curves of both into one picture beside the first.

    For example:
      jdist runs
      jdist runs runs/digits-sweep
      jdist runs runs/digits runs/short
      jdist runs --json

    Exit codes: 0; 2 there is no such run.

    Args:
        folders: a folder of runs; or two run folders, or their names in runs/.
        json: print JSON instead of tables.
    """
    from jdist.runs.show import show

    return show(folders, as_json=json)
