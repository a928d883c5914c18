"""The progress of a run: a bar on a terminal or in a notebook, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import html
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, MofNCompleteColumn, Progress, RenderableColumn, TextColumn
from rich.table import Column
from rich.text import Text

from jdist.support.words import size

Costs = Mapping[str, float]  # the `COSTS` of a row
_NONE: Costs = {}
_COMPILING = "compiling the first step"
_NOTES = 10  # that a notebook shows at a time
_REDRAW_S = 0.2  # a notebook's reader sees no more, and each costs a message


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a run since the last report; NaN if it is unknown."""

    examples_per_s: float  # rows trained on
    steps_per_s: float
    eta_s: float  # seconds for the remaining steps, without evaluations and saves


class Meter:
    """A stopwatch for training steps; stopped while the run evaluates or saves."""

    # `step` steps of `total` were done before, in `earlier_s` seconds of earlier processes;
    # `global_batch` are the rows of a step.

    def __init__(
        self,
        *,
        step: int,
        total: int | None,
        global_batch: int | None = None,
        earlier_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._total, self._global_batch = clock, total, global_batch
        self._start = clock() - earlier_s
        self._step, self._lap_s = step, self.train_s
        self._step_s: list[float] = []

    @property
    def train_s(self) -> float:
        """Seconds of training up to now, over all processes of the run."""
        return self._clock() - self._start

    def lap(self, step: int) -> Speed:
        """Measures the speed since the last lap; `step` steps are done by now."""
        now = self.train_s
        if step == self._step:
            return Speed(examples_per_s=math.nan, steps_per_s=math.nan, eta_s=math.nan)
        step_s = (now - self._lap_s) / (step - self._step)
        self._step, self._lap_s = step, now
        # The first lap holds the compilation: it does not count as soon as there is another.
        self._step_s = [*self._step_s[-4:], step_s] if len(self._step_s) != 1 else [step_s, step_s]
        left = math.nan if self._total is None else self._total - step
        rate = 1 / step_s if step_s > 0 else math.nan
        rows = math.nan if self._global_batch is None else self._global_batch
        return Speed(examples_per_s=rows * rate, steps_per_s=rate, eta_s=left * sum(self._step_s) / len(self._step_s))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leaves what happens in the block out of the time."""
        before = self._clock()
        try:
            yield
        finally:
            self._start += self._clock() - before


class Lines:
    """A plain line for each report."""

    # Like `Bar` and `NotebookBar` it takes the current step, with figures (`train`) or without
    # (`move`), and notes. Closing twice does no harm.

    def __init__(self, total: int | None, file: IO[str]) -> None:
        self._total, self._file = total, file

    def note(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def move(self, step: int) -> None:
        """A line needs figures."""

    def close(self) -> None:
        """Lines are written already."""

    def train(self, step: int, metrics: Mapping[str, float], speed: Speed, costs: Costs = _NONE) -> None:
        self.note("  ".join([_done(step, self._total), *_parts(metrics, speed, costs)]))


class Bar:
    """A bar that fills, with the newest figures next to it; notes scroll past above it."""

    def __init__(self, progress: Progress, shown: _Fitting, *, step: int, total: int | None) -> None:
        self._progress, self._shown = progress, shown
        self._bar = progress.add_task("train", total=total, completed=step)

    def train(self, step: int, metrics: Mapping[str, float], speed: Speed, costs: Costs = _NONE) -> None:
        *figures, eta = _parts(metrics, speed, costs)
        self._shown.figures = [eta, *figures]
        self._progress.update(self._bar, completed=step)

    def move(self, step: int) -> None:
        """Moves the bar and leaves its figures, if it has any: they come with the first compiled step."""
        self._shown.figures = [each for each in self._shown.figures if each != _COMPILING]
        self._progress.update(self._bar, completed=step)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, emoji=False)

    def close(self) -> None:
        self._progress.stop()


class _Fitting:
    """Figures on one line, from the first to the last that has room there."""

    def __init__(self, figures: Sequence[str]) -> None:
        self.figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = "".join(self.figures[:1])
        for figure in self.figures[1:]:
            longer = f"{line}  {figure}"
            if cell_len(longer) > options.max_width:
                break
            line = longer
        yield Text(line, no_wrap=True, overflow="ellipsis")


class NotebookBar:
    """A bar in a notebook, with the newest figures next to it and notes below: one output, redrawn in its place."""

    def __init__(self, *, step: int, total: int | None) -> None:
        from IPython import display  # a notebook's kernel has it

        self._step, self._total, self._figures = step, total, _COMPILING
        self._notes: list[str] = []
        self._drawn_s = time.monotonic()
        self._handle: Any = display.display(self._output(), raw=True, display_id=True)

    def train(self, step: int, metrics: Mapping[str, float], speed: Speed, costs: Costs = _NONE) -> None:
        self._figures = "  ".join(_parts(metrics, speed, costs))
        self.move(step)

    def move(self, step: int) -> None:
        """Moves the bar and leaves its figures, if it has any: they come with the first compiled step."""
        self._step = step
        self._figures = "" if self._figures == _COMPILING else self._figures
        if time.monotonic() - self._drawn_s >= _REDRAW_S:
            self._draw()

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        self._handle.update(self._output(), raw=True)

    def _output(self) -> dict[str, str]:
        done = _done(self._step, self._total)
        left_out = len(self._notes) - _NOTES
        notes = [f"({left_out:,} earlier)"] * (left_out > 0) + self._notes[-_NOTES:]
        bar = "" if self._total is None else f'<progress value="{self._step}" max="{self._total}"></progress> '
        line = f"{html.escape(done)} {bar}{html.escape(self._figures)}"
        below = "".join(f"\n{html.escape(note)}" for note in notes)
        return {
            "text/plain": "\n".join([f"{done}  {self._figures}".rstrip(), *notes]),
            "text/html": f"<pre>{line}{below}</pre>",
        }


Reporter = Lines | Bar | NotebookBar


def open_report(console: Console, *, step: int, total: int | None) -> Reporter:
    """Opens the report that suits a console: a bar on a terminal or in a notebook, else lines."""
    if console.is_jupyter and console.file is sys.stdout:
        return NotebookBar(step=step, total=total)
    if not console.is_terminal:
        return Lines(total, console.file)
    digits = len(str(step if total is None else total))
    counter = Column(no_wrap=True, min_width=2 * digits + 1)
    columns = (TextColumn("step", table_column=Column(min_width=4)), MofNCompleteColumn(table_column=counter))
    bar = BarColumn(bar_width=max(8, console.width // 10))
    shown = _Fitting([_COMPILING])
    figures = RenderableColumn(shown, table_column=Column(ratio=1))  # the room that the others leave
    progress = Progress(*columns, bar, figures, console=console, expand=True)
    progress.start()
    return Bar(progress, shown, step=step, total=total)


def figures(metrics: Mapping[str, Any]) -> str:
    """Formats metrics on one line, `loss 0.3124  accuracy 0.91`; leaves arrays out."""
    return "  ".join(f"{name} {readable(value)}" for name, value in numbers(metrics).items())


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Selects the metrics that are numbers, no arrays."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def readable(value: float) -> str:
    """Formats a number in about four digits, with an exponent only if it is very large or small."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Formats seconds as `0:01:20`, or as `-` if they are not known."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _done(step: int, total: int | None) -> str:
    return f"step {step}" if total is None else f"step {step:>{len(str(total))}}/{total}"


def percent(share: float) -> str:
    """Formats a share as `63 %`."""
    return f"{100 * share:.0f} %"


def _parts(metrics: Mapping[str, float], speed: Speed, costs: Costs) -> Iterator[str]:
    yield from (f"{name} {readable(value)}" for name, value in numbers(metrics).items())
    if math.isfinite(speed.examples_per_s):
        yield f"{speed.examples_per_s:,.0f} examples/s"
    if "steps_per_s" in costs:
        yield f"{readable(costs['steps_per_s'])} steps/s"
    elif math.isfinite(speed.steps_per_s) and not math.isfinite(speed.examples_per_s):
        yield f"{readable(speed.steps_per_s)} steps/s"
    if "input_wait_share" in costs:
        yield f"input wait {percent(costs['input_wait_share'])}"
    if "mfu" in costs:
        yield f"mfu {percent(costs['mfu'])}"
    if "peak_memory_bytes" in costs:
        yield f"peak memory {size(int(costs['peak_memory_bytes']))}"
    if "goodput" in costs:
        yield f"goodput {percent(costs['goodput'])} overall"
    yield f"ETA {duration(speed.eta_s)}"
