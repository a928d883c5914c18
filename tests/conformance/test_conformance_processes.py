"""multi_worker in real processes gives what one device gives: the same losses and parameters, on every process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jdist
from tests.conformance import metric_steps
from tests.conformance.families import FAMILIES, STEPS, Run
from tests.conformance.matrix import (
    MULTI_WORKER,
    OPTIMIZERS,
    OPTIONS,
    PRECISIONS,
    TOLERANCES_IN_16_BITS,
    all_cases,
    pairwise,
)

PROGRAM = Path(__file__).with_name("several_processes.py")

LAYOUTS = {"2x4": (2, 4), "4x1": (4, 1)}  # processes, devices of each
CHOSEN = sorted(pairwise(all_cases(MULTI_WORKER, FAMILIES)))
# A twelfth of them, shared out among the layouts: processes take long to start and to compile. `make conformance` runs all of
# them in each; the whole matrix would take hours, and runs in one process.
SHARED_OUT = {layout: CHOSEN[i :: 12 * len(LAYOUTS)] for i, layout in enumerate(LAYOUTS)}
IN_16_BITS = [("shard_map", "plain_pytree", "fp16", "sgd"), ("jit", "transformer", "bf16", "sgd")]
SHARED_OUT["2x4"].append(IN_16_BITS[0])
SHARED_OUT["2x4"].append(("sharded", "params_and_opt_state", "accumulate", "adam"))
SHARED_OUT["4x1"].append(("sharded", "gan", "steps_per_call", "sgd"))


@functools.cache
def trained(layout: str, cases: tuple[tuple[str, ...], ...], folder: Path) -> Path:
    """Where one launch, of all of the cases, has left what came of them."""
    processes, devices = LAYOUTS[layout]
    launched = jdist.launch(
        [str(PROGRAM), str(folder), *map("-".join, cases)],
        processes=processes,
        devices_per_process=devices,
        log_dir=folder / "logs",
    )
    assert launched.exit_code == 0, launched
    return folder


@functools.cache
def one_device(family: str, optimizer: str, accumulate: int, precision: Any = None, replicas: int = 1) -> Run:
    more = {"microbatches_of": replicas} if replicas > 1 else {}
    return FAMILIES[family](
        jdist.one_device(), OPTIMIZERS[optimizer](), accumulate=accumulate, precision=precision, **more
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}


def check(case: tuple[str, ...], folder: Path, layout: str) -> None:
    processes, devices = LAYOUTS[layout]
    strategy, family, option, optimizer = case
    options = {**OPTIONS, **PRECISIONS}[option]
    accumulate = options.get("accumulate", 1) if family == "cnn_synced_batchnorm" else 1
    precision = options.get("precision")
    together = processes * devices if accumulate > 1 and strategy != "jit" else 1
    expected = one_device(family, optimizer, accumulate, precision, together)
    for process in range(processes):
        found = np.load(folder / f"{'-'.join(case)}.{process}.npz")
        compilations, kept = found["facts"]
        assert (compilations, kept) == (0, 1)
        assert len(found["losses"]) == STEPS
        # The tolerances of test_conformance.py, for its reasons.
        losses, params = (2e-5 if optimizer == "sgd" else 2e-4, 1e-5)
        if precision is not None:
            losses, params = TOLERANCES_IN_16_BITS[precision.name]
        np.testing.assert_allclose(found["losses"], expected.losses, rtol=0, atol=losses)
        if optimizer == "sgd":
            for i, want in enumerate(jax.tree.leaves(expected.params)):
                np.testing.assert_allclose(found[f"arr_{i}"], want, rtol=0, atol=params)


# One worker of the test run takes all cases of a layout, as one launch runs them; the first waits for that.
CASES = [
    pytest.param(layout, case, marks=pytest.mark.xdist_group(layout), id="-".join((layout, *case)))
    for layout, cases in SHARED_OUT.items()
    for case in cases
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layout", "case"), CASES)
def test_equals_one_device(layout: str, case: tuple[str, ...], folders: dict[str, Path]):
    check(case, trained(layout, tuple(SHARED_OUT[layout]), folders[layout]), layout)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["shard_map", "jit"])
@pytest.mark.parametrize("layout", [pytest.param(layout, marks=pytest.mark.xdist_group(layout)) for layout in LAYOUTS])
def test_metrics_are_those_of_scikit_learn(layout: str, strategy: str, folders: dict[str, Path]):
    folder = trained(layout, tuple(SHARED_OUT[layout]), folders[layout])
    for process in range(LAYOUTS[layout][0]):
        found = np.load(folder / f"metrics-{strategy}.{process}.npz")
        metric_steps.check({name: found[name] for name in metric_steps.METRICS})


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_pairs(layout: str, tmp_path: Path):
    cases = (*CHOSEN, *IN_16_BITS)
    trained(layout, cases, tmp_path)
    for case in cases:
        check(case, tmp_path, layout)
