"""A replica's function over the mesh: what goes to which replica and how results come back, by every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import BatchError
from tests.toys import EVERY, TRANSFORMS, step_of

EACH = {name: EVERY[name] for name in ("shard_map", "pmap", "one_device", "default")}
X = np.arange(8, dtype=np.float32)


def step(state, batch, others):
    new = jax.tree.map(lambda w: w + others["by"] * jdist.all_reduce(batch["x"].mean()), state)
    return new, {"mean": batch["x"].mean()}, {"x": batch["x"] + state["w"]}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("numbers_of_leaves", [(1, 1, 1), (3, 1, 1), (1, 3, 1), (2, 3, 2)])
def test_state_metrics_and_rows(name, numbers_of_leaves):
    strategy = EVERY[name]
    s, b, o = numbers_of_leaves
    state = {"w": jnp.float32(1), **{f"w{i}": jnp.ones(3) for i in range(s - 1)}}
    batch = {"x": X, **{f"x{i}": np.ones((8, i), np.int32) for i in range(b - 1)}}
    others = {"by": jnp.float32(2), **{f"o{i}": jnp.ones(2) for i in range(o - 1)}}
    run = jdist.distribute(
        step, strategy, args=("state", "batch", "replicated"), returns=("state", "metrics", "examples")
    )
    for call in range(2):
        state, metrics, rows = run(state, batch, others)
        assert rows["x"].tolist() == (X + 1 + 7 * call).tolist()
    assert all((np.asarray(leaf) == 15).all() for leaf in jax.tree.leaves(state))
    assert float(metrics["mean"]) == 3.5
    if strategy.mesh is not None:
        for leaf in jax.tree.leaves((state, metrics)):
            assert leaf.sharding == strategy.replicated_sharding
        assert rows["x"].sharding.is_equivalent_to(strategy.batch_sharding, 1)


@pytest.mark.parametrize(("s", "b"), [(2, 1), (1, 2)])
def test_pmap_with_four_leaves_in_all(s, b):
    """With as many axes as leaves `jax.pmap` would take `in_axes` leaf by leaf."""

    def plus(state, batch):
        return jax.tree.map(lambda w: w + jdist.all_reduce(batch["0"].mean()), state), {}

    state = {str(i): jnp.float32(1) for i in range(s)}
    state, _ = jdist.distribute(plus, TRANSFORMS["pmap"])(state, {str(i): X for i in range(b)})
    assert float(state["0"]) == 4.5


@pytest.mark.parametrize("name", EVERY)
def test_a_step_without_a_batch(name):
    run = jdist.distribute(lambda state: jax.tree.map(lambda w: w + 1, state), EVERY[name], args=("state",))
    assert float(run(run({"w": jnp.float32(1)}))["w"]) == 3.0


@pytest.mark.parametrize("name", EACH)
def test_per_replica_results_keep_the_order_of_the_replicas(name):
    strategy = EACH[name]
    run = jdist.distribute(
        lambda batch: ({"own": jdist.PerReplica({"s": batch["x"].sum()}), "m": batch["x"].mean()}, batch["x"][:1]),
        strategy,
        args=("batch",),
        returns=("metrics", "per_replica"),
    )
    metrics, first = run({"x": X, "y": X})
    n = strategy.num_replicas
    assert metrics["own"].value["s"].tolist() == X.reshape(n, -1).sum(1).tolist()
    assert float(metrics["m"]) == 3.5
    assert first.value[:, 0].tolist() == X.reshape(n, -1)[:, 0].tolist()


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"x": X[:7]}, {}, r"7 rows does not divide by 2 \(2 replicas\)\. Use 6 or 8 rows"),
        ({"x": jnp.asarray(X[:7])}, {}, r"7 rows does not divide by 2 \(2 replicas\)\. Use 6 or 8 rows"),
        ({"x": X}, {"accumulate": 3}, r"8 rows does not divide by 6 \(2 replicas x accumulate=3\)\. Use 6 or 12"),
        ({"x": np.ones((2, 7))}, {"steps_per_call": 2}, "7 rows does not divide by 2"),
        ({"x": X}, {"steps_per_call": 2}, r"\['x'\] has shape \(8,\).*after the axis of steps"),
    ],
)
def test_batches_that_do_not_fit(name, batch, options, message):
    step = jdist.distribute(lambda w, b: (w, {}), TRANSFORMS[name], **options)
    with pytest.raises(BatchError, match=message):
        step(1.0, batch)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"x": X, "y": X[:6]}, {}, r"\['x'\] has 8, .*\['y'\] has 6"),
        ({"x": X, "y": X}, {"accumulate": 3}, r"8 rows does not divide by 3 \(.*accumulate=3\)\. Use 6 or 9"),
    ],
    ids=["leaves that disagree", "microbatches"],
)
def test_default_checks_rows_as_well(batch, options, message):
    with pytest.raises(BatchError, match=message):
        jdist.distribute(lambda w, b: (w, {}), jdist.default(), **options)(1.0, batch)


def hlo(strategy, **options):
    train = step_of(lambda p, batch: jdist.mean((batch["x"] * p["w"] + p["b"]) ** 2), rate=1.0)

    run = jdist.distribute(train, strategy, **options)
    state = {"w": jnp.float32(1), "b": jnp.float32(0)}
    return run.lower(state, {"x": X, "y": X}).as_text()


@pytest.mark.parametrize("name", ["shard_map", "pmap"])
def test_loss_and_all_gradients_go_in_one_all_reduce(name):
    # One psum of the tree: StableHLO writes one all_reduce, of several operands or one for each leaf side by side.
    # The guard against NaN may have one of its own, of a flag a leaf.
    text = hlo(TRANSFORMS[name], non_finite="apply")
    assert 1 <= text.count("stablehlo.all_reduce") <= 3
    assert "all_gather" not in text
    assert "all_reduce" not in hlo(EVERY["default"])
