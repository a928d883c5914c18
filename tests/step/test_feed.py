"""How strategies are fed: what each replica receives, and the options' two ways in."""

import functools

import jax
import numpy as np
import pytest

import jdist
from jdist.data import from_arrays
from jdist.errors import BatchError, DatasetError
from tests.toys import TWO


def on_each_replica(batches):
    """The real rows of each replica's part, as its device holds them, for each batch."""
    shown = []
    for batch in batches:
        parts = zip(batch["x"].addressable_shards, batch["mask"].addressable_shards, strict=True)
        shown.append([np.asarray(x.data)[np.asarray(mask.data)].tolist() for x, mask in parts])
    return shown


class TestGlobalBatches:
    """The example of `tf.distribute.Strategy.experimental_distribute_dataset`: range(9) in batches of 4."""

    @pytest.mark.parametrize("transform", ["shard_map", "pmap", "jit"])
    def test_each_replica_has_its_share_and_the_last_has_none(self, transform):
        strategy = jdist.mirrored(["cpu:0", "cpu:1"], transform=transform)
        dataset = strategy.distribute_dataset(from_arrays({"x": np.arange(9)}, global_batch=4))
        assert on_each_replica(dataset) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]


def test_arrays_in_memory_are_a_dataset():
    """The counterpart of `tf.distribute.Strategy.experimental_make_numpy_dataset`."""
    images, labels = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3), np.arange(4, dtype=np.int32)
    source = from_arrays((images, labels), global_batch=2)
    for number, (image, label) in enumerate(TWO.distribute_dataset(source)):
        assert image.sharding == label.sharding == TWO.batch_sharding
        np.testing.assert_array_equal(image, images[2 * number : 2 * number + 2])
        np.testing.assert_array_equal(label, labels[2 * number : 2 * number + 2])
    assert number == 1


def test_per_replica_batches_lie_on_their_replicas():
    def dataset(context):
        return from_arrays({"x": np.arange(9)}, global_batch=context.per_replica_batch(4))

    assert on_each_replica(TWO.distribute_datasets_from_function(dataset)) == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8], []],
    ]
    (batch, _) = TWO.distribute_datasets_from_function(dataset, steps_per_call=2)
    assert batch["x"].shape == (2, 4)
    assert batch["x"].sharding.spec == jax.sharding.PartitionSpec(None, ("replica",))


def test_under_default_batches_stay_on_the_host():
    (batch,) = jdist.default().distribute_datasets_from_function(lambda context: [np.arange(3)])
    assert isinstance(batch, np.ndarray)


class TestOptions:
    @pytest.mark.parametrize(
        ("feed", "options", "message"),
        [
            *[
                (feed, {"prefetch": 4}, "`options` must be a `jdist.InputOptions`, but it is a dict")
                for feed in (TWO.distribute_dataset, TWO.distribute_datasets_from_function)
            ],
            (
                functools.partial(TWO.distribute_dataset, prefetch=0),
                jdist.InputOptions(prefetch=4),
                "`prefetch` is given twice: prefetch=0, and 4 in `options`",
            ),
            (
                TWO.distribute_dataset,
                jdist.InputOptions(replication="per_replica"),
                "distribute_datasets_from_function",
            ),
            *[
                (
                    TWO.distribute_datasets_from_function,
                    jdist.InputOptions(autoshard=autoshard),
                    f"autoshard='{autoshard}' shares out one source.* `jdist.data.shard",
                )
                for autoshard in ("file", "data")
            ],
        ],
    )
    def test_what_is_refused(self, feed, options, message):
        with pytest.raises(DatasetError, match=message):
            feed([np.arange(4)], options)

    @pytest.mark.parametrize("autoshard", ["auto", "file", "data", "off"])
    def test_with_one_process_autoshard_changes_nothing(self, autoshard):
        options = jdist.InputOptions(autoshard=autoshard)
        dataset = TWO.distribute_dataset(from_arrays({"x": np.arange(4)}, global_batch=4), options)
        assert on_each_replica(dataset) == [[[0, 1], [2, 3]]]


@pytest.mark.parametrize("value", [2**40 + 5, -(2**31) - 1, np.uint64(2**63)])
def test_integers_that_would_wrap_are_refused(value):
    ids = np.array([3, value], np.asarray(value).dtype)
    with pytest.raises(BatchError, match=rf"leaf \['id'\] has {int(value):,} in u?int64, which JAX stores as u?int32"):
        next(iter(TWO.distribute_dataset(from_arrays({"id": ids}, global_batch=2))))
    with pytest.raises(BatchError, match="would become another number"):
        next(iter(jdist.default().distribute_dataset(from_arrays({"id": ids}, global_batch=2))))
    step = jdist.distribute(lambda state, batch: (state, {"n": batch["id"].sum()}), TWO)
    with pytest.raises(BatchError, match="would become another number"):
        step(np.float32(0), {"id": ids})
    jax.config.update("jax_enable_x64", True)
    try:
        (batch,) = TWO.distribute_dataset(from_arrays({"id": ids}, global_batch=2))
    finally:
        jax.config.update("jax_enable_x64", False)
    assert np.asarray(batch["id"]).tolist() == ids.tolist()
    (batch,) = TWO.distribute_dataset(from_arrays({"id": np.array([2**31 - 1, -(2**31)])}, global_batch=2))
    assert np.asarray(batch["id"]).tolist() == [2**31 - 1, -(2**31)]
