"""`jdist run --replay`: a repeat of a finished run, in a folder next to it, and a comparison of every bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from jdist.cli.runs.summary import near_run
from jdist.errors import ConfigError
from jdist.experiment.load import flow, load
from jdist.experiment.platform import VARIABLES, apply_platform
from jdist.experiment.record import RunFolder, read_result, read_starts
from jdist.experiment.validate import validate
from jdist.loop.report.metrics_file import COSTS, Row, read_rows

_CLOCK = ("time_s", *COSTS)  # no two runs take the same time


def replay(folder: str, *, fresh: bool = False) -> int:
    """Repeats a run from its first step; compares metrics and last state with the original."""
    # It is written to NAME.replay next to the run. One that was stopped there continues, unless
    # `fresh` sets it aside; a finished one is set aside. Returns exit code 0 if all is equal bit
    # for bit, 1 if not; 130 and 143 if it was stopped.
    original = RunFolder(Path(folder).resolve())
    if not original.config.is_file():
        near = near_run(Path(folder)) or " Name one, as runs/digits."
        raise ConfigError(f"{folder}: not a run folder: it has no config.yaml.{near}")
    starts, result = read_starts(original), read_result(original)
    if not starts:
        raise ConfigError(
            f"{original.environment}: missing, or lists no start of the run, so nothing says what to repeat. Restore the file, "
            "or start the run again with --fresh."
        )
    if result is None or not result.is_end(starts[-1].total_steps):
        raise ConfigError(
            f"{folder}: this run stopped before its {starts[-1].total_steps:,} steps, so it has no end to compare with. "
            "Finish it first, with the command that started it."
        )
    name, place = f"{original.path.name}.replay", str(original.path.parent)
    document = load(original.config, [f"name={flow(name)}", f"log.folder={flow(place)}"])
    config = validate(document)
    for variable in VARIABLES:
        if variable in starts[-1].environment:
            os.environ.setdefault(variable, starts[-1].environment[variable])
    apply_platform(config.platform)

    # These import JAX, which then reads the variables.
    from jdist.cluster.runtime import started
    from jdist.experiment.run import run

    again = RunFolder(original.path.with_name(name))
    code = run(
        config,
        document,
        command=f"jdist run --replay {folder}",
        fresh=fresh or again.result.exists(),
        original=starts,
    )
    cluster = started()
    if code or (cluster is not None and not cluster.is_chief):
        return code
    repeated = read_result(again)
    assert repeated is not None  # `run` returned 0
    rows, rows_again = read_rows(original.metrics), read_rows(again.metrics)
    different = [*first_difference(rows, rows_again), *state_difference(result.state, repeated.state)]
    if different:
        print("differs: " + "\n         ".join(different))
        return 1
    print(f"matched: {len(rows)} rows of metrics and the {len(result.state)} arrays of the state are equal bit for bit")
    return 0


def first_difference(there: Sequence[Row], here: Sequence[Row]) -> list[str]:
    """Describes the first metric in which two runs differ, without the clock; else nothing."""
    theirs, ours = ({row["step"]: row for row in rows} for rows in (there, here))
    for step in sorted({**theirs, **ours}):
        if step not in theirs or step not in ours:
            side = "here" if step not in theirs else "there"
            return [f"step {step}: there is a row of metrics {side} alone"]
        a, b = theirs[step], ours[step]
        for name in {**a, **b}:
            if name not in _CLOCK and a.get(name) != b.get(name):
                return [f"step {step}: {name} is {a.get(name)!r} there, {b.get(name)!r} here"]
    return []


def state_difference(there: dict[str, str], here: dict[str, str]) -> list[str]:
    """Says which arrays of two states differ; nothing if none does."""
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return [f"state: {len(names)} of {len({**there, **here})} arrays, the first is {names[0]}"] if names else []
