"""What goes along with training, each on its own and together."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import re
import signal
import time
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import callbacks
from jdist.callbacks.stopping import mode_of
from jdist.errors import CheckpointError, ConfigError, DatasetError, StepError
from jdist.train import CheckpointWarning
from tests.loop import loop_programs
from tests.loop.loop_programs import DATA, EVAL, HELD_OUT, create_state, eval_step, in_batches, train_step
from tests.toys import without_costs


def fit(*told: Any, **options: Any) -> tuple[Any, jdist.History]:
    """Two epochs, unless the options have another length."""
    length = {} if options.keys() & {"epochs", "steps"} else {"epochs": 2}
    return loop_programs.fit(*told, **length, **options)


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (callbacks.Callback, {"logs": True}, "`logs` is True"),
        (callbacks.Callback, {"logs": "lr"}, "`logs` is 'lr'; give a tuple"),
        (callbacks.Callback, {"watches": "loss"}, "`watches` is 'loss'"),
        (callbacks.Callback, {"watches": (1,)}, r"`watches` is \(1,\)"),
        (callbacks.Callback, {"watches": None}, "`watches` is None"),
        (callbacks.early_stopping, {"mode": "best"}, "`mode` is 'best'"),
        (callbacks.early_stopping, {"patience": 0}, "`patience` is 0"),
        (
            callbacks.early_stopping,
            {"metric": "loss"},
            "must begin with 'eval/' or 'epoch/'. Did you mean 'eval/loss'?",
        ),
        (callbacks.early_stopping, {"metric": "eval/los"}, "or correct the name. Did you mean eval/loss?"),
        (callbacks.early_stopping, {"metric": "val_accuracy"}, "Did you mean 'eval/accuracy'?"),
        (callbacks.early_stopping, {"metric": None}, "`metric` is None"),
        *(
            (callbacks.early_stopping, {"min_delta": value}, "`min_delta` is .*a finite number, 0 or more")
            for value in ("1", math.nan, -1, None)
        ),
        (lambda: callbacks.nan_guard(3), {}, "nan_guard: 3 is not a metric name"),
        (callbacks.checkpoint, {"every": 0}, "`every` is 0"),
        *(
            (callbacks.checkpoint, {"keep": value}, f"`keep` is {value}; it must be a whole number")
            for value in (0, -1, 1.5, None)
        ),
        (callbacks.checkpoint, {"best": "val_loss"}, "Did you mean 'eval/loss'"),
        (callbacks.checkpoint, {"best": "epoch/loss"}, "Did you mean 'eval/loss'"),
        (
            callbacks.checkpoint,
            {"best": "eval/right"},
            "cannot tell from the name 'eval/right' whether higher is better",
        ),
        (callbacks.ema, {"params": 3}, r"ema: `params` is 3; it must be a function of the state"),
        (callbacks.ema, {"decay": 1.0}, r"`decay` is 1\.0"),
        (
            callbacks.profiler,
            {"folder": "", "first": 4, "last": 3},
            "`last` is 3; it must be a whole number, 4 or more",
        ),
        (callbacks.learning_rate_log, {"schedule": "cosine"}, "`schedule` is 'cosine'"),
    ],
)
def test_bad_arguments(make, options, text):
    directory = {"directory": "never"} if make is callbacks.checkpoint else {}
    with pytest.raises(StepError, match=text):
        make(**directory, **options)


class TestCallback:
    def test_the_order_of_what_is_told(self):
        told: list[tuple[str, int, int]] = []

        def note(moment: callbacks.Moment) -> None:
            told.append((moment.event, moment.step, moment.epoch))

        names = ("on_start", "on_step", "on_eval", "on_epoch", "on_row", "on_save", "on_end")
        everything = callbacks.Callback(**dict.fromkeys(names, note), close=lambda: told.append(("close", 0, 0)))
        fit(everything, epochs=1, global_batch=50, log_every=1, **EVAL)
        assert told == [
            ("start", 0, 0),
            ("step", 1, 0),
            ("row", 1, 0),
            ("save", 1, 0),
            ("eval", 2, 1),
            ("epoch", 2, 1),
            ("step", 2, 1),
            ("row", 2, 1),
            ("save", 2, 1),
            ("end", 2, 1),
            ("close", 0, 0),
        ]

    def test_a_stop_ends_it_after_that_step(self):
        ended = []
        stop = callbacks.Callback(
            on_step=lambda moment: callbacks.Stop("enough") if moment.step == 3 else None,
            on_end=lambda moment: ended.append((moment.step, moment.reason)),
        )
        state, history = fit(stop)
        assert int(state.step) == 3
        assert history.stopped == "enough"
        assert ended == [(3, "enough")]
        assert repr(history).startswith("History(3 steps, 0 rows, ")  # nothing was logged yet

    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"step": 1.0}, "rows have 'step' themselves"),
            ({"a": np.ones(2)}, "'a' is"),
            *(({"a": value}, "give one number") for value in ("b", None, 1j, np.complex64(1), jnp.array(1j))),
        ],
    )
    def test_what_is_logged_is_one_number_of_a_name_of_its_own(self, values, text):
        with pytest.raises(StepError, match=text):
            fit(lambda moment: moment.log(**values))

    def test_numbers_of_every_kind_are_logged(self):
        values = {"a": 1, "b": True, "c": np.float32(2), "d": jnp.bfloat16(3), "e": np.array(4)}
        _, history = fit(lambda moment: moment.log(**values), epochs=1)
        assert [history.rows[-1][name] for name in values] == [1.0, 1.0, 2.0, 3.0, 4.0]

    def test_what_logs_with_a_row_is_known_to_those_after_it(self):
        logs = callbacks.Callback(on_row=lambda moment: moment.log(x=math.inf), logs=("x",))
        _, history = fit(logs, callbacks.nan_guard("x"))
        assert history.stopped == "x is inf at step 7"
        any_name = callbacks.Callback(on_row=lambda moment: moment.log(x=math.inf))
        assert fit(any_name, callbacks.nan_guard("x"))[1].stopped == history.stopped

    def test_a_stop_as_it_resumes_is_heeded(self):
        state, history = fit(callbacks.Callback(on_resume=lambda moment: callbacks.Stop("not today")))
        assert (int(state.step), history.stopped) == (0, "not today")

    def test_all_are_closed_after_an_error(self):
        closed = []

        def fail(moment: callbacks.Moment) -> None:
            raise RuntimeError("of its own")

        with pytest.raises(RuntimeError, match="of its own"):
            fit(callbacks.Callback(close=lambda: closed.append(1)), fail)
        assert closed == [1]

    def test_several_steps_a_call(self):
        seen = []
        fit(lambda moment: seen.append((moment.step, moment.steps_in_call)), steps_per_call=4)
        assert seen == [(4, 4), (8, 4), (12, 4), (14, 2)]


class TestEarlyStopping:
    @staticmethod
    def run(losses: list[float], **options: Any) -> tuple[int, str | None]:
        values = iter(losses)

        def measured(state: Any, batch: Any) -> Any:
            return {"loss": state.params["w"][0]}

        def overwrite(moment: callbacks.Moment) -> None:
            assert moment.row is not None
            moment.row["eval/loss"] = next(values)

        stop = callbacks.early_stopping(**options)
        _, history = fit(
            callbacks.Callback(on_eval=overwrite), stop, epochs=len(losses), eval_data=HELD_OUT, eval_step=measured
        )
        return len(history.evals), history.stopped

    def test_it_waits_for_as_long_as_it_was_told(self):
        losses = [3.0, 2.0, 2.5, 2.4, 1.9, 2.0, 2.0, 2.0, 1.0]
        assert self.run(losses, patience=3) == (8, "eval/loss has not improved on 1.9 for 3 evals")
        assert self.run(losses, patience=2)[0] == 4
        assert self.run(losses, patience=4) == (9, None)

    def test_more_may_be_better_and_little_is_nothing(self):
        assert self.run([1.0, 1.05, 1.08, 2.0], patience=2, mode="max", min_delta=0.1)[0] == 3
        assert self.run([float("nan")] * 3, patience=2)[0] == 2

    def test_a_run_that_ended_by_it_has_ended(self, tmp_path):
        def run() -> tuple[Any, jdist.History]:
            stop = callbacks.early_stopping("epoch/loss", patience=1, min_delta=10.0)
            return fit(callbacks.checkpoint(tmp_path), stop, epochs=9)

        first, before = run()
        again, after = run()
        assert before.stopped is not None
        assert after.stopped == before.stopped
        assert int(again.step) == int(first.step) == 14

    @pytest.mark.parametrize(
        ("metric", "text"),
        [
            ("eval/acc", r"'eval/acc' will not be measured; there will be 'eval/loss'\."),
            ("epoch/los", "there will be 'epoch/loss'. Did you mean 'epoch/loss'?"),
        ],
    )
    def test_a_metric_that_will_not_be_measured_is_refused_before_the_first_step(self, metric, text):
        told = []
        with pytest.raises(StepError, match=text):
            fit(callbacks.early_stopping(metric, mode="min"), callbacks.Callback(on_start=told.append), **EVAL)
        with pytest.raises(StepError, match="'los' will not be measured; there will be 'loss'"):
            fit(callbacks.nan_guard("los"), callbacks.ema(), callbacks.csv("never"), progress=True)
        assert told == []

    def test_a_metric_that_a_callback_says_it_logs_is_known_and_others_are_not(self):
        rate = callbacks.learning_rate_log(0.1)
        _, history = fit(rate, callbacks.nan_guard("learning_rate"), epochs=1)
        assert history.rows[-1]["learning_rate"] == 0.1
        with pytest.raises(StepError, match=r"'lss' will not be measured; .* Did you mean 'loss'"):
            fit(rate, callbacks.nan_guard("lss"), epochs=1)

    @pytest.mark.parametrize("name", ["loss", "epoch/loss", "eval/loss"])
    def test_what_a_step_returns_is_not_logged_over(self, name):
        with pytest.raises(StepError, match=f"learning_rate_log: it logs '{name}', which a step returns already"):
            fit(callbacks.learning_rate_log(0.1, name=name), **EVAL)

    def test_a_metric_that_another_callback_logs_is_waited_for(self):
        logs = callbacks.Callback(on_eval=lambda moment: moment.log(**{"eval/f1": 0.5}))
        _, history = fit(logs, callbacks.early_stopping("eval/f1", patience=1), epochs=3, **EVAL)
        assert history.stopped == "eval/f1 has not improved on 0.5 for 1 evals"
        with pytest.raises(
            StepError, match=r"'eval/f2' was not measured; there are .*'eval/f1'\. Did you mean 'eval/f1'"
        ):
            fit(logs, callbacks.early_stopping("eval/f2", mode="max"), **EVAL)

    def test_what_a_metric_gives_is_found_by_its_name(self):
        right = jdist.metrics.accuracy(threshold=0.0)

        def measure(state: Any, batch: Any) -> Any:
            return {"right": right.update(batch["x"][:, 0], batch["y"] > 0, batch["mask"])}

        stop = callbacks.early_stopping("eval/right", mode="max", patience=1)
        _, history = fit(stop, epochs=3, eval_data=HELD_OUT, eval_step=measure, metrics={"right": right})
        assert len(history.evals) == 2


class TestCheckpoint:
    def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(self, tmp_path):
        whole, _ = fit(epochs=4, shuffle_seed=0)
        stop = lambda moment: callbacks.Stop("here") if moment.step == 10 else None  # noqa: E731 - a function, as users write one
        state, _ = fit(callbacks.checkpoint(tmp_path, every=3), stop, epochs=4, shuffle_seed=0)
        assert int(state.step) == 10
        state, history = fit(callbacks.checkpoint(tmp_path, every=3), epochs=4, shuffle_seed=0)
        assert int(state.step) == 28
        np.testing.assert_array_equal(state.params["w"], whole.params["w"])
        assert [row["epoch"] for row in history.epochs] == [1, 2, 3, 4]
        assert history.epochs[0]["step"] == 7
        again, _ = fit(callbacks.checkpoint(tmp_path, every=3), epochs=4, shuffle_seed=0)
        np.testing.assert_array_equal(again.params["w"], whole.params["w"])

    @pytest.mark.parametrize("at", [3, 7, 10])
    def test_the_history_too_is_that_of_one_that_was_never_stopped(self, at, tmp_path):
        right = jdist.metrics.accuracy(threshold=0.0)

        def step(state: Any, batch: Any) -> Any:
            state, told = train_step(state, batch)
            return state, told | {"right": right.update(batch["x"][:, 0], batch["y"] > 0, batch["mask"])}

        def run(*told: Any) -> jdist.History:
            return fit(*told, step=step, epochs=3, shuffle_seed=0, log_every=3, metrics={"right": right}, **EVAL)[1]

        whole = run()
        save = callbacks.checkpoint(tmp_path, every=None, best="eval/loss")
        run(save, lambda moment: callbacks.Stop("here") if moment.step == at else None)
        for history in (run(save), run(save)):  # and once more, when there is nothing left to do
            assert without_costs(history.rows) == without_costs(whole.rows)

    @pytest.mark.parametrize("at", [5, 7, 8])
    @pytest.mark.parametrize("best", [None, "eval/loss"])
    def test_what_others_keep_and_log_is_saved_as_they_have_left_it(self, best, at, tmp_path):
        def run(folder, *others):
            ema = callbacks.ema(0.9)
            told = (callbacks.checkpoint(folder, every=5, best=best), ema, callbacks.learning_rate_log(0.1), *others)
            _, history = fit(*told, eval_every=5, log_every=3, **EVAL)
            return np.asarray(ema.average()["w"]), without_costs(history.rows)

        def killed(moment):
            if moment.step == at:
                raise KeyError("killed")

        average, rows = run(tmp_path / "whole")
        with pytest.raises(KeyError, match="killed"):
            run(tmp_path / "killed", killed)
        for folder in ("killed", "whole"):  # the second has ended already
            again, same = run(tmp_path / folder)
            np.testing.assert_array_equal(again, average)
            assert same == rows

    def test_arrays_in_rows_are_arrays_after_a_resume_too(self, tmp_path):
        matrix = jdist.metrics.confusion_matrix(2)

        def counted(state, batch):
            rows = (batch["x"][:, 0] > 0).astype(jnp.int32)
            return {"cm": matrix.update(rows, rows, batch["mask"])}

        for epochs in (1, 2):
            _, history = fit(
                callbacks.checkpoint(tmp_path),
                epochs=epochs,
                eval_data=HELD_OUT,
                eval_step=counted,
                metrics={"cm": matrix},
            )
        assert [row["cm"].sum() for row in history.evals] == [len(HELD_OUT["x"])] * 2

    def test_a_checkpoint_does_not_grow_with_the_run(self, tmp_path):
        def size(step: int) -> int:
            (folder,) = tmp_path.glob(f"step_{step:08}_save_*")
            return len((folder / "manifest.json").read_text())

        fit(callbacks.checkpoint(tmp_path, every=7, keep=9), epochs=6, log_every=1)
        assert size(42) < size(7) + 100
        assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 42

    def test_a_history_that_is_lost_is_told_and_the_run_goes_on(self, tmp_path):
        fit(callbacks.checkpoint(tmp_path), epochs=1, log_every=1)
        (tmp_path / "history.jsonl").unlink()
        with pytest.warns(CheckpointWarning, match="has 0 of the 7 rows up to step 7; the others are lost"):
            state, history = fit(callbacks.checkpoint(tmp_path), log_every=1)
        assert int(state.step) == 14
        assert [row["step"] for row in history.rows] == [*range(8, 15)]
        again = fit(callbacks.checkpoint(tmp_path), log_every=1)[1]
        assert again.rows == history.rows

    def test_what_a_checkpoint_warns_of_names_the_line_that_called_fit(self, tmp_path):
        fit(callbacks.checkpoint(tmp_path, every=2), epochs=1, log_every=1)
        (newest,) = tmp_path.glob("step_00000007_*/pieces_0.bin")
        newest.write_bytes(bytes(newest.stat().st_size))
        (tmp_path / "history.jsonl").unlink()
        with pytest.warns(CheckpointWarning) as warned:
            fit(callbacks.checkpoint(tmp_path), log_every=1)
        seen = [(str(each.message), each.filename) for each in warned if each.category is CheckpointWarning]
        assert [filename for _, filename in seen] == [loop_programs.__file__] * 2
        assert "checksum" in seen[0][0]
        assert "has 0 of the 6 rows" in seen[1][0]

    @pytest.mark.parametrize("damage", [b'{"step": 3, "ep', b"3", b"\xff"])
    def test_of_a_damaged_history_the_rows_before_the_damage_are_left(self, damage, tmp_path):
        fit(callbacks.checkpoint(tmp_path), epochs=1, log_every=1)
        path = tmp_path / "history.jsonl"
        path.write_bytes(b"\n".join([*path.read_bytes().splitlines()[:2], damage, b""]))
        with pytest.warns(CheckpointWarning, match="has 2 of the 7 rows up to step 7; the others are lost"):
            state, history = fit(callbacks.checkpoint(tmp_path), log_every=1)
        assert int(state.step) == 14
        assert [row["step"] for row in history.rows] == [1, 2, *range(8, 15)]

    def test_fewer_epochs_than_were_made_are_refused_by_name(self, tmp_path):
        fit(callbacks.checkpoint(tmp_path), epochs=2)
        with pytest.raises(DatasetError, match=r"step 14, but the dataset has only 7 steps.*as many `epochs` as then"):
            fit(callbacks.checkpoint(tmp_path), epochs=1)

    def test_the_best_is_returned_where_it_is_asked_for(self, tmp_path):
        worse = lambda state, batch: {"loss": state.step + 0.0}  # noqa: E731 - a function, as users write one

        def run(**options: Any) -> tuple[Any, jdist.History]:
            save = callbacks.checkpoint(tmp_path, best="eval/loss", restore_best=True)
            return fit(save, eval_data=HELD_OUT, eval_step=worse, **options)

        state, history = run()
        assert [row["step"] for row in history.evals] == [7, 14]
        assert int(state.step) == 7
        state, history = run(epochs=3)  # goes on from the newest all the same
        assert [row["step"] for row in history.evals] == [7, 14, 21]
        assert int(state.step) == 7

    def test_a_checkpoint_that_does_not_fit_says_how_to_begin_anew(self, tmp_path):
        fit(callbacks.checkpoint(tmp_path), epochs=1, shuffle_seed=0)
        state = jdist.TrainState.create(params={"v": np.zeros(3, np.float32)}, tx=optax.sgd(0.1))
        with pytest.raises(CheckpointError, match="does not fit the state") as raised:
            fit(callbacks.checkpoint(tmp_path), step=lambda s, batch: (s.replace(step=s.step + 1), {}), state=state)
        assert "or `resume=False`, which renames this one" in "".join(raised.value.__notes__)
        with pytest.raises(DatasetError, match="shuffle_seed was 0 and is 1") as raised:
            fit(callbacks.checkpoint(tmp_path), shuffle_seed=1)
        assert "Give `data`, `global_batch` and `shuffle_seed` as they were" in "".join(raised.value.__notes__)

    def test_what_json_lacks_is_saved_too(self, tmp_path):
        matrix = jdist.metrics.confusion_matrix(2)

        def measure(state: Any, batch: Any) -> Any:
            counts = matrix.update((batch["x"][:, 0] > 0).astype(int), (batch["y"] > 0).astype(int), batch["mask"])
            return {"loss": jnp.nan * jdist.mean(batch["y"], batch["mask"]), "matrix": counts}

        options = {"eval_data": HELD_OUT, "eval_step": measure, "metrics": {"matrix": matrix}}
        fit(callbacks.checkpoint(tmp_path / "saved"), callbacks.jsonl(tmp_path / "rows.jsonl"), **options)
        _, history = fit(callbacks.checkpoint(tmp_path / "saved"), epochs=3, **options)
        assert [np.sum(row["matrix"]) for row in history.evals] == [10, 10, 10]
        assert np.isnan(history["eval/loss"][1]).all()
        assert '"eval/loss": null' in (tmp_path / "rows.jsonl").read_text()

    def test_one_value_serves_several_runs(self, tmp_path):
        save = callbacks.checkpoint(tmp_path / "saved", resume=False)
        for _ in range(2):
            fit(save)
        with jdist.train.Checkpointer(tmp_path / "saved") as saved:
            assert saved.steps() == [14]
        with jdist.train.Checkpointer(tmp_path / "saved.1") as saved:
            assert saved.steps() == [14]

    def test_whether_less_or_more_is_better_is_in_the_name(self):
        for metric, mode in (("eval/loss", "min"), ("eval/top_5_accuracy", "max"), ("eval/AUC", "max")):
            assert mode_of("", metric, None) == mode

    def test_nothing_is_saved_for_what_is_never_measured(self, tmp_path):
        never = "'eval/loss' is never measured, as this run does not evaluate. Give `eval_data` and `eval_step`"
        of_training = ", or take a metric of training, such as 'epoch/loss'"
        for callback, more in (
            (callbacks.checkpoint(tmp_path, best="eval/loss"), ""),
            (callbacks.early_stopping("eval/loss"), of_training),
            (callbacks.nan_guard("eval/loss"), of_training),
        ):
            with pytest.raises(StepError, match=re.escape(f"{never}{more}.") + "$"):
                fit(callback)

    def test_the_best_is_kept_too(self, tmp_path):
        _, history = fit(
            callbacks.checkpoint(tmp_path, every=None, keep=1, best="eval/loss", mode="min"), epochs=5, **EVAL
        )
        losses = [row["loss"] for row in history.evals]
        with jdist.train.Checkpointer(tmp_path, keep=1, best_metric="eval/loss", best_mode="min") as saved:
            best = history.evals[int(np.argmin(losses))]["step"]
            assert saved.best_step == best
            assert {best, 35} <= set(saved.steps())
            restored = saved.restore(create_state(), step=best)
        assert restored is not None
        measured = jdist.evaluate(eval_step, restored.state, HELD_OUT, global_batch=16)
        assert measured["loss"] == pytest.approx(min(losses), rel=1e-6)

    @pytest.mark.parametrize("source", ["list", "generator", "random access"])
    @pytest.mark.parametrize(
        "at", [2, 4, 9, 10, 12]
    )  # of passes of four: within one, at the end of one, at each of a late one
    def test_a_run_over_batches_goes_on_in_the_epoch_that_it_was_in(self, source, at, tmp_path):
        batches = in_batches(25)

        class ByNumber:
            num_steps, global_batch, fingerprint = 4, 25, "rows=100"
            batch_at = staticmethod(batches.__getitem__)

        many = {"list": batches, "generator": None, "random access": ByNumber()}[source]

        def run(*told: Any) -> tuple[Any, jdist.History]:
            # A generator has one pass, in which the numbers of steps are the epochs.
            epochs: dict[str, Any] = {"epochs": 5} if many is not None else {"epochs": 5, "steps_per_epoch": 4}
            data = many if many is not None else (batch for _ in range(5) for batch in batches)
            return fit(*told, data=data, **epochs)

        whole, history = run()
        stop = lambda moment: callbacks.Stop("here") if moment.step == at else None  # noqa: E731 - a function, as users write one
        with warnings.catch_warnings():
            if source != "random access":
                warnings.filterwarnings("ignore", "checkpoint: `data` is a", CheckpointWarning)
            assert int(run(callbacks.checkpoint(tmp_path), stop)[0].step) == at
            state, again = run(callbacks.checkpoint(tmp_path))
        assert int(state.step) == 20
        assert [(row["step"], row["epoch"]) for row in again.epochs] == [(4, 1), (8, 2), (12, 3), (16, 4), (20, 5)]
        np.testing.assert_allclose([row["loss"] for row in again.epochs], [row["loss"] for row in history.epochs], 1e-6)
        np.testing.assert_array_equal(state.params["w"], whole.params["w"])

    def test_data_without_a_position_is_told_of_before_the_first_step(self, tmp_path):
        told: list[int] = []
        start = callbacks.Callback(on_start=lambda moment: told.append(len(seen)))
        with pytest.warns(
            CheckpointWarning, match="checkpoint: `data` is a list of batches, and its position cannot be saved"
        ) as seen:
            fit(callbacks.checkpoint(tmp_path), start, data=in_batches(25))
        assert told == [1]
        assert seen[0].filename == loop_programs.__file__
        fit(data=in_batches(25))  # nothing is told where nothing is saved

    @pytest.mark.filterwarnings("ignore:checkpoint. `data` is a")
    def test_data_that_has_become_shorter_is_refused(self, tmp_path):
        fit(callbacks.checkpoint(tmp_path), data=in_batches(25), steps=2)
        with pytest.raises(
            DatasetError, match="the list ended after 1 batches, but this run has trained on 2 of this pass"
        ):
            fit(callbacks.checkpoint(tmp_path), data=in_batches(25)[:1], steps=4)

    @pytest.mark.filterwarnings("ignore:checkpoint. `data` is a")
    def test_a_generator_that_is_still_there_goes_on_where_it_is(self, tmp_path):
        batches = (batch for batch in in_batches(25) * 3)
        for steps in (2, 6):  # of the twelve, a few were made ahead for the first two steps
            state, _ = fit(callbacks.checkpoint(tmp_path), data=batches, steps=steps)
        assert int(state.step) == 6


class TestEma:
    def test_it_is_the_average(self):
        seen = []
        average = callbacks.ema(0.8)
        fit(
            average,
            lambda moment: seen.append(np.array(moment.state.params["w"])),
            strategy=jdist.mirrored(jax.devices()[:2]),
        )
        expected = np.zeros(3)
        for w in seen:
            expected = 0.8 * expected + 0.2 * w
        np.testing.assert_allclose(average.average()["w"], expected, rtol=1e-5)

    def test_a_state_with_parameters_elsewhere(self):
        average = callbacks.ema(params=lambda state: state.weights)
        with pytest.raises(
            StepError, match=r"cannot find the parameters of a state of type TrainState \(.*`ema\(params="
        ):
            fit(average)

    def test_it_is_saved_and_comes_back(self, tmp_path):
        whole = callbacks.ema(0.8)
        fit(whole, epochs=4)
        for epochs in (2, 4):
            average = callbacks.ema(0.8)
            state, _ = fit(callbacks.checkpoint(tmp_path), average, epochs=epochs)
        assert int(state.step) == 28
        np.testing.assert_allclose(average.average()["w"], whole.average()["w"], rtol=1e-6)

    def test_a_checkpoint_without_an_average_begins_it_with_its_state(self, tmp_path):
        state, _ = fit(callbacks.checkpoint(tmp_path), epochs=1)
        average = callbacks.ema(0.8)
        with pytest.warns(
            CheckpointWarning, match="step 7 was saved without 'ema', which begins with the state of that step"
        ):
            fit(callbacks.checkpoint(tmp_path), average, epochs=1)
        np.testing.assert_array_equal(average.average()["w"], state.params["w"])

    def test_a_run_that_counts_its_epochs_otherwise_is_told_of(self, tmp_path):
        fit(callbacks.checkpoint(tmp_path), epochs=2, steps_per_epoch=3)
        with pytest.warns(CheckpointWarning, match="had epochs of 3 steps; from step 6 on epochs are of 4 steps"):
            _, history = fit(callbacks.checkpoint(tmp_path), epochs=2, steps_per_epoch=4)
        assert (history.rows[-1]["step"], history.rows[-1]["epoch"]) == (8, 2)
        fit(callbacks.checkpoint(tmp_path), epochs=3, steps_per_epoch=4)  # as before, without a word

    def test_a_state_is_restored_with_the_average_or_without(self, tmp_path):
        state, _ = fit(callbacks.checkpoint(tmp_path), callbacks.ema(0.8), epochs=1)
        with jdist.train.Checkpointer(tmp_path) as checkpoints:
            restored = checkpoints.restore(create_state())
        assert restored is not None
        np.testing.assert_array_equal(restored.state.params["w"], state.params["w"])
        assert int(fit(callbacks.checkpoint(tmp_path))[0].step) == 14

    def test_with_an_average_too_a_run_goes_on_with_other_replicas_and_another_precision(self, tmp_path):
        def run(epochs: int, replicas: int, precision: str) -> Any:
            compress = jdist.reduction.compressed("bf16")
            strategy = jdist.mirrored(jax.devices()[:replicas], all_reduce=compress)
            step = jdist.distribute(train_step, strategy, precision=jdist.precision(precision))
            told = [callbacks.checkpoint(tmp_path), callbacks.ema(0.8)]
            return fit(*told, step=step, epochs=epochs)[0]

        assert int(run(1, 2, "bf16").step) == 7
        state = run(2, 4, "fp16")
        assert int(state.step) + int(state.loss_scale.num_skipped) == 14

    def test_several_steps_a_call_take_the_power(self):
        average, seen = callbacks.ema(0.9), []
        fit(average, lambda moment: seen.append(np.array(moment.state.params["w"])), steps_per_call=7)
        expected = (1 - 0.9**7) * (0.9**7 * seen[0] + seen[1])
        np.testing.assert_allclose(average.average()["w"], expected, rtol=1e-5)

    def test_16_bits_do_not_round_it_away(self):
        def step(state: Any, batch: Any) -> Any:
            return {"params": state["params"] * 0 + 2}, {"loss": batch["y"].mean()}

        average = callbacks.ema(0.999, params=lambda state: state["params"])
        fit(average, step=step, state={"params": jnp.ones((), jnp.bfloat16)}, steps=100, global_batch=50)
        assert float(average.average()) == pytest.approx(2 - 0.999**100, rel=1e-5)

    def test_errors(self):
        with pytest.raises(StepError, match="Say where they are"):
            fit(callbacks.ema(), step=lambda state, batch: ({"w": state["w"] + 1}, {}), state={"w": np.zeros(2)})
        with pytest.raises(StepError, match="two callbacks of the name 'ema'"):
            fit(callbacks.ema(), callbacks.ema(0.9))


class TestFiles:
    def test_json_lines(self, tmp_path):
        _, history = fit(callbacks.jsonl(tmp_path / "sub" / "rows.jsonl"), log_every=4, **EVAL)
        rows = [json.loads(line) for line in (tmp_path / "sub" / "rows.jsonl").read_text().splitlines()]
        assert rows == history.rows
        assert list(rows[0])[:2] == ["step", "epoch"]

    def test_a_file_by_default(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        fit(log_to="runs/fit")
        (file,) = (tmp_path / "runs" / "fit").iterdir()
        assert len(file.read_text().splitlines()) == 2

    @pytest.mark.parametrize("order", [1, -1])  # it goes on wherever it stands in the list
    def test_a_resumed_run_goes_on_in_its_file(self, order, tmp_path):
        def told() -> list[callbacks.Callback]:
            both = [callbacks.checkpoint(tmp_path / "saved", every=5), callbacks.jsonl(tmp_path / "rows.jsonl")]
            return both[::order]

        def fail(moment: callbacks.Moment) -> None:
            if moment.step == 12:
                raise RuntimeError("of its own")

        with pytest.raises(RuntimeError, match="of its own"):
            fit(*told(), callbacks.Callback(on_step=fail), epochs=4, log_every=1)
        fit(*told(), epochs=4, log_every=1)
        steps = [json.loads(line)["step"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        assert steps == list(range(1, 29))

    def test_a_table(self, tmp_path):
        _, history = fit(callbacks.csv(tmp_path / "sub" / "rows.csv"), log_every=4, **EVAL)
        with (tmp_path / "sub" / "rows.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [int(row["step"]) for row in rows] == [row["step"] for row in history.rows]
        found = [{name: float(value) for name, value in row.items() if value} for row in rows]
        assert found == [{name: float(value) for name, value in row.items()} for row in history.rows]

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=r"cannot be written.* of `jdist\.fit`: log_to=FOLDER"):
            fit(log_to=tmp_path / "file" / "rows")

    def test_tensorboard_has_each_row_soon(self, tmp_path):
        """Before the run ends: one that is killed has its rows."""
        pytest.importorskip("tensorboardX")
        sizes = [0]

        def on_row(moment: Any) -> None:
            deadline = time.monotonic() + 30
            while (size := sum(file.stat().st_size for file in tmp_path.iterdir())) <= sizes[-1]:
                assert time.monotonic() < deadline, "the row is not on disk"
                time.sleep(0.01)
            sizes.append(size)

        fit(callbacks.tensorboard(tmp_path), callbacks.Callback(on_row=on_row), log_every=7)
        assert len(sizes) > 2

    def test_a_trace_of_some_steps(self, tmp_path):
        fit(callbacks.profiler(tmp_path, first=3, last=5))
        (trace,) = tmp_path.rglob("perfetto_trace.json.gz")
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert list(tmp_path.rglob("*.xplane.pb"))

    def test_each_process_of_a_job_traces_into_a_folder_of_its_own(self, monkeypatch, tmp_path):
        """In one folder JAX may read another process's half-written file."""
        folders: list[str] = []
        monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: folders.append(folder))
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
        cluster = types.SimpleNamespace(num_processes=2, process_index=1)
        moment = types.SimpleNamespace(step=2, state=(), strategy=types.SimpleNamespace(cluster=cluster))
        callbacks.profiler(tmp_path, first=3).on_start(moment)
        assert folders == [str(tmp_path / "process_1")]

    @pytest.mark.parametrize("fails", ["start_trace", "stop_trace"])
    def test_a_trace_that_fails_is_a_warning(self, monkeypatch, tmp_path, fails):
        def fail(*args: Any, **kwargs: Any) -> None:
            raise gzip.BadGzipFile("Not a gzipped file")

        for name in ("start_trace", "stop_trace"):
            monkeypatch.setattr(jax.profiler, name, fail if name == fails else lambda *args, **kwargs: None)
        with pytest.warns(UserWarning, match="BadGzipFile: Not a gzipped file. Training is not affected") as warned:
            _, history = fit(callbacks.profiler(tmp_path, first=3, last=5))
        assert len(warned) == 1
        assert history.stopped is None


