"""`jdist plan`, as a whole."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

import jdist
from jdist.cli.main import main
from jdist.experiment.load import load
from jdist.experiment.validate import validate
from jdist.plan.plan import make_plan
from jdist.plan.table import duration, show, show_sweep
from jdist.plan.target import parse_target
from jdist.strategies import absent_plugins
from jdist.support.words import size
from tests.plan.plan_toy import config_file

DIGITS = str(Path(__file__).parents[2] / "configs" / "digits.yaml")
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed here: pip install 'jdist[plan-tpu]'"
)


@pytest.fixture
def toy(tmp_path):
    return str(config_file(tmp_path))


def planned(toy, target, *overrides):
    document = load(toy, overrides)
    return make_plan(validate(document), document, parse_target(target))


def test_cpu_devices_are_compiled_for_run_and_compared(toy, capsys):
    assert main(["plan", toy, "--topology", "cpu:4"]) == 0
    text = capsys.readouterr().out
    for part in (
        "global batch 64 = 4 replicas x 16",
        "memory of each of 4 cpu devices",
        ": fits, ",
        "all-reduce",
        "1 of 4",
        "no model of the time",
        "predicted, and measured in one real step",
        "the temporaries are not compared",
    ):
        assert part in text
    assert main(["plan", toy, "--topology", "cpu:4", "--no-check"]) == 0
    assert "measured in one" not in capsys.readouterr().out


def test_in_python_it_is_a_function(toy):
    plan = jdist.plan.plan_config(toy, "train.global_batch=32", topology="cpu:4")
    assert (plan.global_batch, plan.num_devices, plan.checks) == (32, 4, ())
    assert "global batch 32 = 4 replicas x 8" in jdist.plan.show(plan)


@needs_libtpu
def test_a_tpu_that_is_not_here(toy, capsys):
    assert main(["plan", toy, "train.global_batch=20", "--topology", "v5e:2x4"]) == 0
    text = capsys.readouterr().out
    for part in (
        "mirrored: 8 replicas on tpu devices",
        "global batch 20 = 8 replicas x 3 - 4 padding",
        "memory of each of 8 TPU v5 lite devices",
        "of 16.00 GiB: fits",
        "a model, not a measurement",
        "device = FLOPs / 65% of the peak + bytes / 75%",
        "https://docs.cloud.google.com/tpu/docs/v5e",
    ):
        assert part in text
    assert "measured in one" not in text


def test_a_batch_that_the_data_cannot_fill_is_planned_and_said(toy, capsys):
    assert main(["plan", toy, "train.global_batch=100000", "--topology", "cpu:2", "--no-check"]) == 0
    assert re.search(r"the task has \d+ rows .* `jdist run` refuses a global batch of 100,000", capsys.readouterr().out)


@needs_libtpu
def test_as_json(toy, capsys):
    assert main(["plan", toy, "--topology", "v5e:2x4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    memory = plan["memory"]
    assert (
        memory["total"] == sum(memory[k] for k in ("arguments", "outputs", "temporaries", "code")) - memory["aliased"]
    )
    parameters = (16 * 32 + 32) * 4
    assert sum(c["bytes"] for c in plan["collectives"]) == parameters + 2 * 4  # the number of rows, the loss
    assert [e["chips"] for e in plan["estimates"]] == [8, 64, 512, 4096]
    for estimate in plan["estimates"]:
        assert 0 <= estimate["exchange_share"] < 1
        assert estimate["step_s"] == estimate["device_s"] + estimate["exchange_s"]
    assert "FLOPs / 65% of the peak" in plan["formula"]


@needs_libtpu
def test_a_step_that_does_not_fit_is_refused_by_the_compiler(capsys):
    assert main(["plan", DIGITS, "task.options.width=8192", "--topology", "v5e:2x4"]) == 1
    text = capsys.readouterr().out
    assert "does not fit; the compiler: Ran out of memory" in text
    assert "GiB of 15.75 GiB, " in text
    assert "the state alone is 71.26 GiB" in text
    assert "train.global_batch" not in text
    assert main(["plan", DIGITS, "train.global_batch=70000000", "--topology", "v5e:2x4"]) == 1
    assert "a smaller train.global_batch, more devices, or train.accumulate=2 need less" in capsys.readouterr().out


@needs_libtpu
def test_a_sweep_names_the_largest_that_fits(capsys):
    arguments = ["plan", DIGITS, "--topology", "v5e:2x4", "--sweep", "global_batch=64,60000000,70000000"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "largest that fits: 64"
    assert [line.split()[0] for line in lines[1:-1]] == ["64", "60,000,000"]  # no need to try the last
    assert "does not fit" in lines[2]


def test_a_sweep_as_json(toy, capsys):
    assert main(["plan", toy, "--topology", "cpu:2", "--json", "--sweep", "global_batch=8..16"]) == 0
    assert [plan["global_batch"] for plan in json.loads(capsys.readouterr().out)] == [8, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v5q:2x4"], "unknown TPU 'v5q'. Did you mean 'v5p:2x4'?"),
        (["--topology", "cpu:99999"], "a process has at most 2,048 virtual CPU devices"),
        (["--topology", "cpu:4", "--sweep", "batch=1"], "--sweep is 'batch=1'; it must be"),
        (["--topology", "cpu:4", "--sweep", "global_batch=99999999999999999999"], "at most 2,147,483,647 rows"),
        (["--topology", "cpu:4", "train.global_batch=99999999999999999999"], "at most 2,147,483,647 rows"),
        (["--topology", "gpu"], "JAX finds no gpu here"),
        (["--topology", "cpu:4", "train.stepz=3"], "train.stepz: no such key"),
        (["--topology", "cpu:4", "strategy.axes=x"], "no such option"),
        (["--topology", "cpu:4", "strategy.name=parameter_server"], "a plan compiles one program"),
    ],
)
def test_what_is_not_right_leaves_with_code_2(toy, arguments, message, capsys):
    assert main(["plan", toy, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_libtpu_one_sentence_says_what_to_install(toy, capsys, monkeypatch):
    monkeypatch.setattr(absent_plugins, "has_libtpu", lambda: False)
    assert main(["plan", toy, "--topology", "v5e:2x4"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "jdist: compiling for 'v5e:2x4', which is not here, needs the TPU compiler: pip install 'jdist"
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize("more", [[], ["--suggest"], ["--sweep", "global_batch=8..64"]])
def test_a_missing_extra_is_named_before_anything_is_compiled(more, toy, capsys, monkeypatch, compiled):
    monkeypatch.setattr(absent_plugins, "installed_plugin", lambda: None)
    assert main(["plan", toy, "--topology", "h100:8", *more]) == 2
    assert "pip install 'jdist[plan-gpu]'" in capsys.readouterr().err
    assert not compiled


@needs_libtpu
def test_slices_are_domains_of_their_own(toy):
    """Two slices of 8: the links join 8 chips, and what the compiler sends between slices crosses the network."""
    whole, cut = planned(toy, "v5e:2x4"), planned(toy, "v5e:2x4,slices=2")
    assert (whole.domain_chips, cut.domain_chips) == (256, 8)
    assert [e.chips for e in cut.estimates] == [8, 16, 64, 512, 4096]
    one, two, *_ = cut.estimates
    across = sum(c.bytes for c in cut.collectives if c.axes == "between slices")
    assert across > 0
    assert two.exchange_s - one.exchange_s == pytest.approx(across / 3.125e9)  # 2 (m-1)/m = 1 for two slices
    text = show(cut)
    assert "GB/s each way over d = 8 chips" in text
    assert "all-reduce between slices" in text


@needs_libtpu
def test_central_storage_copies_to_and_from_the_hosts(toy):
    plan = planned(toy, "v5e:2x4", "strategy.name=central_storage")
    part = (16 * 32 + 32) * 4 / 8
    # A part of the parameters to each chip, a part of the gradients back, and two scalars of the guard and the step.
    assert 2 * part <= plan.host_bytes <= 2 * part + 64
    assert [e.host_s for e in plan.estimates] == pytest.approx(
        [plan.host_bytes * 8 / e.chips / 15e9 for e in plan.estimates]
    )
    assert plan.as_json()["not_in_model"] == ("the update that the hosts compute: hosts have no public figures",)
    assert "  not in the model: the update that the hosts compute" in show(plan)
    assert ", to the host 15 GB/s each way (https://" in show(plan)
    assert planned(toy, "v5e:2x4").not_in_model == ()


@needs_libtpu
def test_one_device_is_not_said_to_exchange_nothing_on_many(toy):
    plan = planned(toy, "v5e:2x4", "strategy.name=one_device")
    assert [(e.chips, e.exchange_s) for e in plan.estimates] == [(1, 0.0)]
    assert "not in the model: more than one chip: it was compiled for one device" in show(plan)


def test_one_device_exchanges_nothing(toy):
    plan = planned(toy, "cpu:4", "strategy.name=one_device")
    assert (plan.num_devices, plan.collectives) == (1, ())
    assert "collectives in one step: none" in show(plan)


@pytest.mark.parametrize("option", ["train.steps_per_call=2", "train.accumulate=2"])
def test_the_exchange_of_a_step_does_not_depend_on_how_its_calls_are_cut(toy, option):
    usual, cut = planned(toy, "cpu:4"), planned(toy, "cpu:4", option)
    parameters = (16 * 32 + 32) * 4
    for plan in (usual, cut):
        assert parameters <= sum(c.bytes for c in plan.collectives) <= parameters + 64
    assert cut.flops == usual.flops


class TestText:
    def test_sizes_and_durations(self):
        assert [size(n) for n in (0, 1000, 1536, 3 * 2**30)] == ["0 B", "1,000 B", "1.50 KiB", "3.00 GiB"]
        assert [duration(s) for s in (2.5, 0.012, 3.4e-6)] == ["2.5 s", "12 ms", "3.4 us"]

    def test_a_plan_that_does_not_fit(self, toy):
        plan = dataclasses.replace(planned(toy, "cpu:4"), capacity=1000)
        assert plan.fits is False
        assert ": does not fit, " in show(plan)
        assert show_sweep([plan]).endswith("none of them fits")

    def test_what_would_need_less(self, toy):
        small = dataclasses.replace(planned(toy, "cpu:4"), capacity=1000)
        assert small.state_bytes > 1000
        text = show(small)
        assert "the state alone is" in text
        assert "strategy.name=sharded keeps a part of it on each device" in text
        assert "train.global_batch" not in text
        one_row = dataclasses.replace(small, state_bytes=0, rows=1)
        assert "one row at a time, so no batch is smaller: train.precision=bf16" in show(one_row)
        assert "a smaller train.global_batch" in show(dataclasses.replace(one_row, rows=2))
        assert "smaller" not in show(planned(toy, "cpu:4"))

    def test_a_memory_that_nobody_knows(self, toy):
        plan = dataclasses.replace(planned(toy, "cpu:4"), capacity=None)
        assert plan.fits is None
        assert "the memory of this device is not known" in show(plan)
        assert "memory not known" in show_sweep([plan])
