"""Every strategy gives what one device gives: the same parameters, the same losses, in one compilation."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

import jdist
from tests.by_default import some
from tests.conformance import metric_steps
from tests.conformance.families import FAMILIES, STEPS, Run
from tests.conformance.matrix import (
    ALGORITHMS,
    COMPRESSED,
    OPTIMIZERS,
    OPTIONS,
    PRECISION_CASES,
    PRECISIONS,
    STRATEGIES,
    TOLERANCES_IN_16_BITS,
    all_cases,
    close_servers,
    is_light,
    pairwise,
)
from tests.loop import loop_programs

ALL = all_cases(STRATEGIES, FAMILIES)
IN_16_BITS = all_cases(STRATEGIES, FAMILIES, PRECISIONS)
CHOSEN = set(pairwise([case for case in ALL if is_light(case)]))


def marks(strategy: str, shared: str, *, always: bool) -> list[pytest.MarkDecorator]:
    """Of a case: whether it always runs; and which share servers, or what one device gives, and so run in one process."""
    group = pytest.mark.xdist_group("conformance_servers" if "server" in strategy else f"conformance_{shared}")
    return [group] if always else [group, pytest.mark.full]


def test_the_chosen_part_of_the_matrix_holds_every_pair():
    assert 6 * 6 <= len(CHOSEN) < len(ALL) / 4


@pytest.fixture(scope="module", autouse=True)
def servers_end():
    yield
    close_servers()


@functools.cache
def one_device(family: str, optimizer: str, accumulate: int, precision: Any = None, replicas: int = 1) -> Run:
    more = {"microbatches_of": replicas} if replicas > 1 else {}
    return FAMILIES[family](
        jdist.one_device(), OPTIMIZERS[optimizer](), accumulate=accumulate, precision=precision, **more
    )


def met_together(strategy: jdist.Strategy, family: str, accumulate: int) -> int:
    """How many replicas' rows a named axis of the model brings together in each microbatch."""
    by_axis = family == "cnn_synced_batchnorm" and accumulate > 1 and strategy.transform != "jit"
    return strategy.num_replicas if by_axis else 1


def compare(run: Run, expected: Run, losses: float, params: float | None, record_property: Any) -> None:
    """Compares losses and parameters by these tolerances, and records the largest differences for `--junitxml`.

    Under Adam `params` is None: it divides by the size of the gradient, so rounding in a parameter without gradient (a bias
    before a normalisation) grows without bound; the losses do not depend on such parameters.
    """
    record_property("losses", float(np.max(np.abs(np.subtract(run.losses, expected.losses)))))
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=losses)
    if params is not None:
        pairs = list(zip(jax.tree.leaves(run.params), jax.tree.leaves(expected.params), strict=True))
        record_property("params", max(float(np.max(np.abs(np.subtract(got, want)))) for got, want in pairs))
        for got, want in pairs:
            np.testing.assert_allclose(got, want, rtol=0, atol=params)


@pytest.mark.parametrize(
    ("strategy", "family", "option", "optimizer"),
    [pytest.param(*case, marks=marks(*case[:2], always=case in CHOSEN), id="-".join(case)) for case in ALL],
)
def test_equals_one_device(strategy: str, family: str, option: str, optimizer: str, record_property: Any):
    options = OPTIONS[option]
    made = STRATEGIES[strategy]()
    run = FAMILIES[family](made, OPTIMIZERS[optimizer](), **options)
    # Batch statistics are those of a microbatch, so a model that has them is compared at the same accumulation.
    same_statistics = options.get("accumulate", 1) if family == "cnn_synced_batchnorm" else 1
    expected = one_device(family, optimizer, same_statistics, None, met_together(made, family, same_statistics))

    assert len(run.losses) == STEPS
    assert run.compilations_after_first_call == 0
    assert run.shardings_kept
    assert np.ptp(expected.losses) > 1e-2  # it moves, so equality means something
    losses, params = COMPRESSED.get(strategy, (2e-5 if optimizer == "sgd" else 2e-4, 1e-5))
    compare(run, expected, losses, params if optimizer == "sgd" else None, record_property)


# A named axis inside the model sees one microbatch: the exception to the law.
BY_LAW = sorted(set(FAMILIES) - {"cnn_synced_batchnorm"})


