"""Batches whose rows are not on the first axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jdist
from jdist.data.batch_axis import axes_of_leaves, rows_first, rows_in_place
from jdist.errors import BatchError, DatasetError, StepError
from tests.toys import TWO, every_of_one_process

EVERY = every_of_one_process()
AXES = {"x": 1, "y": 0}
RNG = np.random.default_rng(0)
BATCHES = [  # x is [time, rows, features]; the last batch is short
    {"x": RNG.normal(size=(5, rows, 3)).astype(np.float32), "y": RNG.normal(size=rows).astype(np.float32)}
    for rows in (16, 16, 13)
]


def step(w, batch):
    def loss_fn(w):
        sums = (batch["x"] @ w).sum(0)  # over time
        return jdist.mean((sums - batch["y"]) ** 2, batch["mask"]), sums

    (loss, sums), grads = jdist.value_and_grad(loss_fn, has_aux=True)(w)
    return w - 0.01 * grads, {"loss": loss}, sums


RETURNS = {"returns": ("state", "metrics", "examples")}


def by_hand():
    w, found = jnp.ones(3), []
    for batch in BATCHES:
        w, metrics, sums = step(w, {**batch, "mask": np.ones(len(batch["y"]), bool)})
        found.append((float(metrics["loss"]), np.asarray(sums)))
    return np.asarray(w), found


def check(w, found):
    expected_w, expected = by_hand()
    np.testing.assert_allclose(np.asarray(w), expected_w, rtol=1e-4)
    for (loss, sums), (expected_loss, expected_sums) in zip(found, expected, strict=True):
        assert float(loss) == pytest.approx(expected_loss, rel=1e-4)
        np.testing.assert_allclose(np.asarray(sums), expected_sums, rtol=1e-3, atol=1e-4)


@pytest.fixture(params=EVERY)
def strategy(request):
    return EVERY[request.param]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_a_dataset_and_a_step(strategy, options):
    dataset = strategy.distribute_dataset(BATCHES, batch_axis=AXES)
    run = jdist.distribute(step, strategy, batch_axis=AXES, **RETURNS, **options)
    w, found = strategy.init(lambda: jnp.ones(3)), []
    for batch in dataset:
        assert (batch["x"].shape, batch["y"].shape, batch["mask"].shape) == ((5, 16, 3), (16,), (16,))
        w, metrics, sums = run(w, batch)
        found.append((metrics["loss"], sums))
    check(strategy.fetch(w), found)
    assert dataset.element_spec["x"].shape == (5, 16, 3)


def test_where_the_rows_lie():
    (batch,) = TWO.distribute_dataset(BATCHES[:1], batch_axis=AXES)
    assert batch["x"].sharding.spec == PartitionSpec(None, ("replica",))
    assert batch["x"].addressable_shards[0].data.shape == (5, 8, 3)
    np.testing.assert_array_equal(np.asarray(batch["x"]), BATCHES[0]["x"])
    spec = TWO.distribute_dataset(BATCHES[:1], batch_axis=AXES).element_spec
    assert spec["x"].sharding == batch["x"].sharding


def test_a_step_of_batches_from_elsewhere(strategy):
    run = jdist.distribute(step, strategy, batch_axis=AXES, **RETURNS)
    w, found = jnp.ones(3), []
    for batch in BATCHES[:2]:
        w, metrics, sums = run(w, {**batch, "mask": np.ones(16, bool)})
        found.append((metrics["loss"], sums))
    for (loss, sums), (expected_loss, expected_sums) in zip(found, by_hand()[1], strict=False):
        assert float(loss) == pytest.approx(expected_loss, rel=1e-4)
        np.testing.assert_allclose(np.asarray(sums), expected_sums, rtol=1e-3, atol=1e-4)


def test_no_collective_moves_the_batch():
    run = jdist.distribute(step, TWO, batch_axis=AXES, **RETURNS)
    lowered = run.lower(jnp.ones(3), {**BATCHES[0], "mask": np.ones(16, bool)})
    text = lowered.compile().as_text()
    assert "all-to-all" not in text
    assert "all-gather" not in text


def test_several_steps_a_call(strategy):
    def without_rows(w, batch):
        w, metrics, _ = step(w, batch)
        return w, metrics

    run = jdist.distribute(without_rows, strategy, batch_axis=AXES, steps_per_call=3)
    (batch,) = strategy.distribute_dataset(BATCHES, batch_axis=AXES, steps_per_call=3)
    assert batch["x"].shape == (3, 5, 16, 3)
    w, metrics = run(strategy.init(lambda: jnp.ones(3)), batch)
    expected_w, expected = by_hand()
    np.testing.assert_allclose(np.asarray(strategy.fetch(w)), expected_w, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(metrics["loss"]), [loss for loss, _ in expected], rtol=1e-4)


def test_one_axis_for_all_with_the_mask_in_the_batch_or_next_to_it(strategy):
    """The mask has an entry a row; a leaf of that name, of [time, rows], lies as the other leaves do."""
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    tokens = np.array([[1, 1, 0, 1, 1], [1, 0, 0, 1, 1]], np.float32)

    def mean_of(x, weights):
        return {"mean": jdist.mean(x, jnp.broadcast_to(weights, x.shape))}

    def with_leaf(w, batch):
        return w, mean_of(batch["x"], batch["mask"]), batch["x"].sum(0)

    def with_pair(w, pair):
        batch, real = pair
        return w, mean_of(batch["x"], batch["mask"] * real), batch["x"].sum(0)

    for step, given, with_mask, expected in (
        (with_leaf, {"x": x}, False, 4.5),
        (with_pair, {"x": x, "mask": tokens}, True, float((x * tokens).sum() / tokens.sum())),
    ):
        run = jdist.distribute(step, strategy, batch_axis=1, **RETURNS)
        for batch in strategy.distribute_dataset([given], batch_axis=1, with_mask=with_mask):
            _, metrics, sums = run(0.0, batch)
            assert float(metrics["mean"]) == pytest.approx(expected)
            np.testing.assert_array_equal(np.asarray(sums), x.sum(0))


def test_two_batches_each_with_its_axis(strategy):
    run = jdist.distribute(
        lambda w, a, b: (w, {"x": (a.mean(1) * b).mean()}),
        strategy,
        args=("state", "batch", "batch"),
        batch_axis=(0, 2),
    )
    _, metrics = run(0.0, np.ones((8, 3), np.float32), np.full((1, 2, 8), 2.0, np.float32))
    assert float(metrics["x"]) == 2.0


def test_a_function_that_makes_datasets(strategy):
    each = 16 // strategy.num_replicas

    def fn(context):
        return [{"x": BATCHES[0]["x"][:, i : i + each]} for i in range(0, 16, each)]

    (batch,) = strategy.distribute_datasets_from_function(fn, batch_axis=1)
    np.testing.assert_array_equal(np.asarray(batch["x"]), BATCHES[0]["x"])


def test_an_iterator_is_read_on():
    dataset = TWO.distribute_dataset(iter(BATCHES), batch_axis=AXES)
    for _ in dataset:
        break
    assert len(list(dataset)) == 2


def test_nnx():
    from flax import nnx

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    @jdist.nnx.distribute(TWO, batch_axis=1)
    def run(model, x):
        assert x.shape == (5, 8, 3)
        return (model(x) ** 2).mean()

    expected = float((model(BATCHES[0]["x"]) ** 2).mean())
    assert float(run(model, BATCHES[0]["x"])) == pytest.approx(expected, rel=1e-5)


def test_fit_evaluate_and_predict():
    def without_rows(w, batch):
        w, metrics, _ = step(w, batch)
        return w, metrics

    train = jdist.distribute(without_rows, TWO, batch_axis=AXES)
    evaluate = jdist.distribute(lambda w, b: without_rows(w, b)[1], TWO, batch_axis=AXES, returns="metrics")
    predict = jdist.distribute(lambda w, b: (b["x"] @ w).sum(0), TWO, batch_axis=AXES, returns="examples")
    w, _ = jdist.fit(train, jnp.ones(3), BATCHES, eval_step=evaluate, eval_data=BATCHES, progress=False, log_to=None)
    expected, _ = by_hand()
    np.testing.assert_allclose(np.asarray(w), expected, rtol=1e-4)
    found = jdist.predict(predict, w, BATCHES)
    np.testing.assert_allclose(
        found, np.concatenate([(b["x"] @ expected).sum(0) for b in BATCHES]), rtol=1e-3, atol=1e-4
    )
    errors = [(b["x"] @ expected).sum(0) - b["y"] for b in BATCHES]
    measured = jdist.evaluate(evaluate, w, BATCHES)
    assert measured["loss"] == pytest.approx(float((np.concatenate(errors) ** 2).mean()), rel=1e-3)


class TestRefused:
    @pytest.mark.parametrize("axis", [-1, 1.0, True, None, {"x": "a"}])
    def test_what_is_no_axis(self, axis):
        with pytest.raises(StepError, match=r"`batch_axis` has .*must be an integer of at least 0"):
            jdist.distribute(step, TWO, batch_axis=axis)
        with pytest.raises(DatasetError, match=r"`batch_axis` has .*must be an integer of at least 0"):
            TWO.distribute_dataset(BATCHES, batch_axis=axis)

    @pytest.mark.parametrize(
        ("axis", "batch", "message"),
        [
            (1, BATCHES[0], r"\['y'\] has shape \(16,\), and its rows should be on axis 1.*in_axes"),
            ({"x": 1}, BATCHES[0], "`batch_axis` is .*does not fit the tree of the batch"),
            (AXES, BATCHES[2], "a batch of 13 rows does not divide by 2"),
        ],
    )
    def test_a_batch_with_other_rows(self, axis, batch, message):
        with pytest.raises(BatchError, match=message):
            jdist.distribute(step, TWO, batch_axis=axis)(0.0, batch)

    def test_an_axis_for_one_of_two_batches(self):
        two = jdist.distribute(lambda w, a, b: (w, {}), TWO, args=("state", "batch", "batch"), batch_axis=(1,))
        with pytest.raises(BatchError, match=r"takes 2 batches: give an axis for all, or a tuple with one for each"):
            two(0.0, BATCHES[0]["x"], BATCHES[0]["x"])

    def test_a_dataset_with_its_rows_elsewhere(self):
        (batch,) = TWO.distribute_dataset([{"x": np.ones((4, 4, 4), np.float32)}])
        run = jdist.distribute(lambda w, b: (w, {}), TWO, batch_axis={"x": 2})
        with pytest.raises(
            BatchError, match=r"rows on axis 0 of it, where the step has them on axis 2\. .*`batch_axis`"
        ):
            run(0.0, batch)
        (batch,) = TWO.distribute_dataset([{"x": np.ones((4, 4, 4), np.float32)}], batch_axis=1)
        with pytest.raises(BatchError, match="and the same `batch_axis`"):
            jdist.distribute(lambda w, b: (w, {}), TWO)(0.0, batch)

    def test_a_source_that_cuts_rows_itself(self):
        source = jdist.data.from_arrays({"x": np.ones((4, 4))}, global_batch=2)
        with pytest.raises(DatasetError, match="takes rows from the first axis of its arrays"):
            TWO.distribute_dataset(source, batch_axis=1)
        with pytest.raises(DatasetError, match="takes rows from the first axis of its arrays"):
            TWO.distribute_datasets_from_function(lambda context: source, batch_axis=1)


def test_turning_there_and_back():
    batch = ({"x": np.ones((2, 3, 4)), "y": np.ones((3, 1))},)
    axes = axes_of_leaves(batch, AXES)
    assert axes == (1, 0)
    turned = rows_first(batch, axes)
    assert jax.tree.map(np.shape, turned) == ({"x": (3, 2, 4), "y": (3, 1)},)
    assert jax.tree.map(np.shape, rows_in_place(turned, axes)) == ({"x": (2, 3, 4), "y": (3, 1)},)
    assert axes_of_leaves(batch, 0) == ()
