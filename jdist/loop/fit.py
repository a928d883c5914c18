"""`jdist.fit`: training with evaluation, metrics, logs and callbacks."""

from __future__ import annotations

import datetime
import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jdist import callbacks as ready_made
from jdist.callbacks.callback import Callback, Moment
from jdist.callbacks.rows import jsonl
from jdist.callbacks.rows import progress as progress_bar
from jdist.cluster.stop import preemption
from jdist.core.strategy import Strategy
from jdist.errors import NonFiniteClosureError, NonFiniteError, StepError
from jdist.loop.data import check_filled, is_arrays, open_feed
from jdist.loop.evaluate import Evaluation
from jdist.loop.keras_hints import with_hints
from jdist.loop.metric_totals import Metrics
from jdist.loop.report.history import History
from jdist.loop.run import Run
from jdist.loop.steps import eval_step_of, metrics_of, strategy_of, train_step_of
from jdist.loop.task import Task
from jdist.loop.train import train
from jdist.metrics import Metric
from jdist.step.base import Distributed
from jdist.step.options import Verify, check_verify
from jdist.support import checks
from jdist.typing import PyTree


@with_hints
def fit(
    step: Any,
    state: PyTree,
    data: Any,
    *,
    strategy: Strategy | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    steps_per_epoch: int | None = None,
    global_batch: int | None = None,
    shuffle_seed: int | None = None,
    steps_per_call: int | None = None,
    eval_data: Any = None,
    eval_step: Any = None,
    eval_every: int | None = None,
    eval_strategy: Strategy | None = None,
    metrics: Mapping[str, Metric] | Metric | None = None,
    callbacks: Sequence[Callback | Callable[[Moment], Any]] = (),
    log_every: int = 20,
    log_to: str | os.PathLike[str] | None = "runs/fit",
    progress: bool = True,
    verify: Verify = "first",
    compilation_cache: bool = True,
) -> tuple[PyTree, History]:
    """Trains a state by a step, with evaluation, metrics, logs and callbacks.

    Args:
        step: `(state, batch) -> (state, metrics)` of one replica's slice of the batch; or that step distributed already,
            which is how other options of `jdist.distribute` are given; or a `jdist.tasks.Task`.
        state: laid out by the strategy (`strategy.init(...)`), or on the host. It is consumed, as by a call of the step.
        data: to train on: numpy arrays (a dict, a tuple or one array, [rows, ...]); a source of global batches
            (`jdist.data.from_arrays`, `from_files`, any iterable of numpy trees); a function from a `jdist.InputContext` to
            a source, as for `strategy.distribute_datasets_from_function`; or a dataset that was distributed already.
        strategy: where the step runs; None: the step's own, else the current one.
        epochs: how often to go through the data; or give `steps`. Neither: once.
        steps: how many optimiser updates to make, in as many passes over the data as it takes; with `steps_per_call` up to
            a call more, where passes that are not a multiple of it end in shorter calls.
        steps_per_epoch: how many steps make an epoch, in as many passes over the data as they take; for data without end, or
            for epochs other than passes. None: a pass is an epoch.
        global_batch: rows of a step over all replicas, if `data` is arrays; at most twice those there are. The last of an epoch
            may have fewer, which are filled up and masked.
        shuffle_seed: draws a new order each epoch, if `data` is arrays; None keeps theirs.
        steps_per_call: how many steps are compiled into one call; None: the step's own, else 1.
        eval_data: to evaluate on, as `data`; arrays in batches of `global_batch`.
        eval_step: `(state, batch) -> metrics`, distributed or not; None: the task's.
        eval_every: how many steps lie between evaluations; None: an epoch. At the end as well, unless it was stopped before.
        eval_strategy: where to evaluate, on the fetched state; None: where it trains.
        metrics: by name the metrics of `jdist.metrics` that the steps return contributions to; or one metric, such as a
            `jdist.metrics.collect`, if its contribution is all that a step returns. None: the task's.
        callbacks: `Callback`s of `jdist.callbacks`; a plain function is one for `on_step`.
        log_every: how many steps lie between logged rows.
        log_to: the folder for a new file of rows, one JSON object a line; None for none.
        progress: whether to draw a bar, or print lines where there is neither terminal nor notebook.
        verify: compares the first step, and the first evaluated batch, with one replica that sees the whole batch, and names
            what differs: "first" warns, "strict" raises, "off" compares nothing. It costs a compilation and a few steps each;
            what could not be compared is printed. A step's own `verify` takes precedence. See `jdist.verify`.
        compilation_cache: whether a run with `jdist.callbacks.checkpoint` keeps compiled programs in that folder, so that it
            resumes without compiling, unless JAX has a folder for them already. JAX's settings are restored at the end.

    Returns:
        The newest state, and the history, with the means and metrics of each epoch, exact over all its rows. An interrupt
        (Ctrl-C, a notebook's stop button) ends training in good order after the running step, and what was reached is returned,
        with `history.stopped`; a second one, more than a second later, is a KeyboardInterrupt.

    Raises:
        StepError: the step, its results or an option is not valid.
        DatasetError: `data` is not data, has less than half the rows of a batch, or ends before `steps`.
        NonFiniteError: a gradient was NaN or infinite, and the step's `non_finite` is "raise".
        OutOfMemoryError: a device has no memory left; it names the largest arrays that were there.
        VerificationError: the first step is another than on one replica, and `verify` is "strict".
        SystemExit: the process was asked to end (SIGTERM); callbacks have saved, the code is 143.

    Warns:
        VerificationWarning: the first step is another than on one replica, and `verify` is "first".
        CheckpointWarning: a callback resumes runs, and the data has no position to go on at.
        UserWarning: a step returns the state unchanged, or never reads the mask where batches of arrays are filled up.

    Example:
        >>> import jdist, numpy as np
        >>> def train_step(w, batch):
        ...     loss, grad = jdist.value_and_grad(lambda w: jdist.mean((w * batch["x"] - 2.0) ** 2, batch["mask"]))(w)
        ...     return w - 0.1 * grad, {"loss": loss}
        >>> rows = {"x": np.ones(100, np.float32)}
        >>> w, history = jdist.fit(train_step, 0.0, rows, epochs=2, global_batch=16, progress=False, log_to=None)
        >>> [(epoch["step"], round(epoch["loss"], 3)) for epoch in history.epochs]
        [(7, 1.667), (14, 0.073)]

    Source: `tf.keras.Model.fit`
    """
    begun = time.monotonic()
    check_verify(verify)
    log_every = checks.whole_number("log_every", log_every, StepError)
    epochs = _count("epochs", epochs)
    steps = _count("steps", steps)
    steps_per_epoch = _count("steps_per_epoch", steps_per_epoch)
    steps_per_call = _count("steps_per_call", steps_per_call)
    eval_every = _count("eval_every", eval_every)
    if epochs is not None and steps is not None:
        raise StepError(f"`epochs` is {epochs} and `steps` is {steps}; give one of them.")
    if steps_per_epoch is not None and steps is None:
        epochs, steps = None, (epochs or 1) * steps_per_epoch
    strategy = strategy_of(step, strategy, state)
    train_step = train_step_of(step, strategy, steps_per_call=steps_per_call)
    objects = cast("Any", train_step).over(state) if train_step.holds_objects else None
    if objects is not None:
        train_step, state = objects, objects.state
        if eval_step is not None and not isinstance(eval_step, Distributed) and callable(eval_step):
            eval_step = objects.of_state(eval_step)
    metrics = metrics_of(step, metrics)
    check_filled(data, global_batch)
    feed = open_feed(
        data,
        strategy,
        epochs=epochs,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        global_batch=global_batch,
        shuffle_seed=shuffle_seed,
        steps_per_call=train_step.options.steps_per_call,
        batch_axis=train_step.options.batch_axis,
    )
    evaluation = _evaluation(step, eval_step, eval_data, strategy, eval_every, eval_strategy, global_batch, metrics)
    run = Run(
        strategy=strategy,
        train_step=train_step,
        feed=feed,
        metrics=metrics,
        callbacks=_callbacks(callbacks, log_to=log_to, progress=progress),
        steps=steps,
        passes=1 if feed.steps_per_epoch is not None or (steps is None and epochs is None) else epochs,
        log_every=log_every,
        evaluate=evaluation,
        eval_every=() if eval_every is None else (eval_every,),
        length="`steps`" if steps_per_epoch is None else "`epochs` times `steps_per_epoch`",
        compilation_cache=compilation_cache,
        begun=begun,
    )
    cluster = None if strategy.cluster.is_alone else strategy.cluster
    with preemption(cluster, second="raise") as stop:
        try:
            train(run, state, stop=stop, verify=verify, depth=3)
        except Exception as exc:
            if run.first is not None:
                exc.add_note(
                    f"{_name_step(exc, step, run)} The newest state of a step that you distribute yourself, "
                    "`train_step = jdist.distribute(...)`, is in `train_step.last_state`."
                )
            raise
    state = run.state if objects is None else objects.with_state(run.state)
    if stop.reason not in (None, "SIGINT"):
        raise SystemExit(stop.exit_code)
    return state, run.history


