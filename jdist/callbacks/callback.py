"""Callbacks, the moments that they are called at, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from jdist.checkpoint.folder import Place
from jdist.errors import StepError
from jdist.loop.report.history import History
from jdist.loop.report.metrics_file import COSTS, OF_ROWS
from jdist.support.checks import is_number
from jdist.typing import PyTree

if TYPE_CHECKING:
    from jdist.core.strategy import Strategy

Event = Literal["resume", "start", "step", "eval", "epoch", "row", "save", "end"]


@dataclass(frozen=True)
class Stop:
    """A callback's answer that ends training after this step, in good order.

    Attributes:
        reason: for `history.stopped`.
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class Resume:
    """An answer of `on_resume`: training goes on from here.

    Attributes:
        state: the state to go on with.
        step: how many steps it has behind it.
        data: the position in the data, as `moment.data()` gave it; None: not known.
        notes: as `moment.notes()` gave them.
    """

    state: PyTree
    step: int
    data: dict[str, Any] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Return:
    """An answer of `on_end`: `jdist.fit` returns this state in place of the newest.

    Attributes:
        state: the state to return.
    """

    state: PyTree


@dataclass(kw_only=True, eq=False)
class Moment:
    """A moment of a training run, the argument of each callback.

    Attributes:
        event: which of a callback's functions is called.
        step: steps done, each with a batch; also those that left their update out, as a gradient was not finite.
        steps_in_call: how many of them the newest call of the step has made; 0 before the first.
        total_steps: how many there will be; None: not known.
        epoch: epochs that have ended.
        state: the newest state, laid out by the strategy; the next step consumes it, so a callback that keeps it copies it.
        strategy: the one that trains.
        history: all that was measured so far, this moment's row included.
        row: the row that is logged at this moment, for `on_row`; None where nothing is.
        reason: at "end": why it ended before its time; None if it did not.
        interrupted: at "end": whether it was ended from outside, by Ctrl-C or SIGTERM.
        resumes: whether a callback can go on with a run, `on_resume`.
        moves: at "resume" and "start": whether the run goes on from its own copy in another world of processes, after a loss.
        data: returns the position in the data, to save; None for data that cannot go on where it was.
        notes: returns plain JSON values to save with state and position, so that the run can go on.
        kept: the `Callback.keeps` of this run by name.
        folder: where a callback keeps what the run goes on from, `Callback.folder`; None: none does.
        measure: returns `metrics`.
        clock: returns `train_s`.
        spend: returns `spent`.
    """

    event: Event
    step: int
    steps_in_call: int
    total_steps: int | None
    epoch: int
    state: PyTree
    strategy: Strategy
    history: History
    row: dict[str, Any] | None
    reason: str | None
    interrupted: bool
    resumes: bool
    moves: bool
    data: Callable[[], dict[str, Any] | None]
    notes: Callable[[], dict[str, Any]]
    kept: Mapping[str, Keeps]
    folder: Place | None
    measure: Callable[[], dict[str, Any]]
    clock: Callable[[], float]
    spend: Callable[[], Mapping[str, float]]

    @property
    def metrics(self) -> dict[str, Any]:
        """Results by name: at "step" of the newest step, which is waited for; at "eval" and "epoch" over all rows."""
        return self.measure()

    @property
    def train_s(self) -> float:
        """Seconds of training up to now, evaluations and saves left out; over all processes of a run that went on."""
        return self.clock()

    @property
    def spent(self) -> Mapping[str, float]:
        """Seconds of this process up to now by what they went to: "steps", "input", "evaluation", "checkpoint", ..."""
        return self.spend()

    @property
    def is_chief(self) -> bool:
        """Returns whether this process writes: true of one process of a job. Callbacks are called on all."""
        return self.strategy.cluster.is_chief

    def log(self, **values: Any) -> None:
        """Adds `**values`, numbers or scalar arrays by name, to the row of this moment, if it has one.

        Raises:
            StepError: a value is not a number, or its name is one that rows have themselves.
        """
        for name, value in values.items():
            if name in OF_ROWS + COSTS:
                raise StepError(f"moment.log: rows have {name!r} themselves. Choose another name.")
            if not is_number(value):
                raise StepError(f"moment.log: {name!r} is {value!r:.80}; give one number.")
        if self.row is not None:
            self.row.update({name: float(value) for name, value in values.items()})


@dataclass(frozen=True)
class Keeps:
    """Access to a callback's own arrays, which are saved with the state."""

    begin: Callable[[PyTree], None]  # called with the state before the first step
    get: Callable[[], PyTree]  # returns the tree of arrays
    put: Callable[[PyTree], None]  # restores it


On = Callable[[Moment], Any]


@dataclass(frozen=True, kw_only=True)
class Callback:
    """Functions that `jdist.fit` calls, each with a `Moment`; those left out are not called.

    After each call of the step come, where they are due, in this order: `on_eval`, `on_epoch`, `on_step`, `on_row`,
    `on_save`; of each those of all callbacks, in their order. Any may answer `Stop("why")`.

    Attributes:
        on_resume: before all others; may answer a `Resume`.
        on_start: before the first step, where the run begins or goes on.
        on_step: after each call of the step. Reading `moment.metrics` there waits for the step, each time.
        on_eval: after each evaluation.
        on_epoch: after each epoch.
        on_row: with each row that is logged, complete.
        on_save: after each call of the step, once all callbacks have seen it, so that state, rows and what they keep are saved
            as of one moment.
        on_end: at the end, also after an interrupt or a `Stop`; may answer a `Return`.
        close: at the very end, also after an error; without arguments. With `on_loss="continue"` also before the run goes on
            in another world of processes, where `on_resume` and `on_start` are called again, on those that come in, too.
        keeps: arrays of its own, which are saved with the state under `name`.
        name: for errors, and for `keeps`, where no other callback of the run may have it.
        folder: where it keeps what a run goes on from, on a disk or in a bucket; others may keep theirs there too, each in
            a file of its own.
        watches: names that it looks at in a row, such as "eval/loss"; a run that will not measure one is refused at once.
        logs: names that it adds to rows by `moment.log`, which others may look at though no step returns them; None: any.

    Raises:
        StepError: `watches` or `logs` is not a tuple of names.

    Example:
        >>> import jdist
        >>> def tell(moment):
        ...     print(f"epoch {moment.epoch}: {moment.metrics['loss']:.2f}")
        >>> callback = jdist.callbacks.Callback(on_epoch=tell)
    """

    on_resume: On | None = None
    on_start: On | None = None
    on_step: On | None = None
    on_eval: On | None = None
    on_epoch: On | None = None
    on_row: On | None = None
    on_save: On | None = None
    on_end: On | None = None
    close: Callable[[], None] | None = None
    keeps: Keeps | None = None
    name: str = "callback"
    folder: Place | None = None
    watches: tuple[str, ...] = ()
    logs: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for argument, names in (("watches", self.watches), ("logs", () if self.logs is None else self.logs)):
            if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
                raise StepError(
                    f'{self.name}: `{argument}` is {names!r:.80}; give a tuple of names, such as ("loss",).'
                )
