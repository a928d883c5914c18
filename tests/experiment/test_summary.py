from types import SimpleNamespace

import numpy as np
import pytest

from jdist.errors import NonFiniteError
from jdist.experiment.config import OptimizerSection, ScalingSection
from jdist.experiment.summary import arithmetic, non_finite_advice, results
from jdist.loop.report.progress import figures, readable

SGD = OptimizerSection(name="sgd")


def lines(*, steps, rows, optimizer=SGD, replicas=1, processes=1):
    """The arithmetic of a run of `steps` steps of 64 rows, where an epoch is one step of `rows`."""
    config = SimpleNamespace(train=SimpleNamespace(global_batch=64, accumulate=1, optimizer=optimizer))
    parts = SimpleNamespace(
        strategy=SimpleNamespace(num_replicas=replicas, cluster=SimpleNamespace(num_processes=processes)),
        total_steps=steps,
        steps_per_epoch=-(-rows // 64),
        rows_per_epoch=rows,
        examples=lambda step, global_batch: step * 64,
    )
    return arithmetic(config, parts).splitlines()


def lengths(**numbers):
    return lines(**numbers)[-1]


@pytest.mark.parametrize(
    ("replicas", "processes", "batch"),
    [
        (24, 2, "global batch 64 = 24 replicas x 3 - 8 padding, so 2 of 24 replicas train on padding alone"),
        (48, 1, "global batch 64 = 48 replicas x 2 - 32 padding, so 16 of 48 replicas train on padding alone"),
        (60, 1, "global batch 64 = 60 replicas x 2 - 56 padding, so 28 of 60 replicas train on padding alone"),
        (5, 1, "global batch 64 = 5 replicas x 13 - 1 padding"),
    ],
)
def test_replicas_without_a_row_are_told(replicas, processes, batch):
    assert lines(steps=1, rows=64, replicas=replicas, processes=processes)[1] == batch


def test_what_a_scaling_rule_makes_of_the_options_is_told():
    scaling = ScalingSection(rule="adam", base_batch=16)
    told = lengths(steps=1, rows=64, optimizer=OptimizerSection(name="adam", b2=0.99, scaling=scaling))
    assert told == (
        "learning rate x 2, b1 0.6, b2 0.96, eps 5e-09 by the adam rule: a global batch of 64 in place of 16"
    )


@pytest.mark.parametrize(
    ("steps", "rows", "epochs"),
    [
        (400_000, 64, "400,000 epochs of 64 (1 step each)"),
        (600, 128, "300 epochs of 128 (2 steps each)"),
        (3, 128, "1.5 epochs of 128 (2 steps each)"),
        (1, 6_400_000, "less than 0.001 epochs of 6,400,000 (100,000 steps each)"),
    ],
)
def test_epochs_are_written_as_people_write_numbers(steps, rows, epochs):
    assert lengths(steps=steps, rows=rows) == f"{steps:,} steps = {steps * 64:,} examples = {epochs}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.98765, "0.9877"),
        (12.3456, "12.35"),
        (-1234.5, "-1,234"),
        (412_345.6, "412,346"),
        (0.00001234, "1.234e-05"),
        (1e30, "1e+30"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_have_about_four_digits(value, text):
    assert readable(value) == text
    assert figures({"loss": value}) == f"loss {text}"


def test_results_keep_small_and_large_values_readable():
    row = {"step": 9, "eval/loss": 2e-6, "eval/error": 1234.56789, "eval/huge": 1e20, "eval/gone": None, "eval/no": 0.0}
    assert results([row], {"guess": 0.5}).splitlines() == [
        "evaluation",
        "  loss   2e-06",
        "  error  1,234.5679",
        "  huge   1e+20",
        "  gone   not finite",
        "  no     0.0000",
        "for comparison",
        "  guess  0.5000",
    ]


def test_advice_after_a_nan_names_calls_that_divide_the_steps_that_are_left():
    def advice(saved):
        return non_finite_advice(NonFiniteError("x", "w", 9), 9, saved, total=24, steps_per_call=4)

    first = non_finite_advice(NonFiniteError("x", "w", 0), 0, 0, total=24, steps_per_call=4)
    assert first.startswith("step 1 was not applied: w is NaN or infinite. The run has no checkpoint yet.\n")
    batch = {"x": np.ones(2, np.float32), "y": np.array([np.nan, 1], np.float32), "label": np.ones(2, int)}
    of_data = non_finite_advice(NonFiniteError("x", "w", 9), 9, 8, total=24, steps_per_call=4, batch=batch)
    assert "is NaN or infinite. The data themselves are: look at batch['y'] of that step. The newest" in of_data
    assert "The data" not in advice(8)
    assert advice(8).endswith("leave such steps out with train.non_finite=skip.")
    assert advice(9).endswith(
        "with train.non_finite=skip and train.steps_per_call=3, as 4 does not divide the 15 steps that are left."
    )
