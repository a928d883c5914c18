import contextlib
import io
import math
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from jdist.errors import ConfigError
from jdist.experiment.config import PlatformSection
from jdist.experiment.platform import apply_platform, platform_environment
from jdist.loop.report.progress import Meter, Speed, duration, open_report


@contextlib.contextmanager
def shown(*, step=0, total=600, **console):
    """A report, and what it writes."""
    out = io.StringIO()
    with contextlib.closing(open_report(Console(file=out, **console), step=step, total=total)) as report:
        yield report, out


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_first_lap_is_forgotten_and_pauses_do_not_count():
    clock = Clock()
    meter = Meter(step=0, total=100, global_batch=8, clock=clock)
    clock.now += 50.0  # compilation
    assert meter.lap(10) == Speed(examples_per_s=8 / 5, steps_per_s=1 / 5, eta_s=450.0)
    with meter.stopped():
        clock.now += 1000.0
    clock.now += 1.0
    assert meter.lap(20) == Speed(
        examples_per_s=pytest.approx(80), steps_per_s=pytest.approx(10), eta_s=pytest.approx(8.0)
    )
    assert meter.train_s == pytest.approx(51.0)


def test_time_goes_on_from_the_earlier_process():
    clock = Clock()
    meter = Meter(step=50, total=100, global_batch=8, earlier_s=30.0, clock=clock)
    clock.now += 5.0
    assert meter.lap(60).eta_s == pytest.approx(20.0)
    assert meter.train_s == pytest.approx(35.0)


def test_a_lap_without_steps_or_time_gives_no_speed():
    clock = Clock()
    meter = Meter(step=5, total=100, global_batch=8, clock=clock)
    assert math.isnan(meter.lap(5).examples_per_s)
    assert math.isnan(meter.lap(6).examples_per_s)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (80, "0:01:20"), (59.7, "0:01:00"), (36000, "10:00:00"), (math.nan, "-")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_plain_lines_where_there_is_no_terminal():
    with shown() as (report, out):
        report.train(
            100, {"loss": 0.31239, "accuracy": 0.91}, Speed(examples_per_s=12345.4, steps_per_s=96.4, eta_s=80)
        )
        report.note("a note [not markup]")
        report.train(110, {"loss": math.nan}, Speed(examples_per_s=math.nan, steps_per_s=math.nan, eta_s=math.nan))
    assert out.getvalue().splitlines() == [
        "step 100/600  loss 0.3124  accuracy 0.91  12,345 examples/s  ETA 0:01:20",
        "a note [not markup]",
        "step 110/600  loss nan  ETA -",
    ]


def test_a_bar_on_a_terminal():
    with shown(step=100, force_terminal=True, width=100) as (report, out):
        report.note("a note [not markup]")
        report.train(300, {"loss": 0.31239}, Speed(examples_per_s=12345.4, steps_per_s=96.4, eta_s=80))
    for part in ("300/600", "loss 0.3124", "12,345 examples/s", "a note [not markup]"):
        assert part in out.getvalue()


def test_a_bar_moves_where_there_are_no_figures_and_says_when_it_no_longer_compiles():
    with shown(force_terminal=True, width=100) as (report, out):
        assert "0/600" in out.getvalue()
        report.move(1)
    text = out.getvalue()
    assert "compiling the first step" in text
    assert "compiling" not in text[text.rindex("1/600") :]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_bar_keeps_its_counter_whatever_is_beside_it(width):
    metrics = {"loss": 0.31239, "accuracy": 0.912345, "learning_rate": 0.0012345, "top_5_accuracy": 0.99}
    with shown(total=100_000, force_terminal=True, width=width) as (report, out):
        report.train(30_000, metrics, Speed(examples_per_s=12345.4, steps_per_s=96.4, eta_s=80))
    assert re.search(r"30000/100000.*ETA 0:01:20  loss 0\.3124", out.getvalue())


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (60, "ETA 0:01:20  loss 0.3124"),
        (80, "ETA 0:01:20  loss 0.3124  12,345 examples/s  1,080 steps/s"),
        (100, "ETA 0:01:20  loss 0.3124  12,345 examples/s  1,080 steps/s  input wait 34 %"),
        (
            160,
            "ETA 0:01:20  loss 0.3124  12,345 examples/s  1,080 steps/s  input wait 34 %  peak memory 562.90 MiB  "
            "goodput 93 % overall",
        ),
    ],
)
def test_a_bar_leaves_whole_figures_out_where_there_is_no_room(width, figures):
    costs = {"steps_per_s": 1080.2, "input_wait_share": 0.343, "peak_memory_bytes": 590241792, "goodput": 0.93}
    with shown(force_terminal=True, color_system=None, width=width) as (report, out):
        report.train(300, {"loss": 0.31239}, Speed(examples_per_s=12345.4, steps_per_s=96.4, eta_s=80), costs)
    drawn = re.split(r"\r|\n|\x1b\[\S*?[A-Za-z]", out.getvalue())
    assert re.fullmatch(rf"step 300/600 ━+ +{re.escape(figures)} *", [line for line in drawn if line][-1])


def test_flags_that_are_there_are_kept_and_the_configs_win():
    section = PlatformSection(cpu_devices=4, deterministic=True)
    there = {"XLA_FLAGS": "--xla_dump_to=x --xla_force_host_platform_device_count=8"}
    variables = platform_environment(section, there)
    assert variables["XLA_FLAGS"].split() == [
        "--xla_dump_to=x",
        "--xla_force_host_platform_device_count=4",
        "--xla_gpu_deterministic_ops=true",
        "--xla_gpu_autotune_level=0",
    ]
    assert variables["JAX_PLATFORMS"] == "cpu"
    assert platform_environment(PlatformSection(), there) == {}


def test_cpu_devices_contradict_another_platform():
    assert platform_environment(PlatformSection(cpu_devices=2), {"JAX_PLATFORMS": "cuda,cpu"})["JAX_PLATFORMS"] == "cpu"
    with pytest.raises(ConfigError, match="JAX_PLATFORMS=cuda rules them out"):
        platform_environment(PlatformSection(cpu_devices=2), {"JAX_PLATFORMS": "cuda"})


def test_jax_gets_the_devices_and_takes_the_flags(tmp_path):
    code = (
        "import jax\n"
        "from jdist.experiment.config import PlatformSection\n"
        "from jdist.experiment.platform import apply_platform\n"
        "apply_platform(PlatformSection(cpu_devices=3, deterministic=True))\n"
        "print(jax.device_count(), jax.default_backend())"
    )
    environ = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env=environ
    )
    assert done.stdout == "3 cpu\n"


def test_too_late_for_other_devices_is_an_error(monkeypatch):
    import jax

    count = jax.local_device_count()
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back what apply_platform changes
    apply_platform(PlatformSection(cpu_devices=count))
    with pytest.raises(ConfigError, match=f"JAX had started in this process with {count} cpu devices"):
        apply_platform(PlatformSection(cpu_devices=count + 1))