def _evaluation(
    step: Any,
    eval_step: Any,
    data: Any,
    strategy: Strategy,
    every: int | None,
    elsewhere: Strategy | None,
    global_batch: int | None,
    metrics: Metrics,
) -> Evaluation | None:
    """Makes the evaluation; None without data for it."""
    if data is None:
        for name, value in (("eval_step", eval_step), ("eval_every", every), ("eval_strategy", elsewhere)):
            if value is not None:
                raise StepError(f"`{name}` is given without `eval_data`. Give the data to evaluate on as well.")
        return None
    if eval_step is None and not isinstance(step, Task):
        raise StepError(
            "`eval_data` is given without `eval_step`, a function `(state, batch) -> metrics`. Give that as well."
        )
    place = strategy if elsewhere is None else elsewhere
    rows = global_batch if is_arrays(data) else None
    distributed = eval_step_of(step if eval_step is None else eval_step, place, call="jdist.fit")
    batch_axis = distributed.options.batch_axis
    return Evaluation(
        step=distributed,
        feed=open_feed(data, place, global_batch=rows, batch_axis=batch_axis),
        strategy=place,
        trained_by=strategy,
        metrics=metrics,
    )


def _callbacks(
    callbacks: Sequence[Callback | Callable[[Moment], Any]], *, log_to: str | os.PathLike[str] | None, progress: bool
) -> list[Callback]:
    """Checks a user's callbacks and adds those that report."""
    if isinstance(callbacks, Callback) or callable(callbacks):
        raise StepError("`callbacks` is one callback; give a list: `callbacks=[...]`.")
    if not isinstance(callbacks, Sequence):
        raise StepError(f"`callbacks` is {callbacks!r:.80}; give a list, [] for none.")
    listed = [each if isinstance(each, Callback) else _on_step(each) for each in callbacks]
    if log_to is not None:
        if "://" in str(log_to):
            raise StepError(f"fit: `log_to` is {log_to}; rows are appended one by one, so name a folder on a disk.")
        if Path(log_to).suffix == ".jsonl":
            raise StepError(
                f"fit: `log_to` is {log_to}, the name of a file; give a folder, in which each run writes a new file "
                f"metrics-TIME.jsonl. For a file of your own give `log_to=None` and "
                f"`callbacks=[jdist.callbacks.jsonl({os.fspath(log_to)!r})]`."
            )
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        listed.append(jsonl(Path(log_to) / f"metrics-{now}.jsonl"))
    return [*listed, progress_bar()] if progress else listed


