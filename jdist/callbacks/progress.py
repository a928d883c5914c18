"""The progress of training, shown as it goes on."""

from __future__ import annotations

import dataclasses

from rich.console import Console

from jdist.callbacks.callback import Callback, Moment
from jdist.report.metrics_file import EPOCH, EVAL, OF_ROWS, PREFIXES
from jdist.report.progress import Meter, Reporter, figures, numbers, open_report


def progress(console: Console | None = None) -> Callback:
    """Draws a bar with figures on a terminal or in a notebook, prints lines anywhere else; of several processes the chief.

    Args:
        console: where to; None: standard output.

    Returns:
        The callback.
    """
    reports: list[Reporter] = []
    shown = reporting(console or Console(soft_wrap=True), reports)

    def on_start(moment: Moment) -> None:
        assert shown.on_start is not None
        shown.on_start(moment)
        if reports and moment.step:
            reports[0].note(f"going on from step {moment.step:,}")

    def on_end(moment: Moment) -> None:
        if reports and moment.reason is not None:
            reports[0].note(f"stopped at step {_step_text(moment)}: {moment.reason}{_how_to_go_on(moment)}")

    return dataclasses.replace(shown, on_start=on_start, on_end=on_end)


def reporting(console: Console, reports: list[Reporter], *, global_batch: int | None = None) -> Callback:
    """Shows the figures of each logged row.

    Args:
        console: where to.
        reports: receives the open report, while there is a run.
        global_batch: rows of a step, for the rows trained on in a second; None: steps are counted.
    """
    meter = Meter(step=0, total=None)
    compiles = True

    def on_start(moment: Moment) -> None:
        nonlocal compiles, meter
        compiles = True
        if moment.is_chief:
            reports.append(open_report(console, step=moment.step, total=moment.total_steps))
            meter = Meter(step=moment.step, total=moment.total_steps, global_batch=global_batch, clock=moment.clock)

    def on_step(moment: Moment) -> None:
        nonlocal compiles
        if reports and compiles:
            compiles = False
            _ = moment.metrics  # waits for the first step, which is a lap of its own: it compiles
            meter.lap(moment.step)
            reports[0].move(moment.step)

    def on_row(moment: Moment) -> None:
        if not reports or moment.row is None:
            return
        report, row = reports[0], numbers(moment.row)
        newest = {name: value for name, value in row.items() if name not in OF_ROWS and not name.startswith(PREFIXES)}
        if newest:
            report.train(moment.step, newest, meter.lap(moment.step))
        else:
            report.move(moment.step)
        for prefix, source in ((EPOCH, f"epoch {moment.epoch}"), (EVAL, "evaluation")):
            values = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
            if values:
                report.note(f"step {_step_text(moment)}  {source}: {figures(values)}")

    def close() -> None:
        while reports:
            reports.pop().close()

    return Callback(on_start=on_start, on_step=on_step, on_row=on_row, close=close, logs=())


def _how_to_go_on(moment: Moment) -> str:
    if not moment.interrupted:
        return ""
    if moment.resumes:
        return "; saved: run the same again to go on from there"
    return "; nothing is saved: `callbacks=[jdist.callbacks.checkpoint(folder)]` saves, and goes on from there"


def _step_text(moment: Moment) -> str:
    return f"{moment.step}" if moment.total_steps is None else f"{moment.step}/{moment.total_steps}"
