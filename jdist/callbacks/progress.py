"""What a person sees while it trains."""

from __future__ import annotations

from rich.console import Console

from jdist.callbacks.callback import Callback, Moment
from jdist.report.history import OF_ROWS
from jdist.report.progress import Meter, Reporter, figures, numbers, open_report


def progress(console: Console | None = None) -> Callback:
    """A bar with figures on a terminal or in a notebook, plain lines anywhere else; of several processes the chief's.

    Args:
        console: where to; standard output if None.

    Returns:
        The callback.
    """
    reports: list[tuple[Reporter, Meter]] = []
    compiles = True

    def on_start(moment: Moment) -> None:
        nonlocal compiles
        compiles = True
        if moment.is_chief:
            report = open_report(console or Console(soft_wrap=True), step=moment.step, total=moment.total_steps)
            reports.append((report, Meter(step=moment.step, total=moment.total_steps)))
            if moment.step:
                report.note(f"going on from step {moment.step:,}")

    def on_step(moment: Moment) -> None:
        nonlocal compiles
        if reports and compiles:
            compiles = False
            _ = moment.metrics  # waits for the first step, which is a lap of its own: it compiles
            reports[0][1].lap(moment.step)
            reports[0][0].move(moment.step)

    def on_row(moment: Moment) -> None:
        if not reports or moment.row is None:
            return
        report, meter = reports[0]
        own = numbers(moment.row)
        newest = {name: value for name, value in own.items() if name not in OF_ROWS and "/" not in name}
        if newest:
            report.train(moment.step, newest, meter.lap(moment.step))
        else:
            report.move(moment.step)
        for prefix, said in (("epoch/", f"epoch {moment.epoch}"), ("eval/", "evaluation")):
            values = {name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)}
            if values:
                report.note(f"step {_of(moment)}  {said}: {figures(values)}")

    def on_end(moment: Moment) -> None:
        if reports and moment.reason is not None:
            reports[0][0].note(f"stopped at step {_of(moment)}: {moment.reason}{_how_to_go_on(moment)}")

    def close() -> None:
        while reports:
            reports.pop()[0].close()

    return Callback(on_start=on_start, on_step=on_step, on_row=on_row, on_end=on_end, close=close, logs=())


def _how_to_go_on(moment: Moment) -> str:
    if not moment.interrupted:
        return ""
    if moment.resumes:
        return "; saved: run the same again to go on from there"
    return "; nothing is saved: `callbacks=[jdist.callbacks.checkpoint(folder)]` saves, and goes on from there"


def _of(moment: Moment) -> str:
    return f"{moment.step}" if moment.total_steps is None else f"{moment.step}/{moment.total_steps}"