class TestOthers:
    def test_the_learning_rate(self):
        schedule = optax.linear_schedule(1.0, 0.0, 14)
        _, history = fit(callbacks.learning_rate_log(schedule), log_every=7)
        np.testing.assert_allclose(history["learning_rate"][1], [float(schedule(6)), float(schedule(13))])
        with pytest.raises(StepError, match=r"`schedule` gives float32\[1\] for step 0; it must give one number"):
            fit(callbacks.learning_rate_log(lambda step: jnp.ones(1)), log_every=1)
        for rate in (lambda step: np.float32(0.1), np.float32(0.1), jnp.float32(0.1)):
            _, history = fit(callbacks.learning_rate_log(rate), log_every=7)
            assert history.rows[-1]["learning_rate"] == np.float32(0.1)

    @pytest.mark.parametrize("strategy", [jdist.mirrored, jdist.central_storage])
    def test_the_learning_rate_is_that_of_the_updates_that_were_made(self, strategy):
        schedule = optax.linear_schedule(0.1, 0.0, 14)

        def create() -> jdist.TrainState:
            return jdist.TrainState.create(params={"w": np.zeros(3, np.float32)}, tx=optax.sgd(schedule))

        data = {"x": np.copy(DATA["x"]), "y": DATA["y"]}
        data["x"][[40, 60]] = np.inf  # the third and the fourth step are left out
        step = jdist.distribute(train_step, strategy(jax.devices()[:2]), non_finite="skip")
        log = callbacks.learning_rate_log(schedule)
        state, history = fit(log, step=step, state=create(), data=data, epochs=1, log_every=1)
        updates = np.array([1, 2, 2, 2, 3, 4, 5])
        np.testing.assert_allclose(history["learning_rate"][1], [float(schedule(n - 1)) for n in updates])
        _, history = fit(log, step=step, state=state, data=data, steps=1)
        np.testing.assert_allclose(history["learning_rate"][1], [float(schedule(5))])

    def test_a_metric_that_is_no_number_ends_it(self):
        def step(state: Any, batch: Any) -> Any:
            state, told = train_step(state, batch)
            return state, {"loss": jnp.where(state.step > 3, jnp.inf, told["loss"])}

        _, history = fit(callbacks.nan_guard("loss"), step=step, log_every=1)
        assert history.stopped == "loss is inf at step 4"

    def test_the_first_step_which_compiles_is_no_part_of_the_speed(self, capsys):
        fit(progress=True, log_every=1)
        lines = [line for line in capsys.readouterr().out.splitlines() if "ETA" in line]
        assert [bool(re.search(r"steps/s  .*ETA \d", line)) for line in lines] == [False] + [True] * 13

    @pytest.mark.parametrize("saves", [True, False])
    def test_an_interrupted_run_says_how_to_go_on(self, saves, capsys, tmp_path):
        def interrupt(moment: callbacks.Moment) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        fit(interrupt, *[callbacks.checkpoint(tmp_path)] * saves, steps=100_000, epochs=None, progress=True)
        last = capsys.readouterr().out.splitlines()[-1]
        assert re.match(r"stopped at step \d+/100000: by SIGINT; ", last)
        assert last.endswith("run the same again to go on from there" if saves else "saves, and goes on from there")

    def test_lines_of_progress(self, capsys):
        fit(progress=True, log_every=7, **EVAL)
        *lines, last = capsys.readouterr().out.splitlines()
        assert [re.sub(" +", " ", line).split(" ")[1] for line in lines] == ["7/14"] * 3 + ["14/14"] * 3
        assert last.startswith("time: ")
        assert "epoch 2: loss" in lines[4]
        assert "evaluation: loss" in lines[5]
