"""The digits task: the split, the shift, the step, and what it learns in a short run."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist.errors import ConfigError
from jdist.support.signature import show
from jdist.tasks import digits
from jdist.tasks.options import OptionError

pytestmark = pytest.mark.xdist_group(__name__)  # they share the task and its steps


@pytest.fixture(scope="module")
def task():
    return digits.make(width=8)


@pytest.fixture(scope="module")
def start(task):
    return jax.jit(lambda key: task.create_state(key, optax.adam(3e-3)))(jax.random.key(0))


@pytest.fixture(scope="module")
def train_step(task):
    return jax.jit(task.train_step)


@pytest.fixture(scope="module")
def eval_step(task):
    step = jax.jit(task.eval_step)
    return lambda state, batch: step(state, {"mask": np.ones(len(batch["label"]), bool), **batch})


def masked(batch, rows):
    """`batch` as a dataset hands it out: padded to `rows` with copies of real rows, and a mask."""
    count = len(batch["label"])
    padded = {name: np.resize(leaf, (rows, *leaf.shape[1:])) for name, leaf in batch.items()}
    return {**padded, "mask": np.arange(rows) < count}


def test_the_split_is_fixed_stratified_and_without_overlap():
    train, test = digits.load_split()
    again, _ = digits.load_split()
    np.testing.assert_array_equal(train["label"], again["label"])
    assert train["image"].shape == (1437, 8, 8, 1)
    assert test["image"].shape == (360, 8, 8, 1)
    assert train["image"].dtype == np.float32
    assert (train["image"].min(), train["image"].max()) == (0.0, 1.0)
    np.testing.assert_allclose(np.bincount(train["label"]) / 1437, np.bincount(test["label"]) / 360, atol=1 / 360)
    pictures = {image.tobytes() for image in train["image"]}
    assert not pictures.intersection(image.tobytes() for image in test["image"])


def test_batches_have_the_documented_shapes_and_cover_every_row_once(task):
    source = task.train_data(100, 0, 1)
    assert source.num_steps == 15
    batch = source.batch_at(0)
    assert (batch["image"].shape, batch["label"].shape) == ((100, 8, 8, 1), (100,))
    assert batch["label"].dtype == np.int32
    assert sum(len(task.eval_data(64).batch_at(i)["label"]) for i in range(6)) == 360


def test_a_short_run_learns(task, start, train_step, eval_step):
    state, source, losses = start, task.train_data(64, 0, None), []
    for i in range(150):
        state, metrics = train_step(state, masked(source.batch_at(i), 64))
        losses.append(float(metrics["loss"]))
    assert int(state.step) == 150
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) / 2
    test = task.eval_data(360).batch_at(0)
    metrics = [eval_step(state, {k: v[i : i + 60] for k, v in test.items()}) for i in range(0, 360, 60)]
    assert set(metrics[0]) == {"loss", "accuracy"}
    assert np.mean([m["accuracy"] for m in metrics]) > 0.9


def test_padding_changes_no_metric(task, start, eval_step):
    batch = task.eval_data(20).batch_at(0)
    exact = eval_step(start, {k: np.concatenate([v, v, v]) for k, v in batch.items()})
    padded = eval_step(start, masked(batch, 60))
    for name, value in exact.items():
        np.testing.assert_allclose(padded[name], value, rtol=1e-6)


def test_dropout_and_shift_differ_from_step_to_step(task, start, train_step):
    batch = masked(task.train_data(64, 0, 1).batch_at(0), 64)
    losses = [float(train_step(start.replace(step=np.int32(step)), batch)[1]["loss"]) for step in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_random_shift_moves_pixels_and_loses_none_that_stay_inside():
    images = jnp.zeros((64, 8, 8, 1)).at[:, 4, 4].set(1.0)
    moved = digits.random_shift(jax.random.key(0), images, most=2)
    np.testing.assert_array_equal(moved.sum(axis=(1, 2, 3)), 1.0)
    rows, columns = np.argwhere(np.asarray(moved)[..., 0])[:, 1:].T
    assert (rows.min(), rows.max()) == (2, 6)
    assert (columns.min(), columns.max()) == (2, 6)
    assert digits.random_shift(jax.random.key(0), images, most=0) is images


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("width", 0, ">= 1"),
        ("width", 1.5, "a whole number"),
        ("dropout", 1.0, "< 1"),
        ("dropout", "x", "a number"),
        ("shift", -1, ">= 0"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_value(option, value, allowed):
    with pytest.raises(OptionError, match=rf"^task\.options\.{option}: {show(value)} is not {allowed}"):
        digits.make(**{option: value})


def test_without_scikit_learn_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'jdist\[examples\]'"):
        digits.make()
