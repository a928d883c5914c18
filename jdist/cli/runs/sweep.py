"""`jdist sweep`: a config with each combination of some values, one run after the other, into one table and one picture."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jdist.cli.runs.grid import Point, Ranking, parse_grid, points, write_outcome
from jdist.cli.runs.summary import RunSummary, figure, main_metric, mode_of, read_run
from jdist.errors import ConfigError
from jdist.experiment.config import Config
from jdist.experiment.load import Document, differences, flow, load
from jdist.experiment.record import RunFolder, changed_sources
from jdist.experiment.validate import validate
from jdist.launcher.process import GuardPipe
from jdist.loop.report.files import writing
from jdist.loop.report.progress import duration
from jdist.support import checks
from jdist.support.signature import dotted

# Keys that a run may fill in, and writes with its config.
_FILLED_IN = ("decay_steps", "transition_steps")
# The line of a traceback that names the exception: those before it are indented.
_RAISED = re.compile(r"[A-Za-z_][\w.<>]*(: .*)?")


def sweep(
    config: str,
    overrides: Sequence[str],
    grid: Sequence[str],
    *,
    name: str | None = None,
    metric: str | None = None,
    mode: str | None = None,
    fresh: bool = False,
) -> int:
    """Runs a config with each combination of values, one after the other, and compares the runs."""
    trials = points(parse_grid(grid))
    base = validate(load(config, [*overrides, *trials[0].overrides]))
    ranking = _ranking(base, metric, mode)
    folder = Path(base.log.folder) / (name or f"{base.name}-sweep")
    settings = {
        trial: [*overrides, *trial.overrides, f"name={flow(trial.name)}", f"log.folder={flow(str(folder))}"]
        for trial in trials
    }
    configs = {trial: _checked(load(config, settings[trial])) for trial in trials}  # all, before any of them runs
    done: dict[Point, RunSummary] = {}
    if not fresh:
        done = {t: run for t in trials if (run := _finished(folder / t.name, configs[t])) is not None}
        for trial in trials:
            _check_source(RunFolder(folder / trial.name), configs[trial])
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    count = "1 run" if len(trials) == 1 else f"{len(trials):,} runs"
    print(f"{folder}: {count}" + (f", {len(done)} of them finished before" if done else ""), flush=True)

    failures: dict[Point, str] = {}
    stop = Stop()
    with stop.listening():
        for number, trial in enumerate(trials, start=1):
            if trial in done or stop.asked:
                continue
            what = f"[{number}/{len(trials)}] {' '.join(f'{k}={v}' for k, v in trial.values.items())}"
            print(f"{what}: {folder / trial.name}", flush=True)
            log = folder / f"{trial.name}.log"
            command = [sys.executable, "-m", "jdist", "run", config, *settings[trial], *(["--fresh"] if fresh else [])]
            code = run_child(command, log, stop)
            if code == 0:
                done[trial] = run = read_run(folder / trial.name)
                value = figure(run.last(ranking.metric))
                print(f"{what}: {ranking.metric} {value} in {duration(run.time_s)}", flush=True)
            elif not stop.asked:
                failures[trial] = failure(code, log)
                print(f"{what}: failed: {failures[trial]}; see {log}", flush=True)

    print("\n" + write_outcome(folder, trials, done, failures, ranking))
    if stop.exit_code is not None:
        print(f"stopped when {len(done):,} of {count} had finished; the same command goes on")
        return stop.exit_code
    return 1 if failures else 0


def _checked(document: Document) -> Config:
    """Checks the config of a run as far as that can be done before it runs; returns it as the run records it."""
    # These bring JAX, which lists and grids do without.
    from jdist.experiment.callbacks import complete
    from jdist.experiment.prepare import check_names

    config = validate(document)
    check_names(config, document)
    return complete(config)


def _ranking(config: Config, metric: str | None, mode: str | None) -> Ranking:
    """Makes the ranking from the command line, else from the config."""
    metric = main_metric(config) if metric is None else metric.removeprefix("eval/")
    if mode is not None:
        return Ranking(metric=metric, mode=checks.choice("--mode", mode, ("max", "min"), ConfigError))
    best = mode_of(config, metric)
    if best is None:
        raise ConfigError(
            f"--metric {metric}: cannot tell from the name whether higher is better; set --mode max or min."
        )
    return Ranking(metric=metric, mode=best)


def _check_source(folder: RunFolder, config: Config) -> None:
    """Refuses a run made by other source: it is not comparable to later ones."""
    changed = changed_sources(config.task.make, folder.source)
    if changed:
        raise ConfigError(
            f"{folder.path}: holds a run with other source of the task: {', '.join(changed)} has changed (the run's copy: "
            f"{folder.source}). Give the sweep another --name, or say --fresh, which keeps the old folders."
        )


def _finished(path: Path, wanted: Config) -> RunSummary | None:
    """Reads the run of a folder if it has finished; refuses one with another config."""
    if not RunFolder(path).result.is_file() or (run := read_run(path)).status != "finished":
        return None  # `jdist run` says whether it may go on
    different = [
        f"{dotted(key)}: {then} there, {now} now"
        for key, (then, now) in differences(run.config.model_dump(), wanted.model_dump()).items()
        if not (key[-1] in _FILLED_IN and now == "not set")
    ]
    if different:
        raise ConfigError(
            f"{path}: holds a finished run with a different config: {'; '.join(different)}. Give the sweep another --name, "
            "or say --fresh, which keeps the old folders."
        )
    return run


def failure(code: int, log: Path) -> str:
    """Describes why a run failed: its own last words, its traceback's error, or its last line."""
    # `code` is minus the number of the signal that killed it.
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    error = next((line.removeprefix("jdist: ") for line in reversed(lines) if line.startswith("jdist: ")), None)
    if error:
        return error.rstrip(".")
    ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    since = max(
        (i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")), default=None
    )
    raised = [] if since is None else [line for line in lines[since + 1 :] if _RAISED.fullmatch(line)]
    last = next(iter(raised or lines[-1:]), "")  # an exception's notes follow its own line
    return f"{ended}, {last.strip()}" if last else ended


class Stop:
    """A wish to stop, by Ctrl-C or SIGTERM; it is handed on to the running command."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._pass_on: Callable[[signal.Signals], None] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listens while the block runs: the first signal is passed on, a second one kills."""

        def on_signal(number: int, frame: object) -> None:
            again, self.asked = self.asked is not None, signal.Signals(number)
            if self._pass_on is not None:
                self._pass_on(signal.SIGKILL if again else self.asked)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def passed_on(self, send: Callable[[signal.Signals], None]) -> Iterator[None]:
        """Hands signals to `send` while the block runs, one that came before it too."""
        self._pass_on = send
        if self.asked is not None:
            send(self.asked)
        try:
            yield
        finally:
            self._pass_on = None

    @property
    def exit_code(self) -> int | None:
        """128 plus the number of the signal; None if there was none."""
        return None if self.asked is None else 128 + self.asked


def run_child(command: Sequence[str], log: Path, stop: Stop) -> int:
    """Runs a command to its end; returns its exit code, or minus the signal that killed it."""
    # It runs under the launcher's guard (`jdist/launcher/guard.py`), so that it, and all that it
    # starts, ends with this process, however that ends. `stop` forwards it the signals that come
    # here.
    with writing(log), log.open("wb") as output:
        guard = GuardPipe(command, os.environ, output=output)
        with contextlib.closing(guard), stop.passed_on(guard.send):
            while not guard.is_gone():  # waits as long as the run lasts; signals get through meanwhile
                pass
    return guard.end()[0]
