"""The arrays task: kinds, standardisation, the split, and what a file must hold."""

import jax
import numpy as np
import optax
import pytest

from jdist.errors import ConfigError
from jdist.tasks import arrays
from jdist.tasks.options import OptionError
from tests.toys import state_of


def save(tmp_path, **values):
    path = tmp_path / "data.npz"
    np.savez(path, **values)
    return str(path)


def load(path, **changes):
    options = {"kind": None, "standardise": True, "held_out": 0.2, "split_seed": 0}
    return arrays.load(path, **(options | changes))


def example(rows=50):
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, 5.0, (rows, 4))
    return x, x @ np.array([1.0, -2.0, 0.5, 0.0]) + 100.0


def train(task, *, rows, steps):
    source = task.train_data(rows, 0, None)
    state, step = state_of(task, optax.adam(5e-2)), jax.jit(task.train_step)
    for i in range(steps):
        batch = source.batch_at(i)
        state, _ = step(state, {**batch, "mask": np.ones(len(batch["x"]), bool)})
    batch = task.eval_data(1000).batch_at(0)
    return jax.jit(task.eval_step)(state, {**batch, "mask": np.ones(len(batch["x"]), bool)})


def test_a_linear_model_solves_linear_regression_in_units_of_y(tmp_path):
    x, y = example()
    task = arrays.make(path=save(tmp_path, x=x, y=y))
    metrics = train(task, rows=40, steps=300)
    assert set(metrics) == {"loss", "mean_absolute_error"}
    assert float(metrics["mean_absolute_error"]) < 0.1
    constant = task.baselines()["constant_mean_absolute_error"]
    _, rest = load(save(tmp_path, x=x, y=y)).train, load(save(tmp_path, x=x, y=y)).test
    assert constant > 5.0
    assert len(rest["y"]) == 10


def test_an_mlp_learns_what_no_linear_model_can(tmp_path):
    x = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    path = save(tmp_path, x=x, y=y)
    linear = train(arrays.make(path=path), rows=160, steps=150)
    mlp = train(arrays.make(path=path, hidden=[32], dropout=0.1), rows=160, steps=150)
    assert set(mlp) == {"loss", "accuracy"}
    assert float(mlp["accuracy"]) > 0.85 > float(linear["accuracy"])


def test_the_kind_follows_the_dtype_unless_it_is_given(tmp_path):
    x = np.zeros((10, 3))
    whole = np.arange(10) % 2
    assert load(save(tmp_path, x=x, y=whole)).train["y"].dtype == np.int32
    assert load(save(tmp_path, x=x, y=whole), kind="regression").train["y"].shape == (8, 1)
    assert load(save(tmp_path, x=x, y=whole.astype(float))).classes is None
    assert load(save(tmp_path, x=x, y=whole.astype(float)), kind="classification").outputs == 2
    assert load(save(tmp_path, x=x, y=whole.astype(bool))).outputs == 2


def test_classes_may_be_any_numbers_or_strings(tmp_path):
    x = np.zeros((6, 1))
    data = load(save(tmp_path, x=x, y=np.array(["cat", "dog", "emu"] * 2)))
    assert data.classes.tolist() == ["cat", "dog", "emu"]
    data = load(save(tmp_path, x=x, y=np.array([-5, 70, 900] * 2)))
    assert data.classes.tolist() == [-5, 70, 900]
    assert set(np.concatenate([data.train["y"], data.test["y"]])) == {0, 1, 2}


def test_the_training_rows_alone_set_the_scale(tmp_path):
    x, y = example()
    data = load(save(tmp_path, x=x, y=y))
    np.testing.assert_allclose(data.train["x"].mean(axis=0), 0.0, atol=1e-6)
    np.testing.assert_allclose(data.train["x"].std(axis=0), 1.0, rtol=1e-5)
    assert np.abs(data.test["x"].mean(axis=0)).max() > 1e-3
    raw = load(save(tmp_path, x=x, y=y), standardise=False)
    scale = data.y_scale[0]
    np.testing.assert_allclose(data.train["y"] * scale + raw.train["y"].mean(), raw.train["y"], rtol=1e-4)


def test_a_constant_column_becomes_zero_and_not_nan(tmp_path):
    x = np.stack([np.full(10, 7.0), np.arange(10.0)], axis=1)
    data = load(save(tmp_path, x=x, y=np.arange(10.0)))
    np.testing.assert_array_equal(data.train["x"][:, 0], 0.0)