@pytest.mark.parametrize("family", some(BY_LAW, ["gan", "nnx_mlp"]))
def test_half_the_devices_and_twice_the_microbatches_train_the_same(family: str, record_property: Any):
    sgd = OPTIMIZERS["sgd"]
    four = FAMILIES[family](jdist.mirrored([f"cpu:{i}" for i in range(4)]), sgd())
    two = FAMILIES[family](jdist.mirrored(["cpu:0", "cpu:1"]), sgd(), accumulate=2)
    compare(two, four, 2e-5, 1e-5, record_property)


@pytest.mark.parametrize(
    ("strategy", "family", "option", "optimizer"),
    [
        pytest.param(*case, marks=marks(*case[:2], always=case in PRECISION_CASES), id="-".join(case))
        for case in IN_16_BITS
    ],
)
def test_equals_one_device_in_16_bits(strategy: str, family: str, option: str, optimizer: str, record_property: Any):
    options = PRECISIONS[option]
    made, accumulate = STRATEGIES[strategy](), options.get("accumulate", 1)
    run = FAMILIES[family](made, OPTIMIZERS[optimizer](), **options)
    together = met_together(made, family, accumulate)
    expected = one_device(family, optimizer, accumulate, options["precision"], together)

    assert len(run.losses) == STEPS
    assert run.compilations_after_first_call == 0
    assert run.shardings_kept
    assert {leaf.dtype for leaf in jax.tree.leaves(run.params)} == {np.dtype("float32")}
    # What a compressed all-reduce rounds comes on top of what 16 bits do.
    losses, params = np.add(TOLERANCES_IN_16_BITS[options["precision"].name], COMPRESSED.get(strategy, (0, 0)))
    compare(run, expected, losses, params if optimizer == "sgd" else None, record_property)


METRICS = list(itertools.product(STRATEGIES, ("evaluation", *OPTIONS)))


def always_runs(strategy: str, option: str) -> bool:
    """Every strategy evaluates; those that step in a way of their own also train, with what changes that most."""
    of_its_own = strategy not in ALGORITHMS or strategy.startswith("parameter_server")
    return option == "evaluation" or (option == "accumulate_and_steps_per_call" and of_its_own)


@pytest.mark.parametrize(
    ("strategy", "option"),
    [
        pytest.param(*case, marks=marks(case[0], case[0], always=always_runs(*case)), id="-".join(case))
        for case in METRICS
    ],
)
def test_metrics_are_those_of_scikit_learn(strategy: str, option: str):
    made = STRATEGIES[strategy]()
    if option == "evaluation":
        metric_steps.check(metric_steps.evaluated(made))
    else:
        metric_steps.check(metric_steps.trained(made, OPTIONS[option]))


def fit_evaluate_and_predict(made: jdist.Strategy) -> tuple[list[float], list[float], np.ndarray, np.ndarray]:
    state, history = jdist.fit(
        loop_programs.train_step,
        made.init(loop_programs.create_state),
        loop_programs.DATA,
        strategy=made,
        epochs=2,
        global_batch=16,
        shuffle_seed=0,
        eval_data=loop_programs.HELD_OUT,
        eval_step=loop_programs.eval_step,
        progress=False,
        log_to=None,
    )
    data = {"strategy": made, "global_batch": 16}
    rows = jdist.predict(loop_programs.predict_step, state, loop_programs.DATA, **data)
    np.testing.assert_array_equal(rows["y"], loop_programs.DATA["y"])
    evaluated = jdist.evaluate(loop_programs.eval_step, state, loop_programs.HELD_OUT, **data)["loss"]
    assert evaluated == pytest.approx(history.evals[-1]["loss"], rel=1e-6)
    means = [row["loss"] for row in history.epochs]
    return means, [row["loss"] for row in history.evals], rows["predicted"], made.fetch(state).params["w"]


@pytest.fixture(scope="module")
def fitted_on_one_device() -> tuple[list[float], list[float], np.ndarray, np.ndarray]:
    return fit_evaluate_and_predict(jdist.one_device())


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(s, marks=marks(s, s, always=s not in ALGORITHMS or "server" in s)) for s in STRATEGIES],
)
def test_fit_evaluate_and_predict_are_those_of_one_device(strategy: str, fitted_on_one_device: Any):
    """Of a data set whose last batch is short: training, the means of each epoch, an evaluation, and predictions."""
    losses, params = COMPRESSED.get(strategy, (2e-5, 1e-5))
    found, tolerances = fit_evaluate_and_predict(STRATEGIES[strategy]()), (losses, losses, 10 * params, params)
    for got, want, atol in zip(found, fitted_on_one_device, tolerances, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)
