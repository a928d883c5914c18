"""The replica API in two real processes of two devices each; one launch, whose results the tests look at."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jdist

pytestmark = pytest.mark.xdist_group("multi_worker_api")
PROGRAM = Path(__file__).with_name("several_processes_api.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("api")
    launched = jdist.launch([str(PROGRAM), str(folder)], processes=2, devices_per_process=2, log_dir=folder / "logs")
    assert launched.exit_code == 0
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


def same(found: list[dict], name: str) -> object:
    assert found[0][name] == found[1][name]
    return found[0][name]


def test_it_says_what_it_is(found):
    assert same(found, "num_replicas") == 4
    assert "in 2 processes (this is number 1)" in found[1]["repr"]
    assert same(found, "same again") is True


def test_each_process_has_its_own_replicas(found):
    assert [each["local ids"] for each in found] == [[0, 1], [2, 3]]
    assert [each["made for"] for each in found] == [[0, 1], [2, 3]]
    assert [each["doubled here"] for each in found] == [[0.0, 20.0], [40.0, 60.0]]


def test_what_all_processes_bring_together(found):
    assert same(found, "sum of ids") == 6
    assert same(found, "gathered") == [0, 1, 2, 3]
    assert same(found, "of all") == [0.0, 10.0, 20.0, 30.0]
    assert same(found, "keys") == [float(jax.random.uniform(jax.random.key(i))) for i in range(4)]


def test_a_state_goes_out_and_comes_back(found):
    assert same(found, "fetched") == [0.0, 2.0, 4.0]
    assert same(found, "key") is True


def test_rows_of_a_short_batch_are_where_one_process_has_them(found):
    assert [each["rows"] for each in found] == [
        [[0.0, 1.0, 2.0, 3.0], [8.0, 9.0, 10.0, 11.0]],
        [[4.0, 5.0, 6.0, 7.0], [12.0, 13.0]],
    ]


def test_every_process_has_all_predictions(found):
    assert same(found, "predictions") == [[10.0 * x for x in range(8)], [10.0 * x for x in range(8, 14)]]
    assert same(found, "by hand") == [10.0 * x for x in range(8)]


def test_it_trains_as_one_device_does(found):
    w, losses = 1.0, []
    for x in (np.arange(8.0), np.arange(8.0, 14.0)):
        losses.append(float(np.mean((x * w) ** 2)))
        w -= 0.1 * float(np.mean(2 * x * x * w))
    np.testing.assert_allclose(same(found, "losses"), losses, rtol=1e-6)
    np.testing.assert_allclose(same(found, "w"), w, rtol=1e-6)


def test_replicas_of_other_processes_that_differ_are_named(found):
    assert same(found, "diverged") == [[0, 1, 2, 3]]


def test_a_gradient_that_is_not_finite_stops_all(found):
    assert same(found, "not finite at") == 2  # after the two steps over the dataset