def test_the_split_is_fixed_by_its_seed_and_covers_every_row(tmp_path):
    path = save(tmp_path, x=np.arange(20.0), y=np.arange(20.0))
    one, same, other = (load(path, standardise=False, split_seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.test["x"], same.test["x"])
    assert one.test["x"].tolist() != other.test["x"].tolist()
    both = np.concatenate([one.train["x"], one.test["x"]]).ravel()
    np.testing.assert_array_equal(np.sort(both), np.arange(20.0))


def test_the_constant_accuracy_is_that_of_the_commonest_class(tmp_path):
    data = load(save(tmp_path, x=np.zeros((10, 1)), y=np.array([0] * 9 + [1])))
    assert arrays.constant_score(data) == float(np.mean(data.test["y"] == 0))


NAN = np.ones((10, 3))
NAN[4, 2] = np.nan


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": np.ones((4, 2))}, "has no array y; it holds x"),
        ({"a": np.ones(3)}, "has no array x and no array y; it holds a"),
        ({"x": np.ones((4, 2)), "y": np.ones(5)}, r"x has shape \(4, 2\) and y has shape \(5,\)"),
        ({"x": np.ones((1, 2)), "y": np.ones(1)}, "at least 2 rows"),
        ({"x": NAN, "y": np.arange(10.0)}, "x holds 1 value.* first in row 4, column 2"),
        ({"x": np.ones((3, 1)), "y": np.array([0.0, np.inf, 1.0])}, "y holds 1 value.* first in row 1"),
        ({"x": np.array(["a", "b"]), "y": np.arange(2.0)}, "x has dtype <U1"),
        ({"x": np.ones((30, 1)), "y": np.arange(30)}, "30 different whole numbers in 30 rows"),
        ({"x": np.ones((4, 1)), "y": np.zeros(4, int)}, "one class only"),
        ({"x": np.ones((4, 1)), "y": np.zeros((4, 2), int)}, r"y has shape \(4, 2\)"),
        ({"x": np.array([{}, {}]), "y": np.arange(2.0)}, "not an intact .npz file of plain arrays"),
    ],
)
def test_arrays_that_do_not_serve_are_named(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        load(save(tmp_path, **values))


def test_numbers_that_are_not_whole_name_no_classes(tmp_path):
    path = save(tmp_path, x=np.ones((4, 1)), y=np.array([0.5, 1.0, 2.0, 3.0]))
    with pytest.raises(ConfigError, match="not whole"):
        load(path, kind="classification")


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_npz_is_named(tmp_path, content):
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.npz"):
        load(str(path))


def test_a_missing_file_and_a_single_array_are_named(tmp_path):
    with pytest.raises(ConfigError, match=rf"the file {tmp_path}/absent\.npz does not exist\.$"):
        load(str(tmp_path / "absent.npz"))
    np.save(tmp_path / "single.npy", np.ones(3))
    with pytest.raises(ConfigError, match=r"single\.npy holds a single array"):
        load(str(tmp_path / "single.npy"))


def test_only_a_file_with_a_near_name_is_suggested(tmp_path):
    for name in ("diabetes.npz", "cancer.npz", "diabets.csv"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"diabets\.npz does not exist\. Did you mean {tmp_path}/diabetes\.npz\?$"):
        load(str(tmp_path / "diabets.npz"))
    # The ending, which all names share, does not count.
    with pytest.raises(ConfigError, match=r"digits\.npz does not exist\.$"):
        load(str(tmp_path / "digits.npz"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "clustering"}, "kind: \"clustering\" is not 'classification' or 'regression'"),
        ({"hidden": [8, 0]}, r"hidden\.1: 0 is not >= 1"),
        ({"held_out": 0}, "held_out: 0 is not > 0"),
        ({"held_out": 1.0}, r"held_out: 1\.0 is not < 1"),
        ({"standardise": "yes"}, 'standardise: "yes" is not true or false'),
        ({"path": ""}, 'path: "" is not at least 1 visible character'),
        ({"path": __file__}, r"path: .* is not an intact \.npz file"),
    ],
)
def test_wrong_options_are_named(tmp_path, options, message):
    x, y = example()
    with pytest.raises(OptionError, match=rf"^task\.options\.{message}"):
        arrays.make(**({"path": save(tmp_path, x=x, y=y)} | options))
