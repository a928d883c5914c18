"""Compiling a planned step: memory, bytes, and a refusal."""

import pytest

from jdist.experiment.load import load
from jdist.experiment.prepare import prepare
from jdist.experiment.validate import validate
from jdist.plan.compile import compile_step, plan_step, too_large
from tests.plan.plan_toy import config_file


@pytest.mark.parametrize(
    ("message", "needed", "available", "partly"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm. Exceeded hbm capacity by "
            "1.75G.\n\nTotal hbm usage >= 18.00G:",
            17.5 * 2**30,
            15.75 * 2**30,
            False,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (47.19G) exceeds "
            "available HBM (512.00M).",
            round(47.19 * 2**30),
            2**29,
            True,
        ),
        ("RESOURCE_EXHAUSTED: something new", None, None, False),
        ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Used 2.00K of 1.00K hbm.", 2048, 1024, False),
    ],
)
def test_the_compilers_refusals(message, needed, available, partly):
    found = too_large(message)
    assert (found.needed, found.available, found.partly) == (needed, available, partly)
    assert found.message == message.rpartition("Oom: ")[2].removeprefix("RESOURCE_EXHAUSTED: ").splitlines()[0]


def planned(tmp_path, *overrides):
    document = load(config_file(tmp_path), [*overrides, "strategy.name=mirrored"])
    config = validate(document)
    return plan_step(config, prepare(config, document, to_run=False))


def test_memory_adds_up(tmp_path):
    found = compile_step(planned(tmp_path))
    m = found.memory
    assert m.total == m.arguments + m.outputs - m.aliased + m.temporaries + m.code
    assert 0 < m.aliased <= m.outputs
    assert m.host == 0
    assert found.module.num_devices == 8
    assert found.bytes_moved > m.arguments


def test_the_batch_is_that_of_all_replicas_padded(tmp_path):
    assert planned(tmp_path, "train.global_batch=20").batch["mask"].shape == (24,)
    assert planned(tmp_path, "train.steps_per_call=2").batch["mask"].shape == (2, 64)


def test_more_rows_are_more_work_and_more_memory(tmp_path):
    small, large = (planned(tmp_path, f"train.global_batch={n}") for n in (64, 128))
    assert large.flops == 2 * small.flops > 0
    assert compile_step(large).memory.arguments > compile_step(small).memory.arguments


@pytest.mark.parametrize("option", ["train.accumulate=2", "train.steps_per_call=2"])
def test_the_work_of_a_step_does_not_depend_on_how_its_calls_are_cut(tmp_path, option):
    assert planned(tmp_path, option).flops == planned(tmp_path).flops


def test_bytes_of_a_loop_count_as_often_as_it_runs(tmp_path):
    """Microbatches read the parameters again; the update, which is outside of their loop, runs once."""
    options = ("task.options.width=4096", "train.optimizer={name: adamw, learning_rate: 1e-3}")
    once = compile_step(planned(tmp_path, *options)).bytes_moved
    of_four_steps = compile_step(planned(tmp_path, *options, "train.steps_per_call=4")).bytes_moved
    of_microbatches = compile_step(planned(tmp_path, *options, "train.accumulate=4")).bytes_moved
    assert of_four_steps == pytest.approx(4 * once, rel=0.01)
    assert once < of_microbatches < 3 * once
