"""A state in parts over two real processes of two devices each: one launch, whose results the tests look at."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jdist
from jdist.checkpoint.checkpointer import Checkpointer
from jdist.checkpoint.leaves import boxes_of_elements
from tests.sharded_state import toy

pytestmark = pytest.mark.xdist_group("sharded_processes")
PROGRAM = Path(__file__).with_name("several_processes.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    launched = jdist.launch([str(PROGRAM), str(folder)], processes=2, devices_per_process=2, log_dir=folder / "logs")
    assert launched.exit_code == 0
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


@pytest.fixture(scope="module")
def expected():
    state, losses = toy.trained(jdist.one_device())
    return jdist.one_device().fetch(state), losses


def test_they_train_as_one_device_does_and_fetch_all_of_it(found, expected):
    want, losses = expected
    for each in found:
        np.testing.assert_allclose(each["losses"], losses, rtol=2e-6)
        for a, b in zip(each["params"], jax.tree.leaves(want.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_replicas_of_two_devices_train_as_one_device_does(found, expected):
    want, losses = expected
    for each in (one["of two"] for one in found):
        np.testing.assert_allclose(each["losses"], losses, rtol=2e-6)
        for a, b in zip(each["params"], jax.tree.leaves(want.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
        assert each["restored"]
        assert "2 replicas of 2 devices each in 2 processes" in each["description"]


def test_a_checkpoint_holds_the_parts_of_all(found, folder, expected):
    assert [each["restored"] for each in found] == [True, True]
    strategy = jdist.one_device()
    with Checkpointer(folder / "checkpoints") as checkpointer:
        state = strategy.fetch(checkpointer.restore(strategy.init(toy.create)).state)
    for a, b in zip(*map(jax.tree.leaves, (state, expected[0])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_a_function_on_the_replicas_gets_whole_arrays(found, expected):
    norms = [float((x**2).sum()) for x in jax.tree.leaves(expected[0].params)]
    for each in found:
        np.testing.assert_allclose(each["run"], [norms] * 2, rtol=1e-4)


def test_large_parts_are_summed_rightly(found):
    assert [each["wrong of large parts"] for each in found] == [0, 0]
    for each in found:  # wrong sums are a matter of chance, what makes them is not
        assert ("reduce-scatter" in each["kinds"]) != each["taken for wrong"]


def test_a_process_alone_cannot_read_an_array_in_parts(found):
    assert "Call `strategy.fetch(x)` on all of them" in found[1]["read alone"]


@pytest.mark.parametrize(("shape", "first", "size"), [((7,), 2, 3), ((3, 4), 2, 9), ((3, 4), 5, 2), ((2, 3, 4), 7, 16)])
def test_successive_elements_as_boxes(shape, first, size):
    array = np.full(shape, -1)
    for start, values in boxes_of_elements(shape, first, np.arange(size)):
        array[tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))] = values
    want = np.full(array.size, -1)
    want[first : first + size] = np.arange(size)
    np.testing.assert_array_equal(array, want.reshape(shape))
