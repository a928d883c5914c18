"""What a run costs: its rows against times that the tests set, as ratios, and against a clock of their own."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jdist
from jdist import callbacks
from jdist.callbacks.rows import starved, summary
from jdist.errors import OutOfMemoryError, StepError
from jdist.loop import costs as costs_module
from jdist.loop import memory
from jdist.loop.costs import Costs
from jdist.loop.report.metrics_file import COSTS, SHARES
from jdist.step.mesh_step import DistributedStep
from jdist.support.chips import Chip, load_chips
from tests.loop.loop_programs import DATA, EVAL, QUIET, create_state, fit, train_step

STEP_S, STEPS = 0.04, 8  # what a step takes, and how many of them a row is about


def mirrored() -> jdist.Strategy:
    return jdist.mirrored(jax.devices()[:2])


BUSY: list[tuple[float, float]] = []  # when a replica began its part of a step, and when that was over


def work(x: np.ndarray) -> np.float32:
    begin = time.monotonic()
    time.sleep(STEP_S)  # on the devices' threads: the call of the step has returned long before
    BUSY.append((begin, time.monotonic()))
    return np.float32(0)


def slow_step(w: Any, batch: Any) -> Any:
    done = jax.pure_callback(work, jax.ShapeDtypeStruct((), jnp.float32), w)
    return w + done + 1, {"loss": w + done}


def one_row(*, load_s: float = 0.0, callback_s: float = 0.0) -> tuple[dict[str, Any], float, float]:
    """Trains by slow steps, on data of which a batch takes `load_s` to load, with a callback after each step.

    Returns:
        The row of the later half of the steps; which part of their time the devices were idle, by their own clock; and how many
        of them there were in a second.
    """
    BUSY.clear()

    def load() -> Any:
        for _ in range(2 * STEPS):
            time.sleep(load_s)
            yield {"x": np.zeros(2, np.float32)}

    step = jdist.distribute(slow_step, mirrored(), returns=("state", "metrics"), verify="off")
    waits = callbacks.Callback(on_step=lambda _: time.sleep(callback_s), logs=())
    _, history = fit(waits, step=step, state=jnp.float32(0), data=load(), log_every=STEPS)
    _, row, _ = history.rows  # of the steps that compile, of those that do not, of the epoch
    of_two = sorted(BUSY)
    begins = [begin for begin, _ in of_two[::2]]
    ends = [max(a[1], b[1]) for a, b in zip(of_two[::2], of_two[1::2], strict=True)]
    idle_s = sum(begins[i] - ends[i - 1] for i in range(STEPS, 2 * STEPS))
    whole_s = ends[-1] - ends[STEPS - 1]
    return row, idle_s / whole_s, STEPS / whole_s


class TestShares:
    """`input_wait_share` is the part of the time in which the devices have no step to make, as its batch is not there."""

    def test_of_a_slow_loader_it_is_what_the_step_does_not_hide(self):
        row, idle, steps_per_s = one_row(load_s=3 * STEP_S)  # read ahead in a thread: of three parts one is hidden
        assert 0.4 < idle < 0.75
        assert row["input_wait_share"] == pytest.approx(idle, abs=0.1)
        assert row["steps_share"] == pytest.approx(1 - idle, abs=0.1)
        assert row["steps_per_s"] == pytest.approx(steps_per_s, rel=0.1)

    def test_of_a_slow_step_it_is_nothing(self):
        row, idle, steps_per_s = one_row(load_s=STEP_S / 4)
        assert row["input_wait_share"] <= idle + 0.05 < 0.3
        assert row["steps_per_s"] == pytest.approx(steps_per_s, rel=0.1)

    def test_a_callback_costs_what_the_step_does_not_hide(self):
        row, idle, _ = one_row(callback_s=3 * STEP_S)
        assert 0.4 < idle < 0.75
        assert row["other_share"] == pytest.approx(idle, abs=0.1)
        assert row["steps_share"] == pytest.approx(1 - idle, abs=0.1)
        assert row["input_wait_share"] < 0.1

    def test_of_readers_that_hold_python_it_is_what_they_take(self):
        """Each array of the old state that goes, and each look at the devices, waits for its turn behind the readers."""

        class Rows:
            def __len__(self) -> int:
                return 10_000

            def __getitem__(self, number: int) -> Any:
                end = time.thread_time() + 0.002
                while time.thread_time() < end:
                    pass
                return {"x": np.float32(number)}

        def quick_step(w: Any, batch: Any) -> Any:
            return {name: each + 1 for name, each in w.items()}, {"loss": batch["x"].sum()}

        step = jdist.distribute(quick_step, mirrored(), returns=("state", "metrics"), verify="off")
        state = {str(i): jnp.float32(0) for i in range(300)}
        data = jdist.data.from_rows(Rows(), global_batch=8, workers=4)
        _, history = fit(step=step, state=state, data=data, steps=60, log_every=20)
        row = history.rows[-1]
        assert row["input_wait_share"] > 0.25, row  # of a machine that does nothing else 0.85; it was 0.003

    def test_the_turns_of_threads_are_left_to_the_host(self):
        before, during = sys.getswitchinterval(), []
        sys.setswitchinterval(0.004)
        watch = callbacks.Callback(on_step=lambda moment: during.append(sys.getswitchinterval()), logs=())
        try:
            fit(watch, strategy=mirrored(), steps=2)
        finally:
            sys.setswitchinterval(before)
        assert during == [0.004, 0.004]

    def test_they_add_up_and_their_times_are_those_of_the_clock(self):
        spent = []
        slow = callbacks.Callback(
            on_save=lambda moment: time.sleep(0.1 * (moment.step % 7 == 0)),
            on_end=lambda moment: spent.append((dict(moment.spent), time.monotonic() - begun)),
            logs=(),
        )
        state, strategy = create_state(), mirrored()
        begun = time.monotonic()
        _, history = fit(slow, state=state, strategy=strategy, epochs=3, log_every=5, **EVAL)
        assert [row["step"] for row in history.rows] == [5, 7, 10, 14, 15, 20, 21]
        for row in history.rows:
            assert sum(row[name] for name in SHARES.values()) == pytest.approx(1, abs=0.02)
            assert set(COSTS) - set(row) == {"mfu"}  # of a CPU no peak is known
        ((seconds, whole),) = spent
        assert sum(seconds.values()) == pytest.approx(whole, rel=0.02)
        assert seconds["checkpoint"] == pytest.approx(0.3, rel=0.2)
        assert seconds["evaluation"] > 0
        assert history.rows[0]["startup_share"] + history.rows[0]["compile_share"] > 0.5

    def test_what_a_callback_does_at_the_end_is_no_checkpoint(self, tmp_path):
        spent: list[dict[str, float]] = []
        slow = callbacks.Callback(on_end=lambda _: time.sleep(1.0), logs=())
        tells = callbacks.Callback(on_end=lambda moment: spent.append(dict(moment.spent)), logs=())
        fit(slow, callbacks.checkpoint(tmp_path), tells)
        assert spent[0]["other"] >= 1.0
        assert 0 < spent[0]["checkpoint"] < 1.0

    def test_a_compilation_in_the_midst_is_named(self):
        def compiles(moment):
            if moment.step == 6:
                jax.jit(lambda x: jnp.linalg.qr(x)[0].sum())(jnp.ones((7, 7))).block_until_ready()

        late = callbacks.Callback(on_step=compiles, logs=())
        _, history = fit(late, strategy=mirrored(), log_every=5)
        assert history.rows[-1]["step"] == 7
        assert history.rows[-1]["compile_share"] > 0.5


class Token:
    """Stands for what the newest step computes: ready at once, or when the test says so."""

    def __init__(self, *, is_ready: bool):
        self.over = threading.Event()
        if is_ready:
            self.over.set()

    def is_ready(self) -> bool:
        return self.over.is_set()

    def block_until_ready(self) -> None:
        assert self.over.wait(10)


class TestSpeed:
    """A step counts where its time does: behind the first call, unless the devices were done when that returned."""

    @pytest.mark.parametrize(("is_ready", "steps"), [(False, 2), (True, 1)])
    def test_the_step_of_the_first_call(self, is_ready, steps):
        costs = Costs(jdist.one_device(), begun=time.monotonic())
        with contextlib.closing(costs):
            costs.begin(0, None, ideal_step_s=None)
            first: Any = Token(is_ready=is_ready)
            second: Any = Token(is_ready=False)
            costs.called(first, 1)
            returned = time.monotonic()
            time.sleep(STEP_S)
            first.over.set()
            costs.called(second, 2)
            time.sleep(STEP_S)
            second.over.set()
            row = costs.row(2)
            took_s = time.monotonic() - returned
        assert row["steps_per_s"] == pytest.approx(steps / took_s, rel=0.1)


class TestRows:
    def test_a_row_without_a_step_since_the_last_has_none(self):
        _, history = fit(steps=4, log_every=4, eval_every=3, **EVAL)
        costs = [(row["step"], "goodput" in row) for row in history.rows]
        assert costs == [(3, True), (4, True), (4, False)]  # the last is of the last evaluation

    @pytest.mark.parametrize("name", COSTS)
    def test_a_step_may_not_measure_under_their_names(self, name):
        def step(state, batch):
            return state.replace(step=state.step + 1), {name: jnp.float32(0)}

        with pytest.raises(StepError, match=f"a metric of the name '{name}', which the rows of a run have themselves"):
            fit(step=step, global_batch=20)

    def test_lines_show_them_and_the_end_says_what_the_time_went_to(self):
        out = io.StringIO()
        bar = callbacks.progress(Console(file=out, width=200))
        fit(bar, log_every=5)
        line, *_, last = out.getvalue().splitlines()
        assert line.startswith("step 5/7  loss ")
        for text in (" steps/s", "  input ", "iB  ", "  goodput "):
            assert text in line
        assert last.startswith("time: ")
        assert "compile " in last

    def test_memory_is_that_of_the_devices_or_on_cpu_of_the_process(self, monkeypatch):
        strategy = mirrored()
        before = memory.peak_memory_bytes(strategy)
        held = np.ones(64 * 2**20, np.uint8)
        after = memory.peak_memory_bytes(strategy)
        assert before is not None
        assert after is not None
        assert after >= max(before, held.nbytes)

        class Chip:
            platform, process_index = "tpu", 0

            def __init__(self, stats):
                self.stats = stats

            def memory_stats(self):
                return self.stats

        for stats, peak in (
            ([{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7}], 7),
            ([{"peak_bytes_in_use": 5}, {}], 5),
            ([None, {}], None),
        ):
            monkeypatch.setattr(memory, "_local_devices", lambda _, stats=stats: list(map(Chip, stats)))
            assert memory.peak_memory_bytes(strategy) == peak


class TestPeak:
    """`mfu`: the time of a step's products at the chip's peak, over the time that the step takes."""

    CHIP = load_chips()["v5e"]

    def of(self, monkeypatch: pytest.MonkeyPatch, step: Any, chip: Chip | None = CHIP, **options: Any) -> float | None:
        monkeypatch.setattr(costs_module, "peak_of", lambda device: chip)
        distributed = jdist.distribute(step, mirrored(), returns=("state", "metrics"), **options)
        batch = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32), "mask": jax.ShapeDtypeStruct((16,), bool)}
        if distributed.options.steps_per_call > 1:
            batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), batch)
        return costs_module.ideal_step_s(distributed, {"w": jnp.ones((8, 4))}, batch)

    @staticmethod
    def step(state, batch):
        def loss_of(w):
            return jdist.mean(((batch["x"] @ w) ** 2).sum(-1), batch["mask"])

        loss, grad = jdist.value_and_grad(loss_of)(state["w"])
        return {"w": state["w"] - grad}, {"loss": loss}

    FLOPS = 2 * (2 * 16 * 8 * 4)  # of the forward pass, and of the gradient of the parameters

    @pytest.mark.parametrize(
        "options",
        [{}, {"accumulate": 2}, {"steps_per_call": 4}, {"precision": jdist.precision("bf16")}, {"non_finite": "skip"}],
        ids=str,
    )
    def test_the_products_of_a_step_by_hand(self, monkeypatch, options):
        ideal_s = self.of(monkeypatch, self.step, **options)
        assert ideal_s == pytest.approx(self.FLOPS / 2 / self.CHIP.flops_per_s)  # of one of two devices

    def test_nothing_is_said_where_not_all_is_known(self, monkeypatch):
        def with_a_loop(state, batch):
            w = jax.lax.while_loop(lambda w: w.sum() > 9, lambda w: w @ jnp.eye(4) / 2, state["w"])
            return {"w": w}, {"loss": batch["x"].mean()}

        def with_an_axis(state, batch):
            return self.step(state, {**batch, "x": jax.lax.psum(batch["x"], "replica")})

        def of_eight_rows(state, batch):
            assert batch["x"].shape[0] == 8  # of a replica
            return self.step(state, batch)

        assert self.of(monkeypatch, of_eight_rows) is None
        assert self.of(monkeypatch, with_a_loop) is None
        assert self.of(monkeypatch, with_an_axis) is None
        assert self.of(monkeypatch, self.step, None) is None

    def test_a_row_has_it_where_the_peak_is_known(self, monkeypatch):
        monkeypatch.setattr(costs_module, "peak_of", lambda device: self.CHIP)
        _, history = fit(global_batch=20, strategy=mirrored())
        row = history.rows[-1]
        ideal_s = 2 * (2 * 20 * 3) / 2 / self.CHIP.flops_per_s
        assert row["mfu"] == pytest.approx(ideal_s * row["steps_per_s"], rel=2e-3)


class TestGoodput:
    def test_what_is_done_again_and_the_time_between_two_starts_are_lost(self, tmp_path):
        """Twenty steps are kept; nine more were lost with the second start, as what it did was not saved."""

        class Killed(Exception):
            pass

        def kill(moment: callbacks.Moment) -> None:
            if moment.step == 12:
                jax.block_until_ready(moment.state)
                raise Killed

        def go(*also: Any, every: int, steps: int) -> tuple[float, float, Any]:
            saves = callbacks.checkpoint(tmp_path, every=every)
            source = jdist.data.from_arrays({"x": np.zeros(100, np.float32)}, global_batch=2, epochs=None)
            step = jdist.distribute(slow_step, mirrored(), returns=("state", "metrics"), verify="off")
            fit, state = jdist.fit, jnp.float32(0)  # the first imports the loop, which is no part of the run
            begun, history = time.monotonic(), None
            with contextlib.suppress(Killed):
                _, history = fit(step, state, source, steps=steps, log_every=5, callbacks=[saves, *also], **QUIET)
            return begun, time.monotonic(), history

        first_begin, _, _ = go(every=3, steps=3)
        go(callbacks.Callback(on_step=kill, logs=()), every=100, steps=20)
        third_begin, third_end, history = go(every=100, steps=20)
        # The first start had ended on purpose: what came behind was no loss.
        lines = [json.loads(line) for line in (tmp_path / "times.jsonl").read_text().splitlines()]
        begins, ends = ([line for line in lines if line.get("event") == event] for event in ("begin", "end"))
        assert [line["step"] for line in begins] == [0, 3, 3]
        assert [line["outcome"] for line in ends] == ["finished", "failed", "finished"]
        pause_s = begins[1]["at"] - ends[0]["at"]
        assert pause_s >= 0
        assert begins[2]["at"] - begins[0]["at"] == pytest.approx(third_begin - first_begin, rel=0.02)
        wall_s = third_end - first_begin - pause_s
        assert history.rows[-1]["goodput"] == pytest.approx(20 * STEP_S / wall_s, rel=0.2)
        for attempt in range(3):  # its lines leave no time out
            of_it = [line for line in lines if line["attempt"] == attempt and "part" in line]
            for before, after in itertools.pairwise(of_it):
                assert after["begin"] == pytest.approx(before["end"], abs=2e-6)
            for line in of_it:
                assert sum(line["seconds"].values()) == pytest.approx(line["end"] - line["begin"], abs=2e-5)

    def test_a_start_that_fails_before_its_first_step_was_not_killed(self, tmp_path):
        def refuse(moment: callbacks.Moment) -> None:
            raise StepError("refused")

        with pytest.raises(StepError, match="refused"):
            fit(callbacks.checkpoint(tmp_path), callbacks.Callback(on_start=refuse, logs=()))
        last = json.loads((tmp_path / "times.jsonl").read_text().splitlines()[-1])
        assert (last["event"], last["outcome"]) == ("end", "failed")

    def test_a_finished_run_that_is_started_again_adds_nothing(self, tmp_path):
        def go(epochs: int) -> list[str]:
            fit(callbacks.checkpoint(tmp_path), epochs=epochs, **EVAL)
            return (tmp_path / "times.jsonl").read_text().splitlines()

        lines = go(1)
        assert go(1) == lines
        (tmp_path / "times.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # killed with its last step saved
        assert [json.loads(line).get("event") for line in go(1)[len(lines) - 1 :]] == ["begin", None, "end"]
        assert json.loads(go(2)[-1])["attempt"] == 2

    @pytest.mark.parametrize(("age_s", "lines"), [(0.0, 24), (1e6, 4)])
    def test_of_a_long_start_lines_are_further_apart(self, tmp_path, monkeypatch, age_s, lines):
        """Each start reads all lines: of one second each a week has 600,000."""
        monkeypatch.setattr(sys.modules[Costs.__module__], "_LINE_S", 0.0)
        token: Any = Token(is_ready=True)
        costs = Costs(jdist.one_device(), begun=time.monotonic() - age_s)
        with contextlib.closing(costs):
            costs.begin(0, tmp_path, ideal_step_s=None)
            for step in range(1, 21):
                costs.called(token, step)
            costs.row(20)
            costs.end("finished", 20)
        written = (tmp_path / "times.jsonl").read_text().splitlines()
        assert len(written) == lines
        assert json.loads(written[-2])["step"] == 20  # the last steps have their line

    def test_of_one_start_it_is_the_share_of_the_steps(self):
        _, history = fit(global_batch=20)
        (row,) = history.rows
        assert row["goodput"] == pytest.approx(row["steps_share"], abs=2e-4)


class TestStarved:
    def test_a_loader_is_named_with_what_to_do(self):
        seconds = {"steps": 30.0, "input": 63.0, "other": 7.0, "compile": 50.0}
        assert starved(seconds, 1000) == (
            "waited 63 % of the time for data: 10 batches a second came, and 33.3 could be trained on. Read them with more "
            "workers, in processes where they work in Python, or decode them once and store them so: docs/input.md"
        )

    @pytest.mark.parametrize(
        "seconds", [{"steps": 90.0, "input": 10.0, "other": 0.0}, {"steps": 0.5, "input": 1.5, "other": 0.0}]
    )
    def test_one_that_keeps_up_is_not_nor_is_a_short_run(self, seconds):
        assert starved(seconds, 1000) is None

    def test_it_is_said_once_in_a_run(self, monkeypatch):
        monkeypatch.setattr(sys.modules[starved.__module__], "_LEAST_WAIT_S", 0.05)

        def load() -> Any:
            for _ in range(20):
                time.sleep(0.02)
                yield {name: x[:16] for name, x in DATA.items()}

        out = io.StringIO()
        bar = callbacks.progress(Console(file=out, width=300))
        fit(bar, data=load(), log_every=5)
        assert out.getvalue().count("of the time for data: ") == 1

    def test_the_summary_lists_the_most_first(self):
        assert summary({"steps": 90.0, "input": 9.7, "other": 0.3}) == "time: steps 90 %, input 10 %"


class TestOutOfMemory:
    @staticmethod
    def step(state, batch):
        rows = jnp.arange(2**25, dtype=jnp.float32)[:, None] * batch["x"].sum() + jnp.arange(2.0**25)
        return {**state, "big": jnp.sort(rows, axis=0)[3, 5]}, {"loss": batch["x"].mean()}  # more than all addresses

    def error_of(self, step: Any) -> OutOfMemoryError:
        strategy = mirrored()
        params = {f"layer_{i}": np.ones((i + 1, 100), np.float32) for i in range(12)}
        state = strategy.init(lambda: {"params": params, "key": jax.random.key(0), "big": jnp.float32(0)})
        distributed = jdist.distribute(step, strategy, verify="off")
        with pytest.raises(OutOfMemoryError) as caught:
            fit(step=distributed, state=state, data={"x": np.ones((64, 200), np.float32)}, global_batch=64)
        return caught.value

    def test_a_real_one_names_the_largest_arrays(self):
        error = self.error_of(self.step)
        message = str(error)
        assert isinstance(error.__cause__, jax.errors.JaxRuntimeError)
        assert re.match(
            r"a device has no memory left: Out of memory allocating \d+ bytes\. In use were [\d,]+ arrays with ",
            message,
        )
        of_run = [leaf for leaf in error.leaves if leaf.path != "(outside of the run)"]
        batch, largest, second = of_run[:3]
        assert (batch.path, batch.array, batch.bytes_per_device) == ("batch['x']", "float32[64, 200]", 32 * 200 * 4)
        assert (largest.path, largest.bytes_per_device) == ("state['params']['layer_11']", 12 * 100 * 4)
        assert second.path == "state['params']['layer_10']"
        sizes = [leaf.bytes_per_device for leaf in error.leaves]
        assert sizes == sorted(sizes, reverse=True)
        assert len([line for line in message.splitlines() if line.startswith("  ")]) == 10
        assert "`accumulate=2`" in message.splitlines()[-1]

    def test_that_of_an_accelerator_is_known_by_its_name(self, monkeypatch):
        text = "RESOURCE_EXHAUSTED: Attempting to allocate 1.00G. That was not possible. There are 512.0M free.; (1x0x0_HBM0)"

        def fails(*_: Any) -> Any:
            raise jax.errors.JaxRuntimeError(text)

        monkeypatch.setattr(DistributedStep, "__call__", fails)
        assert str(self.error_of(self.step)).startswith(
            "a device has no memory left: Attempting to allocate 1.00G. That "
        )

    @pytest.mark.parametrize(
        "text", ["INTERNAL: something else", "RESOURCE_EXHAUSTED: Received message larger than max (9 vs. 8)"]
    )
    def test_any_other_error_is_left_alone(self, monkeypatch, text):
        def fails(*_: Any) -> Any:
            raise jax.errors.JaxRuntimeError(text)

        step = jdist.distribute(train_step, mirrored())
        monkeypatch.setattr(DistributedStep, "__call__", fails)
        with pytest.raises(jax.errors.JaxRuntimeError, match=text.partition(":")[0]):
            fit(step=step)
