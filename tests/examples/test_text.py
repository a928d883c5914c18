"""The text task: rows, exact evaluation, the model's causality, options."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.models.transformer import Transformer
from examples.tasks import text
from jdist.tasks.options import OptionError
from tests.toys import state_of

SMALL = {"length": 16, "layers": 1, "width": 16, "heads": 2}


@pytest.fixture
def folder(tmp_path):
    for i in range(12):
        (tmp_path / f"file{i}.txt").write_text(f"number {i}: " + "the quick brown fox " * 8)
    return tmp_path


@pytest.fixture
def task(folder):
    return text.make(files=str(folder / "*.txt"), **SMALL)


def masked(batch, rows):
    tokens = batch["tokens"]
    padded = np.resize(tokens, (rows, *tokens.shape[1:]))
    return {"tokens": padded, "mask": np.arange(rows) < len(tokens)}


def test_training_rows_predict_each_byte_once():
    data = np.arange(100, 123, dtype=np.uint8)
    rows = text.training_rows(data, length=5)
    assert rows.shape == (4, 6)
    assert rows[0, 0] == text.BEGIN
    np.testing.assert_array_equal(rows[:, 1:].ravel(), data[:20])
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])


@pytest.mark.parametrize(("length", "scored"), [(8, 8), (8, 4), (8, 1), (6, 3)])
def test_evaluation_rows_score_each_byte_once_after_the_bytes_before_it(length, scored):
    data = np.arange(24, dtype=np.uint8)
    rows = text.evaluation_rows(data, length=length, scored=scored)
    np.testing.assert_array_equal(rows[:, -scored:].ravel(), data)
    stream = np.concatenate([np.full(length + 1, text.BEGIN), data])
    for i, row in enumerate(rows):
        end = length + 1 + (i + 1) * scored
        np.testing.assert_array_equal(row, stream[end - length - 1 : end])


def test_a_few_steps_lower_the_loss_below_the_uniform_model(task):
    state = state_of(task, optax.adam(1e-2))
    step, source = jax.jit(task.train_step), task.train_data(8, 0, None)
    losses = []
    for i in range(30):
        state, metrics = step(state, masked(source.batch_at(i), 8))
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(257), abs=0.2)
    assert losses[-1] < 0.6 * losses[0]
    assert float(metrics["bits_per_byte"]) == pytest.approx(losses[-1] / np.log(2), rel=1e-5)


def test_evaluation_is_the_mean_over_bytes_whatever_the_batches(task):
    state = state_of(task, optax.sgd(0.1))
    source = task.eval_data(1000)
    everything = source.batch_at(0)
    eval_step = jax.jit(task.eval_step)
    exact = eval_step(state, masked(everything, len(everything["tokens"])))
    total = rows = 0
    small = task.eval_data(7)
    for i in range(small.num_steps):
        batch = small.batch_at(i)
        count = len(batch["tokens"])
        total += count * float(eval_step(state, masked(batch, 7))["bits_per_byte"])
        rows += count
    assert total / rows == pytest.approx(float(exact["bits_per_byte"]), rel=1e-5)
    assert set(exact) == {"loss", "bits_per_byte", "accuracy"}


def test_model_and_baselines_see_the_same_bytes(folder):
    task = text.make(files=str(folder / "*.txt"), eval_bytes=100, **SMALL)
    rows = task.eval_data(1000).batch_at(0)["tokens"]
    assert rows.shape == (12, 17)  # 8 bytes are scored a row: 96 of the 100
    figures = task.baselines()
    assert set(figures) == {"order2_bits_per_byte", "zlib9_bits_per_byte"}
    assert 0 < figures["order2_bits_per_byte"] < 8


def test_the_model_does_not_look_ahead():
    model = Transformer(vocabulary=257, layers=2, width=16, heads=2)
    tokens = jnp.arange(10)[None]
    variables, apply = jax.jit(model.init)(jax.random.key(0), tokens), jax.jit(model.apply)
    logits = apply(variables, tokens)
    changed = apply(variables, tokens.at[0, 6].set(200))
    np.testing.assert_allclose(logits[:, :6], changed[:, :6], atol=1e-6)
    assert not np.allclose(logits[:, 6:], changed[:, 6:], atol=1e-3)


def test_the_model_knows_the_order_of_what_it_sees():
    model = Transformer(vocabulary=257, layers=2, width=16, heads=2)
    tokens = jnp.array([[1, 2, 3]])
    variables, apply = jax.jit(model.init)(jax.random.key(0), tokens), jax.jit(model.apply)
    one = apply(variables, tokens)[:, -1]
    other = apply(variables, tokens[:, [1, 0, 2]])[:, -1]
    assert not np.allclose(one, other, atol=1e-4)


def test_dropout_and_bfloat16_train_with_float32_parameters(folder):
    task = text.make(files=[str(folder / "*.txt")], dropout=0.5, dtype="bfloat16", **SMALL)
    state = state_of(task, optax.set_to_zero())
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    batch, step = masked(task.train_data(8, 0, 1).batch_at(0), 8), jax.jit(task.train_step)
    later, first = step(state, batch)
    _, second = step(later, batch)
    assert first["loss"].dtype == jnp.float32
    assert float(first["loss"]) != float(second["loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers: 0 is not >= 1"),
        ({"heads": 3}, "width: 16 is not a multiple of twice the heads, which are 3"),
        ({"dtype": "float16"}, "dtype: \"float16\" is not 'float32' or 'bfloat16'"),
        ({"eval_context": 16}, "eval_context: 16 is not less than length, which is 16"),
        ({"eval_bytes": 3}, "eval_bytes: there are 3 held-out bytes"),
        ({"length": 100_000}, "length: 100000 bytes a row are more than the"),
        ({"files": []}, "files: no patterns"),
        ({"files": 7}, "files: 7 is not text or a list"),
        ({"files": ["*.txt", 7]}, r"files\.1: 7 is not text"),
        ({"files": "nowhere/*.txt"}, r"files: the pattern 'nowhere/\*\.txt' matches no file"),
    ],
)
def test_wrong_options_are_named(folder, options, message):
    with pytest.raises(OptionError, match=rf"^task\.options\.{message}"):
        text.make(**({"files": str(folder / "*.txt"), **SMALL} | options))
