"""`jdist.fit`: the loop, its data, its epochs, what it evaluates and returns."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import signal
import sys
import threading
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist import callbacks
from jdist.errors import BatchError, ConfigError, DatasetError, NonFiniteError, StepError, StrategyError
from jdist.tasks import digits
from tests.loop import loop_programs
from tests.loop.loop_programs import (
    DATA,
    EVAL,
    HELD_OUT,
    by_numpy,
    create_state,
    errors,
    eval_step,
    fit,
    in_batches,
    train_step,
)


def mirrored() -> jdist.Strategy:
    return jdist.mirrored(jax.devices()[:2])


class TestCompilationCache:
    """Compiled programs that a run keeps with its checkpoints."""

    @pytest.fixture(autouse=True)
    def no_folder(self, monkeypatch):
        kept = {"jax_compilation_cache_dir": None, "jax_persistent_cache_min_compile_time_secs": 0.0}
        before = {name: jax.config.values[name] for name in kept}
        for name, value in kept.items():
            jax.config.update(name, value)
        yield
        for name, value in before.items():
            jax.config.update(name, value)

    def test_a_run_that_resumes_finds_them(self, tmp_path):
        programs: list[set[str]] = []
        for epochs in (1, 2):
            jax.clear_caches()
            fit(callbacks.checkpoint(tmp_path / "run"), strategy=mirrored(), epochs=epochs)
            programs.append({file.name for file in tmp_path.glob("run/compiled/*-cache")})
            assert jax.config.jax_compilation_cache_dir is None
        assert programs[0]
        assert programs[1] == programs[0]

    def test_not_if_they_are_not_wanted_or_nothing_is_saved(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        fit(callbacks.checkpoint("run"), compilation_cache=False)
        fit(log_to="logs")
        assert not list(tmp_path.rglob("*-cache"))


class TestEpochs:
    def test_a_hundred_rows_at_sixteen_are_seven_steps_the_last_of_four(self):
        w, means = by_numpy(3, global_batch=16)
        state, history = fit(strategy=mirrored(), epochs=3)
        assert int(state.step) == 21
        np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)
        assert [(row["step"], row["epoch"]) for row in history.epochs] == [(7, 1), (14, 2), (21, 3)]
        np.testing.assert_allclose([row["loss"] for row in history.epochs], means, rtol=1e-5)

    @pytest.mark.parametrize("steps_per_call", [1, 4])
    def test_a_step_that_is_left_out_is_left_out_of_the_epochs_mean(self, steps_per_call):
        rows = {name: x.copy() for name, x in DATA.items()}
        rows["y"][40] = np.nan  # of the third of seven steps
        kept = np.delete(np.arange(100), np.arange(32, 48))
        step = jdist.distribute(train_step, mirrored(), non_finite="skip", steps_per_call=steps_per_call)
        _, history = fit(step=step, data=rows)
        batches = [{name: x[kept][i : i + 16] for name, x in DATA.items()} for i in range(0, 84, 16)]
        one = fit(data=batches)[1]
        assert step.num_skipped == 1
        assert history.epochs[0]["loss"] == pytest.approx(one.epochs[0]["loss"], rel=1e-5)

    @pytest.mark.parametrize("options", [{"non_finite": "skip"}, {"precision": "fp16"}], ids=str)
    @pytest.mark.parametrize("steps_per_call", [1, 4])
    def test_a_metric_that_is_nan_leaves_no_good_step_out(self, options, steps_per_call):
        def step(state, batch):
            state, metrics = train_step(state, batch)
            return state, {
                **metrics,
                "odd": jnp.where(state.step == 2, jnp.nan, 1.0),
                "y": jdist.mean(batch["y"], batch["mask"]),
            }

        if "precision" in options:
            options = {"precision": jdist.precision("fp16", initial_scale=1.0)}
        distributed = jdist.distribute(step, mirrored(), steps_per_call=steps_per_call, **options)
        state, history = fit(step=distributed)
        assert int(state.step) == 7
        (row,) = history.epochs
        assert np.isnan(row["odd"])
        assert row["y"] == pytest.approx(DATA["y"].mean(), rel=1e-2)
        assert np.isfinite(row["loss"])

    @pytest.mark.parametrize("steps_per_call", [1, 4])
    @pytest.mark.parametrize("options", [{"non_finite": "skip"}, {"precision": "fp16"}], ids=str)
    def test_a_step_is_left_out_although_its_metrics_are_finite(self, options, steps_per_call):
        def step(state, batch):
            def loss_of(params):
                is_first = batch["x"][0, 0] == DATA["x"][0, 0].astype(batch["x"].dtype)
                loss = jdist.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, batch["mask"])
                # The root of zero is finite, its gradient is not.
                return loss + jnp.sqrt(jnp.where(is_first, 0 * params["w"].sum(), 1)).astype(loss.dtype), loss

            (_, loss), grads = jdist.value_and_grad(loss_of, has_aux=True)(state.params)
            odd = jnp.where(state.step == 1, jnp.nan, 1.0)  # of a good step beside it
            metrics = {"loss": loss, "y": jdist.mean(batch["y"], batch["mask"]), "odd": odd}
            return state.apply_gradients(grads=grads), metrics

        if "precision" in options:
            options = {"precision": jdist.precision("fp16", initial_scale=4.0)}
        distributed = jdist.distribute(step, jdist.one_device(), steps_per_call=steps_per_call, **options)
        for passes in (1, 2):  # a second run counts from where the first has ended
            state, history = fit(step=distributed)
            assert distributed.num_skipped == (passes if "non_finite" in options else 1)
            assert int(state.step) == 6
            assert history.epochs[0]["y"] == pytest.approx(DATA["y"][16:].mean(), rel=1e-2)
            assert history.epochs[0]["y"] != pytest.approx(DATA["y"].mean(), rel=1e-2)

    def test_neither_epochs_nor_steps_is_one_pass(self):
        state, history = fit()
        assert int(state.step) == 7
        assert len(history.epochs) == 1

    def test_counts_may_be_numpys(self):
        state, history = fit(steps=np.int64(5), log_every=np.uint8(2), global_batch=np.int32(16))
        assert int(state.step) == 5
        assert [row["step"] for row in history.rows] == [2, 4, 5]
        assert all(type(row["step"]) is int for row in history.rows)

    def test_steps_go_on_in_further_passes(self):
        for data, options in ((DATA, {"global_batch": 25}), (in_batches(25), {})):
            state, history = fit(data=data, steps=10, **options)
            assert int(state.step) == 10
            np.testing.assert_allclose([row["step"] for row in history.epochs], [4, 8])
            np.testing.assert_allclose(
                [row["loss"] for row in history.epochs], by_numpy(2, global_batch=25)[1], rtol=1e-5
            )

    @pytest.mark.parametrize("data", ["arrays", "list", "endless"])
    def test_steps_per_epoch_are_an_epoch_whatever_a_pass_has(self, data):
        options: dict[str, Any] = {"global_batch": 25} if data == "arrays" else {}
        given = {"arrays": DATA, "list": in_batches(25), "endless": itertools.cycle(in_batches(25))}[data]
        told = []
        note = callbacks.Callback(on_start=lambda moment: told.append(moment.total_steps))
        state, history = fit(note, data=given, epochs=3, steps_per_epoch=5, **options)
        assert int(state.step) == 15
        assert told == [15]
        assert [(row["step"], row["epoch"]) for row in history.epochs] == [(5, 1), (10, 2), (15, 3)]
        state, history = fit(data=given, steps_per_epoch=5, **options)
        assert int(state.step) == 5  # neither epochs nor steps: one epoch
        state, history = fit(data=given, steps_per_epoch=2, steps=5, **options)
        assert [row["step"] for row in history.epochs] == [2, 4]

    def test_epochs_of_data_without_end_are_refused(self):
        class Endless:
            num_steps, global_batch, fingerprint = None, 25, "rows=100"

            def batch_at(self, step: int) -> Any:
                return {name: x[:25] for name, x in DATA.items()}

        with pytest.raises(DatasetError, match="Endless without end, so no epoch ends"):
            fit(data=Endless(), epochs=2)
        state, _ = fit(data=Endless(), epochs=2, steps_per_epoch=3)
        assert int(state.step) == 6

    def test_the_bar_knows_how_long_a_list_is(self):
        told = []
        note = callbacks.Callback(on_start=lambda moment: told.append(moment.total_steps))
        for epochs in (None, 2):
            fit(note, data=in_batches(25), epochs=epochs)
        assert told == [4, 8]

    def test_steps_that_a_call_passes_over_end_it_too(self):
        state, _ = fit(data=in_batches(20), steps=8, steps_per_call=4)
        assert int(state.step) == 9  # of five batches a call of four is followed by one of one, so 8 is passed over

    def test_an_epoch_that_ends_within_a_call_holds_its_own_steps_alone(self):
        _, means = by_numpy(4, global_batch=16)
        state, history = fit(strategy=mirrored(), epochs=4, steps_per_call=4)
        assert int(state.step) == 28
        np.testing.assert_allclose([row["loss"] for row in history.epochs], means, rtol=1e-5)
        assert [row["step"] for row in history.epochs] == [8, 16, 24, 28]

    def test_epochs_that_end_in_one_call_have_a_row_each(self):
        _, means = by_numpy(4, global_batch=16)
        told = []
        note = callbacks.Callback(on_epoch=lambda moment: told.append((moment.epoch, moment.metrics["loss"])))
        state, history = fit(note, epochs=4, steps_per_call=28)
        assert int(state.step) == 28
        np.testing.assert_allclose(told, list(enumerate(means, 1)), rtol=1e-5)
        assert [(row["step"], row["epoch"]) for row in history.epochs] == [(7, 1), (14, 2), (21, 3), (28, 4)]
        np.testing.assert_allclose([row["loss"] for row in history.epochs], means, rtol=1e-5)

    def test_steps_count_before_the_epochs_of_a_source(self):
        source = jdist.data.from_arrays(DATA, global_batch=16, epochs=2)
        state, _ = fit(data=source, steps=20)
        assert int(state.step) == 20

    def test_steps_that_are_left_are_a_multiple_of_a_call(self, tmp_path):
        def run(steps, steps_per_call):
            return fit(callbacks.checkpoint(tmp_path), steps=steps, steps_per_call=steps_per_call)

        run(10, 1)
        with pytest.raises(
            StepError, match="`steps` is 24, and 14 of these are left: not a multiple of steps_per_call=4"
        ):
            run(24, 4)
        state, _ = run(22, 4)
        assert int(state.step) == 22

    def test_a_run_goes_on_behind_the_shorter_call_that_ended_a_pass(self, tmp_path):
        """A pass has 7 steps, in calls of 4 and 3: as many as are left then are no multiple of a call."""

        def run(where, kill=None):
            def fail(moment):
                if moment.step == kill:
                    raise InterruptedError

            source = jdist.data.from_files(["all"], lambda _: DATA, global_batch=16)
            kept = callbacks.checkpoint(tmp_path / where, every=1)
            state, _ = fit(kept, fail, data=source, steps=24, steps_per_call=4)
            return int(state.step), np.asarray(state.params["w"]).tobytes()

        with pytest.raises(InterruptedError):
            run("killed", kill=14)
        assert run("killed") == run("whole")

    def test_a_shuffled_source_is_drawn_anew_in_each_epoch(self):
        seen: list[np.ndarray] = []
        source = jdist.data.from_arrays(DATA, global_batch=100, shuffle_seed=1)

        def look(state: Any, batch: Any) -> Any:
            return {"w": state["w"] + 1}, {"first": batch["x"][0, 0]}

        def note(moment: jdist.callbacks.Moment) -> None:
            seen.append(moment.metrics["first"])

        fit(note, step=look, state={"w": np.zeros(())}, data=source, epochs=3)
        assert len(set(seen)) == 3

    def test_a_function_of_the_input_context_and_a_distributed_dataset(self):
        strategy = mirrored()

        def dataset(context: jdist.InputContext) -> Any:
            return jdist.data.from_arrays(DATA, global_batch=context.per_replica_batch(20))

        a, _ = fit(data=dataset, strategy=strategy)
        feed = strategy.distribute_dataset(jdist.data.from_arrays(DATA, global_batch=20))
        b, _ = fit(data=feed, strategy=strategy)
        assert int(a.step) == int(b.step) == 5
        np.testing.assert_allclose(a.params["w"], b.params["w"], rtol=1e-6)

    @pytest.mark.parametrize(
        "make", [lambda rows, batch: rows, lambda rows, batch: jdist.data.from_arrays(rows, global_batch=batch)]
    )
    def test_a_batch_of_all_rows_and_as_many_again_is_filled_up_and_a_larger_one_refused(self, make):
        def run(batch: int) -> Any:
            data = make(DATA, batch)
            batch_of_arrays = {"global_batch": batch} if data is DATA else {}
            return fit(data=data, **batch_of_arrays)

        assert int(run(200)[0].step) == 1
        with pytest.raises(DatasetError, match=r"more than twice the 100 rows .* say global_batch=100; a dataset that"):
            run(201)

    @pytest.mark.parametrize("wrong", ["4", 0, -1, 2.5, True])
    @pytest.mark.parametrize(
        "make", [lambda rows: rows, lambda rows: pytest.importorskip("grain").MapDataset.source([rows])]
    )
    def test_a_global_batch_that_is_no_number_of_rows_is_refused(self, make, wrong):
        with pytest.raises(DatasetError, match=f"`global_batch` is {wrong!r}; it must be a whole number, 1 or more"):
            fit(data=make(DATA), global_batch=wrong)

    def test_what_the_user_has_distributed_is_taken_as_it_is_and_so_is_what_is_evaluated(self):
        feed = jdist.one_device().distribute_dataset(jdist.data.from_arrays(DATA, global_batch=400))
        few = jax.tree.map(lambda rows: rows[:3], HELD_OUT)
        evaluate = {"eval_data": jdist.data.from_arrays(few, global_batch=100), "eval_step": eval_step}
        state, _ = fit(data=feed, strategy=jdist.one_device(), **evaluate)
        assert int(state.step) == 1
        fit(global_batch=100, **evaluate)


class TestEvaluation:
    def test_after_each_epoch_or_as_often_as_asked_and_at_the_end(self):
        def run(**options: Any) -> list[int]:
            _, history = fit(**EVAL, **options)
            return [row["step"] for row in history.evals]

        assert run(epochs=2) == [7, 14]
        assert run(steps=9) == [7, 9]
        assert run(steps=9, eval_every=4) == [4, 8, 9]
        assert run(epochs=2, eval_every=14) == [14]

    def test_one_metric_for_all_that_the_evaluation_returns_while_training_has_scalars(self):
        metric = jdist.metrics.collect({"right": jdist.metrics.accuracy(threshold=0.0)})

        def step(state: Any, batch: Any) -> Any:
            return metric.update({"right": (batch["x"] @ state.params["w"], batch["y"] > 0)}, batch["mask"])

        state, history = fit(eval_data=HELD_OUT, eval_step=step, metrics=metric)
        expected = np.mean((HELD_OUT["x"] @ np.asarray(state.params["w"]) > 0) == (HELD_OUT["y"] > 0))
        assert history.evals == [{"step": 7, "epoch": 1, "right": pytest.approx(expected)}]
        assert len(history["epoch/loss"][0]) == 1

    def test_elsewhere_gives_the_same(self):
        def run(**options: Any) -> list[float]:
            _, history = fit(strategy=mirrored(), epochs=2, **EVAL, **options)
            return [row["loss"] for row in history.evals]

        np.testing.assert_allclose(run(eval_strategy=jdist.one_device()), run(), rtol=1e-6)

    def test_a_task_brings_its_steps_along(self):
        task = digits.make(width=4)
        state, history = fit(
            step=task,
            state=jax.jit(lambda key: task.create_state(key, optax.adam(1e-3)))(jax.random.key(0)),
            data=task.train_data(512, 0, 1),
            strategy=jdist.one_device(),
            eval_data=task.eval_data(360),
        )
        assert int(state.step) == 3
        assert 0 < history.evals[-1]["accuracy"] < 1


class TestSteps:
    def test_a_distributed_step_runs_under_its_own_strategy_with_its_options(self):
        strategy = mirrored()
        step = jdist.distribute(train_step, strategy, steps_per_call=2)
        state, _ = fit(step=step, steps=6, global_batch=10)
        assert int(state.step) == 6
        assert step.last_state is state
        assert state.params["w"].sharding == strategy.replicated_sharding

    def test_the_current_strategy_is_taken(self):
        with mirrored().scope():
            state, _ = fit(steps=2, global_batch=10)
        assert len(state.params["w"].sharding.device_set) == 2

    def test_compressed_gradients_keep_what_they_left_out(self):
        strategy = jdist.mirrored(jax.devices()[:2], all_reduce=jdist.reduction.compressed("bf16"))
        state, _ = fit(strategy=strategy, epochs=2)
        assert isinstance(state, jdist.StepState)
        np.testing.assert_allclose(state.params["w"], by_numpy(2, global_batch=16)[0], rtol=2e-2)

    @pytest.mark.parametrize(("rows", "programs"), [(96, 2), (100, 3)])  # the second of one replica has the real rows
    def test_the_step_and_that_of_one_replica_are_all_that_compiles(self, rows, programs, compiled):
        data = {name: x[:rows] for name, x in DATA.items()}
        state = jax.device_get(mirrored().init(create_state))
        compiled.clear()
        fit(state=state, data=data, strategy=mirrored(), epochs=2)
        assert len(compiled) == programs

    def test_nothing_compiles_after_the_first_epoch(self, compiled):
        counts = []
        note = callbacks.Callback(on_epoch=lambda moment: counts.append(len(compiled)))
        fit(note, strategy=mirrored(), epochs=4, **EVAL)
        assert counts[0] > 0
        assert counts[1:] == counts[:1] * 3


class TestHistory:
    def test_rows_are_logged_every_so_many_steps_and_at_the_end(self):
        _, history = fit(epochs=2, log_every=5)
        steps, losses = history["loss"]
        assert steps.tolist() == [5, 10, 14]
        assert np.all(np.isfinite(losses))
        with pytest.raises(KeyError, match=r"'los' was not measured; .* Did you mean 'loss'"):
            history["los"]

    def test_it_draws_itself(self, tmp_path):
        _, history = fit(epochs=2, log_every=1)
        history.plot(tmp_path / "curves.png")
        assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
        assert history._repr_png_()[:4] == b"\x89PNG"
        assert history._repr_html_() is None  # a notebook would show it in place of the picture

    def test_without_matplotlib_it_says_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        history = jdist.History([{"step": 1, "epoch": 0, "loss": 2.0}])
        told = "no curves drawn, matplotlib is not installed: pip install matplotlib"
        with pytest.raises(ConfigError, match=rf"curves\.png: {told}$"):
            history.plot(tmp_path / "curves.png")
        assert history._repr_png_() is None
        assert history._repr_html_() == f"<p>{history!r}<br>{told}</p>"

    def test_metrics_of_several_steps_in_a_call_are_those_of_the_last(self):
        def run(steps_per_call: int) -> list[float]:
            _, history = fit(steps=12, global_batch=20, log_every=4, steps_per_call=steps_per_call)
            return history["loss"][1].tolist()

        np.testing.assert_allclose(run(4), run(1), rtol=1e-5)

    def test_metrics_of_all_rows(self):
        accuracy = jdist.metrics.accuracy(threshold=0.0)

        def step(state: Any, batch: Any) -> Any:
            state, told = train_step(state, batch)
            return state, told | {"right": accuracy.update(batch["x"][:, 0], batch["y"] > 0, batch["mask"])}

        expected = np.mean((DATA["x"][:, 0] > 0) == (DATA["y"] > 0))
        for k in (1, 3):
            _, history = fit(step=step, epochs=2, metrics={"right": accuracy}, steps_per_call=k)
            assert [row["right"] for row in history.epochs] == pytest.approx([expected] * 2)


class TestEnding:
    def test_an_interrupt_ends_it_in_good_order(self):
        def interrupt(moment: jdist.callbacks.Moment) -> None:
            if moment.step == 3:
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.getsignal(signal.SIGINT)
        state, history = fit(interrupt, steps=100_000)
        done = int(state.step)
        assert 3 <= done < 100_000
        assert history.stopped == "by SIGINT"
        assert signal.getsignal(signal.SIGINT) is before
        state, history = fit(state=state, steps=2)  # the same cell once more
        assert history.stopped is None
        assert int(state.step) == done + 2

    @pytest.mark.filterwarnings("ignore:checkpoint. `data` is a generator")
    @pytest.mark.parametrize("interrupted", [False, True])
    def test_an_error_of_the_data_behind_an_interrupt_loses_nothing(self, interrupted, tmp_path):
        """A terminal's Ctrl-C ends processes that read data, and whoever waits for them gets an error."""

        trained = threading.Event()

        def reading():
            yield from [{"x": np.full((8, 3), i, np.float32), "y": np.zeros(8, np.float32)} for i in range(4)]
            assert trained.wait(60)
            if interrupted:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            raise RuntimeError("a worker died")

        def train():
            saves = callbacks.checkpoint(tmp_path, every=1_000)
            ends = callbacks.Callback(on_step=lambda moment: trained.set() if moment.step == 4 else None, logs=())
            return fit(saves, ends, data=reading(), steps=9)

        if not interrupted:
            with pytest.raises(RuntimeError, match="a worker died"):
                train()
            return
        with pytest.warns(RuntimeWarning, match="the data ended behind SIGINT: RuntimeError: a worker died"):
            state, history = train()
        assert (history.stopped, int(state.step)) == ("by SIGINT", 4)
        assert jdist.train.Checkpointer(tmp_path).steps() == [4]

    def test_a_second_interrupt_leaves_at_once_and_the_process_lives_on(self):
        def wait(moment: jdist.callbacks.Moment) -> None:
            for after_s in (0.0, 1.3):
                threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
            threading.Event().wait(60)

        before, closed = signal.getsignal(signal.SIGINT), []
        with pytest.raises(KeyboardInterrupt):
            fit(wait, callbacks.Callback(close=lambda: closed.append(1)))
        assert closed == [1]
        assert signal.getsignal(signal.SIGINT) is before

    def test_sigterm_leaves_with_its_exit_code_after_the_callbacks(self, tmp_path):
        def terminate(moment: jdist.callbacks.Moment) -> None:
            if moment.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(SystemExit) as left:
            fit(terminate, jdist.callbacks.checkpoint(tmp_path, every=None), steps=100_000)
        assert left.value.code == 143
        with jdist.train.Checkpointer(tmp_path) as checkpoints:
            assert checkpoints.steps()

    @pytest.mark.parametrize("steps", [2, 100_000])  # the last evaluation, and one between steps
    def test_sigterm_in_an_evaluation_leaves_it_and_saves(self, steps, tmp_path):
        read = []

        def held_out(context: Any) -> Any:
            for k in range(1_000):
                read.append(k)
                if k == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield {name: rows[:16] for name, rows in HELD_OUT.items()}

        with pytest.raises(SystemExit) as left:
            fit(
                callbacks.checkpoint(tmp_path, every=None),
                steps=steps,
                **EVAL | {"eval_data": held_out, "eval_every": 2},
            )
        assert left.value.code == 143
        assert 3 < len(read) < 1_000
        with jdist.train.Checkpointer(tmp_path) as checkpoints:
            assert checkpoints.steps() == [2]

    def test_sigterm_in_a_save_leaves_after_it(self, tmp_path, monkeypatch):
        save = jdist.train.Checkpointer.save

        def terminated(*args: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return save(*args, **options)

        monkeypatch.setattr(jdist.train.Checkpointer, "save", terminated)
        with pytest.raises(SystemExit) as left:
            fit(callbacks.checkpoint(tmp_path, every=2), steps=100_000)
        assert left.value.code == 143
        with jdist.train.Checkpointer(tmp_path) as checkpoints:
            assert checkpoints.steps() == [2]

    @pytest.mark.parametrize("steps_per_call", [1, 2])
    def test_a_gradient_that_is_no_number_says_which_step(self, steps_per_call, tmp_path):
        data = {"x": DATA["x"].copy(), "y": DATA["y"]}
        data["x"][70] = np.nan

        def run(step: Any, **options: Any) -> NonFiniteError:
            with pytest.raises(NonFiniteError) as raised:
                fit(step=step, data=data, **options)
            return raised.value

        error = run(train_step, steps_per_call=steps_per_call)
        assert error.step == 4
        assert str(error).startswith("step 5 of the run: ")
        assert re.findall(r"step \d+", "\n".join([str(error), *error.__notes__])) == ["step 5"]
        own = run(jdist.distribute(train_step, jdist.one_device(), steps_per_call=steps_per_call))
        assert str(own).startswith("step 4: ")
        assert "counts the steps from 0, since this one was distributed." in "".join(own.__notes__)
        told = {"callbacks": [callbacks.checkpoint(tmp_path)], "steps_per_call": steps_per_call}
        fit(data=data, steps=2, **told)
        error = run(train_step, **told)
        assert error.step == 2
        assert str(error).startswith("step 5 of the run: ")


SOURCE = jdist.data.from_arrays(DATA, global_batch=16)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"global_batch": None}, DatasetError, "`global_batch` is missing"),
            ({"epochs": 1, "steps": 2}, StepError, "give one of them"),
            ({"epochs": 0}, StepError, "`epochs` is 0"),
            ({"steps": True}, StepError, "`steps` is True"),
            ({"steps": 5, "steps_per_call": 2}, StepError, "not a multiple of steps_per_call=2"),
            (
                {"epochs": 3, "steps_per_epoch": 5, "steps_per_call": 2},
                StepError,
                "`epochs` times `steps_per_epoch` is 15",
            ),
            ({"steps_per_epoch": -1}, StepError, "`steps_per_epoch` is -1"),
            ({"steps": np.float32(3)}, StepError, r"`steps` is np.float32\(3.0\)"),
            ({"log_every": 0}, StepError, "`log_every` is 0"),
            ({"log_every": None}, StepError, "`log_every` is None"),
            ({"log_to": "rows.jsonl"}, StepError, "`log_to` is rows.jsonl, the name of a file; give a folder"),
            ({"eval_data": HELD_OUT}, StepError, "without `eval_step`"),
            ({"eval_step": eval_step}, StepError, "`eval_step` is given without `eval_data`"),
            ({"eval_every": 3}, StepError, "`eval_every` is given without `eval_data`"),
            ({"strategy": "mirrored"}, StrategyError, "`strategy` is 'mirrored'"),
            ({"callbacks": ["early"]}, StepError, "'early', which is not a callback"),
            ({"callbacks": jdist.callbacks.nan_guard()}, StepError, "give a list"),
            ({"callbacks": None}, StepError, "`callbacks` is None; give a list"),
            ({"callbacks": [jdist.callbacks.early_stopping]}, StepError, r"Call it: `early_stopping\(\.\.\.\)`"),
            ({"callbacks": [jdist.callbacks.Callback]}, StepError, r"Call it: `Callback\(\.\.\.\)`"),
            ({"callbacks": [dict]}, StepError, "<class 'dict'>, which is not a callback"),
            ({"callbacks": [lambda epoch, logs: None]}, StepError, "which is not a callback"),
            ({"batch_size": 16}, StepError, "has no argument `batch_size`; here it is `global_batch`"),
            ({"global_batch_size": 16}, StepError, "`global_batch_size`; here it is `global_batch`"),
            ({"precision": "bf16"}, StepError, r"here it is `jdist\.distribute\(step, strategy, precision="),
            ({"validation_data": HELD_OUT}, StepError, "here it is `eval_data`"),
            ({"epoch": 1}, StepError, "no argument `epoch`. Did you mean 'epochs'"),
            ({"colour": 1}, TypeError, "unexpected keyword argument 'colour'"),
            ({"callbacks": [lambda moment: True]}, StepError, "a callback returned True"),
            ({"callbacks": [callbacks.Callback(on_resume=lambda moment: 3)]}, StepError, "a callback returned 3"),
            ({"step": "adam"}, StepError, r"jdist\.fit needs a step, it got a str: give a function"),
            (
                {"step": jdist.distribute(train_step, mirrored()), "strategy": jdist.one_device()},
                StrategyError,
                "Leave `strategy` out",
            ),
            ({"data": dataclasses.replace(SOURCE, epochs=2), "epochs": 3}, DatasetError, "`data` has 2 epochs already"),
            ({"data": SOURCE, "global_batch": 8}, DatasetError, "`global_batch` is 8, but `data` is a ArraySource"),
            (
                {"metrics": {"aucc": jdist.metrics.auc()}},
                StepError,
                "`metrics` has 'aucc', which no step returns; they return 'loss'",
            ),
            *(
                ({"data": data, "global_batch": 16}, DatasetError, text)
                for data, text in (
                    ({"x": [1.0, 2.0]}, r"a list at \['x'\], where an array of rows should be"),
                    ((np.ones(3), {"y": [1]}), r"a list at \[1\]\['y'\], where an array"),
                    ({}, "which has no arrays"),
                    ("train.arrayrecord", "is the path 'train.arrayrecord', not data"),
                    (
                        [{"x": np.ones(3), "y": 0}] * 4,
                        r"a list of batches.*such as a list of them, use `jdist\.data\.from_rows",
                    ),
                    (create_state(), "`data` is a TrainState: neither arrays nor a source of batches"),
                    ((DATA["x"], DATA["y"]), "100 rows, which do not divide into batches of 16"),
                )
            ),
        ],
    )
    def test_bad_arguments(self, options, error, text):
        with pytest.raises(error, match=text):
            fit(**options)

    @pytest.mark.parametrize(("of_step", "of_dataset"), [(4, 1), (1, 4)])
    def test_a_dataset_that_is_stacked_for_other_calls(self, of_step, of_dataset):
        strategy = mirrored()
        source = jdist.data.from_arrays(DATA, global_batch=16)
        dataset = strategy.distribute_dataset(source, steps_per_call=of_dataset)
        with pytest.raises(BatchError, match=rf"steps_per_call={of_step}, the dataset with another"):
            fit(data=dataset, strategy=strategy, steps_per_call=of_step)

    def test_x_and_y_are_one_tree(self):
        with pytest.raises(StepError, match=r'The data is one tree, \{"x": x, "y": y\}'):
            jdist.fit(train_step, create_state(), DATA["x"], DATA["y"], global_batch=16)

    @pytest.mark.parametrize(
        ("step", "text"),
        [
            (lambda state, batch: train_step(state, batch)[0], "the step returned the state alone"),
            (lambda state, batch: train_step(state, batch)[::-1], "the step returned the state second"),
            (lambda state, batch: train_step(state, batch)[1], "a dict, but .*: write `return state, metrics`"),
            (lambda state, batch: (state, train_step(state, batch)[1]["loss"]), r"returned float32\[\] for metrics"),
            (
                jdist.distribute(lambda state, batch: train_step(state, batch)[0], jdist.one_device()),
                "returns the state alone",
            ),
            (
                jdist.distribute(train_step, jdist.one_device(), returns=("state", "examples")),
                r"has returns=\('state', 'examples'\)",
            ),
            *(
                (lambda state, batch, name=name: (state, {name: train_step(state, batch)[1]["loss"]}), text)
                for name, text in (
                    ("step", "name 'step', which the rows of a run have"),
                    ("eval/loss", "name 'eval/loss', which the rows of a run have"),
                    (1, "name 1, of type int; names are text"),
                )
            ),
            (
                lambda state, batch: (state, {"own": jdist.PerReplica(batch["y"].mean())}),
                "metric 'own' as a PerReplica",
            ),
            (
                lambda state, batch: (state, {"error": batch["x"].mean(0)}),
                r"metric 'error' of shape \(3,\), not a scalar.*return their mean, `jdist\.mean\(rows, batch\[\"mask\"\]\)`; "
                r"if it is what a `jdist\.metrics` metric",
            ),
        ],
    )
    def test_a_step_that_returns_something_else_is_refused_before_it_is_compiled(self, step, text):
        told = []
        with pytest.raises(StepError, match=text):
            fit(callbacks.Callback(on_start=told.append), step=step)
        assert told == []

    @pytest.mark.parametrize(
        ("step", "text"),
        [
            (lambda state, batch: eval_step(state, batch)["loss"], r"returned float32\[\] for metrics"),
            (train_step, "train_step returned tuple for metrics"),
            (lambda state, batch: {"y": batch["y"]}, r"returned metric 'y' of shape \(16,\), not a scalar"),
        ],
    )
    def test_an_evaluation_that_returns_something_else_is_refused_before_the_first_step(self, step, text):
        told = []
        with pytest.raises(StepError, match=text):
            fit(told.append, eval_data=HELD_OUT, eval_step=step)
        assert told == []

    def test_looking_at_the_steps_before_costs_no_second_tracing(self):
        traced = []

        def train(state: Any, batch: Any) -> Any:
            traced.append("train")
            return train_step(state, batch)

        def evaluate(state: Any, batch: Any) -> Any:
            traced.append("eval")
            return eval_step(state, batch)

        fit(step=train, verify="off", eval_data=HELD_OUT, eval_step=evaluate, strategy=mirrored())
        assert sorted(traced) == ["eval", "train"]

    def test_a_step_over_nnx_objects_evaluates_undistributed(self):
        step = jdist.nnx.distribute(jdist.one_device())(train_step)
        for call in (jdist.evaluate, jdist.predict):
            with pytest.raises(StepError, match=r"Give the function itself, with all objects in one argument"):
                call(step, create_state(), DATA, global_batch=16)
        with pytest.raises(StepError, match=r"the step's first argument holds no nnx object"):
            jdist.fit(step, create_state(), DATA, global_batch=16)

    @pytest.mark.parametrize("is_split", [False, True])
    def test_a_step_over_nnx_objects_learns_without_a_warning(self, is_split):
        def create():
            model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
            return model, nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

        graphdef, _ = nnx.split(create())

        def step(state, batch):
            model, optimizer = nnx.merge(graphdef, state) if is_split else state
            loss, grads = jdist.nnx.value_and_grad(
                lambda model: jdist.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2, batch["mask"])
            )(model)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)) if is_split else (model, optimizer), {"loss": loss}

        state = mirrored().init(lambda: nnx.state(create()) if is_split else create())
        _, history = fit(step=step, state=state, strategy=mirrored(), epochs=2)
        assert history.epochs[1]["loss"] < 0.7 * history.epochs[0]["loss"]

    def test_a_step_that_forgets_the_new_state_is_told_of(self):
        def step(state: Any, batch: Any) -> Any:
            _, told = train_step(state, batch)
            return state, told

        with pytest.warns(UserWarning, match="step returns the state unchanged: nothing is learned") as warned:
            fit(step=step)
        assert [warning.filename for warning in warned] == [loop_programs.__file__]

    @pytest.mark.parametrize(
        ("make", "options"),
        [
            (jdist.default, {}),
            (mirrored, {"steps_per_call": 2}),
            (lambda: jdist.mirrored(jax.devices()[:2], transform="pmap"), {"accumulate": 2}),
            (lambda: jdist.mirrored(jax.devices()[:2], transform="jit"), {}),
            (lambda: jdist.central_storage(jax.devices()[:2]), {}),
        ],
        ids=["default", "steps_per_call", "pmap_accumulate", "global_view", "central_storage"],
    )
    def test_a_step_that_never_reads_the_mask_of_padded_batches_is_told_of(self, make, options):
        def careless(state: Any, batch: Any) -> Any:
            loss, grads = jdist.value_and_grad(lambda p: jdist.mean(errors(p, batch)))(state.params)
            return state.apply_gradients(grads=grads), {"loss": loss}

        def warned_of(step: Any, epochs: int | None = 1, **more: Any) -> list[tuple[str, str]]:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                fit(step=jdist.distribute(step, make(), **options), epochs=epochs, verify="off", **more)
            return [(str(w.message).partition(",")[0], w.filename) for w in seen]

        assert warned_of(careless) == [('careless never reads batch["mask"]', loop_programs.__file__)]
        assert warned_of(train_step) == []
        assert warned_of(careless, global_batch=20) == []
        assert warned_of(careless, epochs=None, steps=6) == []
        evaluation = {"eval_step": lambda state, batch: {"loss": jdist.mean(errors(state.params, batch))}}
        told = ('<lambda> never reads batch["mask"]', loop_programs.__file__)
        assert warned_of(train_step, eval_data=DATA, **evaluation) == [told]

    def test_a_state_of_a_strategy_that_nobody_named(self):
        state = mirrored().init(create_state)
        for call in (jdist.fit, jdist.evaluate, jdist.predict):
            with pytest.raises(StrategyError, match="`strategy` is missing: the state lies on 2 devices"):
                call(train_step, state, DATA, global_batch=16)
        state, _ = fit(state=state, strategy=jdist.default())
        assert int(state.step) == 7

    def test_arrays_without_names_that_come_out_even_need_no_mask(self):
        def step(state: Any, batch: Any) -> Any:
            return state + 1, {"y": batch[1].mean()}

        _, history = fit(step=step, state=0.0, data=tuple(DATA.values()), global_batch=20)
        assert history.epochs[0]["y"] == pytest.approx(DATA["y"].mean(), rel=1e-5)

    def test_a_step_and_a_state_that_are_swapped(self):
        for call, step in ((jdist.fit, train_step), (jdist.evaluate, eval_step)):
            with pytest.raises(StepError, match=rf"jdist\.{call.__name__} got a TrainState as the step, .* swapped"):
                call(create_state(), step, DATA, global_batch=16)