def _on_step(function: Any) -> Callback:
    """Makes a callback of a function of a moment."""
    if callable(function) and function in vars(ready_made).values():
        name = function.__name__
        raise StepError(f"`callbacks` has `jdist.callbacks.{name}` itself. Call it: `{name}(...)` makes the callback.")
    if not callable(function) or not _takes_a_moment(function):
        raise StepError(
            f"`callbacks` has {function!r:.80}, which is not a callback: call a function of `jdist.callbacks`, or give a "
            "function of a moment."
        )
    return Callback(on_step=function)


def _takes_a_moment(function: Callable[..., Any]) -> bool:
    if isinstance(function, type):
        return False
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # of one that is written in C it is not known
        return True
    return True


def _count(name: str, value: Any) -> int | None:
    return None if value is None else checks.whole_number(name, value, StepError)


def _name_step(exc: Exception, step: Any, run: Run) -> str:
    """Says at which step of the run an error came."""
    # A NaN is found some calls later: its error names its own step. A plain `step` was distributed
    # for this run, so the error can name the run's step instead of the call's.
    if not isinstance(exc, NonFiniteError) or isinstance(exc, NonFiniteClosureError):
        return f"jdist.fit was at step {run.step:,}."
    if isinstance(step, Distributed | Task):
        return "The error counts the steps from 0, since this one was distributed."
    message = str(exc).removeprefix(f"step {exc.step}")
    exc.args = (f"step {(run.first or 0) + exc.step + 1:,} of the run{message}",)
    return "The steps of a run count from 1."
