"""Experiment trackers: one protocol, and the callback that hands them a run's rows, pictures and hyperparameters."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jdist.callbacks.callback import Callback, Moment
from jdist.callbacks.delivery import Delivery, Record
from jdist.errors import ConfigError, StepError
from jdist.loop.report.history import History
from jdist.support import checks
from jdist.support.words import nearest

Status = Literal["finished", "interrupted", "failed"]
TIMEOUT_S = 30.0


class TrackerWarning(UserWarning):
    """A tracker failed or lost rows; training goes on."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """An answer of `Tracker.start`.

    Attributes:
        run_id: the tracker's own id, passed to `start` when the run resumes; None keeps the given one.
        logged: for each name, the last step that the tracker already has; None if it cannot say: jdist's record counts.
    """

    run_id: str | None = None
    logged: Mapping[str, int] | None = None


class Tracker(Protocol):
    """A place that shows runs. All its methods are called in one thread of its own, one after the other.

    An exception of `start` ends the tracking, one of `log` loses that row; both are named in one `TrackerWarning`, and training
    goes on.

    Example:
        >>> import jdist
        >>> class Printer:
        ...     def start(self, run_id, config, *, resumed):
        ...         return jdist.callbacks.Started()
        ...     def log(self, step, scalars, images):
        ...         print(step, sorted(scalars))
        ...     def finish(self, status):
        ...         print(status)
        >>> callback = jdist.callbacks.track(Printer(), name="printer")
    """

    def start(self, run_id: str, config: Mapping[str, Any], *, resumed: bool) -> Started:
        """Begins a run, or goes on with one.

        Args:
            run_id: of the run; of a new one eight hexadecimal digits, which are kept before this is called.
            config: hyperparameters, as plain JSON values.
            resumed: whether an earlier process started it, and may have been killed before the tracker saw anything.
        """
        ...

    def log(self, step: int, scalars: Mapping[str, float], images: Mapping[str, bytes]) -> None:
        """Takes in one row.

        Args:
            step: steps done; it never goes back.
            scalars: numbers by name, as in the row.
            images: PNG files by name.
        """
        ...

    def finish(self, status: Status) -> None:
        """Ends the run, once everything is delivered.

        Args:
            status: "interrupted" by Ctrl-C or SIGTERM, "failed" by an error; both may go on later.
        """
        ...


def track(
    tracker: Tracker, *, name: str, config: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S
) -> Callback:
    """Makes the callback that hands each logged row to a tracker.

    The chief alone does so, in a thread: training never waits for a tracker. A run that goes on from a checkpoint goes on in
    the tracker's run (its id is saved next to the checkpoints), and each metric has each step once.

    Args:
        tracker: where to.
        name: of the tracker, for messages and for the file with the id, `tracker-NAME.json`; each tracker of a run has its own.
        config: hyperparameters, as plain JSON values.
        timeout_s: how long the end of the run waits for what is not delivered yet.

    Raises:
        StepError: an argument is not allowed.

    Warns:
        TrackerWarning: while training: the tracker failed, or did not take everything.

    Example:
        See `Tracker`.
    """
    if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum():
        raise StepError(f"track: `name` is {name!r:.80}; it must be of letters, digits, - and _.")
    for method in ("start", "log", "finish"):
        if not callable(getattr(tracker, method, None)):
            raise StepError(
                f"track: `tracker` is {tracker!r:.80}, which has no method `{method}`; it needs start, log and finish, as "
                "`jdist.callbacks.Tracker` says."
            )
    checks.seconds("timeout_s", timeout_s, StepError, call="track")
    if config is not None and not isinstance(config, Mapping):
        raise StepError(f"track: `config` is {config!r:.80}; it must be a dict.")
    deliveries: list[Delivery] = []
    history = History()
    status: Status = "failed"

    def on_start(moment: Moment) -> None:
        nonlocal history, status
        if not moment.is_chief or (moment.total_steps is not None and moment.step >= moment.total_steps):
            return
        history, status = moment.history, "failed"
        delivery = Delivery(
            name,
            tracker,
            config=config or {},
            earlier=[_record(row) for row in history.rows],
            folder=moment.folder,
        )
        delivery.begin()
        deliveries.append(delivery)

    def on_row(moment: Moment) -> None:
        if deliveries and moment.row is not None:
            deliveries[0].put(_record(moment.row))
            _report(deliveries[0])

    def on_end(moment: Moment) -> None:
        nonlocal status
        status = "interrupted" if moment.interrupted else "finished"

    def close() -> None:
        while deliveries:
            delivery = deliveries.pop()
            delivery.end(status, list(history.rows), timeout_s=timeout_s)
            _report(delivery)

    return Callback(on_start=on_start, on_row=on_row, on_end=on_end, close=close, name=name, logs=())


def _record(row: Mapping[str, Any]) -> Record:
    return Record(step=row["step"], values={name: value for name, value in row.items() if name != "step"})


def _report(delivery: Delivery) -> None:
    for message in delivery.take_messages():
        # A registry of its own: otherwise Python shows the same warning only once per process.
        warnings.warn_explicit(message, TrackerWarning, __file__, 0, module=__name__, registry={})


def check_options(name: str, function: Callable[..., Any], options: Iterable[str], *, own: Iterable[str] = ()) -> None:
    """Refuses an option that a tracker does not take, or that jdist sets itself (`own`)."""
    parameters = list(inspect.signature(function).parameters.values())
    sets = set(own)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    takes = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name not in sets]
    for option in options:
        if option in sets:
            raise ConfigError(f"{name}: jdist sets {option!r} itself. Options: {', '.join(takes)}.")
        if option not in takes and not takes_any:
            raise ConfigError(f"{name}: no option {option!r}.{nearest(option, takes, label='Options', limit=40)}")
