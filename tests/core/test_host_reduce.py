"""Bringing together on the host what the replicas hold; the example values are those of `tf.distribute`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StepError
from tests.toys import TWO

ONE = jdist.one_device()


def of(*values):
    return jdist.PerReplica.of([np.asarray(value) for value in values])


def same(actual, expected, dtype=None):
    np.testing.assert_array_equal(actual, expected)
    assert dtype is None or actual.dtype == dtype


class TestLocalResults:
    def test_of_a_per_replica_value(self):
        results = TWO.local_results(TWO.run(lambda: {"id": jdist.replica_id()}))
        assert [int(result["id"]) for result in results] == [0, 1]

    def test_of_a_tree_with_per_replica_values_in_it(self):
        first, second = TWO.local_results({"own": of([1], [2, 3]), "whole": jnp.arange(2)})
        assert (first["own"].tolist(), second["own"].tolist()) == ([1], [2, 3])
        assert first["whole"].tolist() == second["whole"].tolist() == [0, 1]

    def test_what_is_the_same_on_all_replicas_is_one_value(self):
        (result,) = TWO.local_results({"x": jnp.arange(3)})
        assert isinstance(result["x"], np.ndarray)
        assert result["x"].tolist() == [0, 1, 2]

    def test_of_a_distributed_batch_the_rows_of_each_replica(self):
        (batch,) = TWO.distribute_dataset([{"x": np.arange(4)}])
        assert [part["x"].tolist() for part in TWO.local_results(batch)] == [[0, 1], [2, 3]]

    def test_on_one_replica(self):
        for strategy in (ONE, jdist.default()):
            assert [r.tolist() for r in strategy.local_results(of([1, 2]))] == [[1, 2]]

    def test_keys(self):
        keys = TWO.run(lambda: jdist.replica_rng(jax.random.key(0)))
        first, second = TWO.local_results(keys)
        assert jax.random.key_data(first).tolist() != jax.random.key_data(second).tolist()


class TestGather:
    def test_along_each_axis(self):
        value = of([[1, 2]], [[3, 4]])
        same(TWO.gather(value, 0), [[1, 2], [3, 4]])
        same(TWO.gather(value, 1), [[1, 2, 3, 4]])
        same(TWO.gather(value, axis=-1), [[1, 2, 3, 4]])

    def test_sizes_may_differ_on_that_axis(self):
        same(TWO.gather(of([0, 1, 2, 3], [4, 5]), 0), [0, 1, 2, 3, 4, 5])
        same(TWO.gather(of(np.zeros((2, 1)), np.ones((2, 2))), 1), [[0, 1, 1], [0, 1, 1]])
        same(TWO.gather(of(np.zeros(2), np.zeros(0)), 0), [0, 0])

    def test_trees_batches_and_keys(self):
        (batch,) = TWO.distribute_dataset([{"x": np.arange(4)}])
        gathered = TWO.gather({"batch": batch["x"], "own": [of([1], [2])]}, 0)
        assert (gathered["batch"].tolist(), gathered["own"][0].tolist()) == ([0, 1, 2, 3], [1, 2])
        keys = TWO.run(lambda: jdist.replica_rng(jax.random.split(jax.random.key(0), 2)))
        assert TWO.gather(keys, 0).shape == (4,)

    def test_what_is_the_same_everywhere(self):
        same(ONE.gather(jnp.arange(2), 0), [0, 1])


class TestReduce:
    def test_over_the_replicas_alone(self):
        value = of([0, 1, 2, 3], [4, 5, 6, 7])
        same(TWO.reduce("sum", value, axis=None), [4, 6, 8, 10], np.int32)
        same(TWO.reduce("mean", value), [2, 3, 4, 5], np.float32)
        same(TWO.reduce("sum", TWO.run(lambda: jdist.replica_id() * 2.0 + 1)), 4, np.float32)

    def test_over_an_axis_too_a_mean_divides_by_the_true_count(self):
        value = of([0, 1, 2, 3], [4, 5])
        same(TWO.reduce("mean", value, axis=0), 2.5, np.float32)
        same(TWO.reduce("sum", value, axis=0), 15, np.int32)
        same(TWO.reduce("mean", value, axis=-1), 2.5)
        same(TWO.reduce("mean", value, axis=(0,)), 2.5)

    def test_a_sum_of_small_or_unsigned_integers_does_not_wrap(self):
        same(TWO.reduce("sum", of(np.uint32([3_000_000_000]), np.uint32([1]))), [3_000_000_001], np.uint32)
        same(TWO.reduce("sum", of(np.uint8([200]), np.uint8([200]))), [400], np.uint32)
        same(TWO.reduce("sum", of(np.int8([-100]), np.int8([-100])), axis=0), -200, np.int32)

    def test_one_replica_without_rows(self):
        same(TWO.reduce("mean", of(np.float32([1, 2]), np.zeros(0, np.float32)), axis=0), 1.5)
        same(TWO.reduce("sum", of(np.zeros(0), np.zeros(0)), axis=0), 0)

    def test_several_axes(self):
        value = of(np.arange(6.0).reshape(2, 3), np.ones((2, 3)))
        same(TWO.reduce("sum", value, axis=(0, 1)), 21)
        same(TWO.reduce("mean", value, axis=(0, 1)), 21 / 12)
        same(TWO.reduce("mean", value, axis=(-1, 0)), 21 / 12)
        same(TWO.reduce("sum", value, axis=1), [6, 15])
        same(TWO.reduce("mean", value, axis=0), [5 / 4, 7 / 4, 9 / 4])
        uneven = of(np.ones((1, 2)), np.full((3, 1), 4.0))
        same(TWO.reduce("mean", uneven, axis=(0, 1)), np.float32(2.8), np.float32)

    def test_an_axis_may_be_one_of_numpys_integers(self):
        assert [TWO.reduce("sum", of([1], [2]), axis=axis) for axis in (np.int64(0), (np.int32(-1),))] == [3, 3]
        assert TWO.gather(of([1], [2]), axis=np.int64(0)).tolist() == [1, 2]

    def test_what_is_the_same_everywhere_has_a_mean(self):
        same(TWO.reduce("mean", jnp.arange(3.0)), [0, 1, 2])
        same(TWO.reduce("mean", jnp.arange(3.0), axis=0), 1)

    @pytest.mark.parametrize(
        "strategy",
        [
            *(jdist.default(), ONE, TWO, jdist.sharded(["cpu:0", "cpu:1"]), jdist.sharded(within=2)),
            *(jdist.mirrored(transform=name) for name in ("pmap", "jit")),
            jdist.central_storage(["cpu:0", "cpu:1"]),
        ],
    )
    def test_a_plain_value_is_one_value_on_any_number_of_replicas(self, strategy):
        for op in ("SUM", "MEAN", "sum", "mean"):
            same(strategy.reduce(op, 1.0, axis=None), 1, np.float32)
        same(strategy.reduce("SUM", jnp.arange(3.0)), [0, 1, 2])
        same(strategy.reduce("SUM", jnp.arange(3.0), axis=0), 3)

    def test_upper_case_as_tensorflow_has_it(self):
        same(TWO.reduce("SUM", of([0, 1], [4, 5]), axis=None), [4, 6], np.int32)
        same(TWO.reduce("MEAN", of([0, 1], [4, 5]), axis=0), 2.5, np.float32)

    def test_dtypes(self):
        half = of(np.ones((300,), jnp.bfloat16), np.ones((300,), jnp.bfloat16))
        same(TWO.reduce("sum", half, axis=0), 600, jnp.bfloat16)
        same(TWO.reduce("mean", half, axis=0), 1, jnp.bfloat16)
        same(TWO.reduce("sum", of([True, True], [True, False]), axis=0), 3, np.int32)
        same(TWO.reduce("mean", of([True, True], [True, False]), axis=0), 0.75, np.float32)
        same(TWO.reduce("mean", of(np.complex64(1j), np.complex64(3))), 1.5 + 0.5j, np.complex64)
        same(TWO.reduce("sum", of(np.uint8(200), np.uint8(50))), 250)

    def test_trees_and_batches(self):
        (batch,) = TWO.distribute_dataset([{"x": np.arange(4.0)}])
        reduced = TWO.reduce("mean", {"batch": batch["x"], "own": [of([1], [2, 6])]}, axis=0)
        assert (float(reduced["batch"]), float(reduced["own"][0])) == (1.5, 3.0)
        assert TWO.reduce("sum", jdist.PerReplica({"none": None})) == {"none": None}


OF_THREE = r"strategy\.\w+: a PerReplica value holds 3 versions.* 2 replicas"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TWO.local_results(of([1], [2], [3])), OF_THREE),
        (lambda: TWO.gather(of([1], [2], [3]), 0), OF_THREE),
        (lambda: TWO.reduce("sum", of([1], [2], [3])), OF_THREE),
        (
            lambda: TWO.gather(of(np.zeros((2, 1)), np.zeros((2, 2))), 0),
            r"gather: the value has the shapes \(2, 1\), \(2, 2\).* on axis 0 only",
        ),
        (lambda: TWO.gather(of(np.zeros(2), np.zeros((2, 2))), 0), "may differ on axis 0 only"),
        (
            lambda: TWO.gather(TWO.run(lambda: {"a": jdist.replica_id()}), 0),
            r"leaf \['a'\] is a scalar on each replica.*x\[None\]",
        ),
        (lambda: TWO.gather(of([1, 2], [3, 4]), 1), r"shape \(2,\) and no axis 1"),
        (lambda: TWO.gather(of([1, 2], [3, 4]), -2), r"shape \(2,\) and no axis -2"),
        (lambda: TWO.gather(jnp.arange(2), 0), "not a PerReplica, so it is the same on all replicas"),
        (
            lambda: TWO.reduce("mean", of(np.zeros(0), np.zeros(0)), axis=0),
            r"empty on every replica \(shapes \(0,\), \(0, ?\)\) and has no mean",
        ),
        (
            lambda: TWO.reduce("sum", of([0, 1, 2, 3], [4, 5])),
            r"reduce: the value has the shapes \(4,\), \(2,\).*name their axis",
        ),
        (
            lambda: TWO.reduce("sum", {"a": of(np.ones((1, 2)), np.ones((3, 1)))}, axis=1),
            r"leaf \['a'\].*all axes but `axis` \(1,\) must have equal sizes",
        ),
        (
            lambda: TWO.reduce("sum", of([1], [2]), axis=()),
            r"`axis` is \(\), which names no axis; .*leave it out \(None\)",
        ),
        (lambda: TWO.reduce("sum", TWO.run(lambda: jax.random.key(0))), "is a PRNG key, which has no sum"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(StepError, match=message):
        call()


def test_another_op_or_axis_is_refused_by_name():
    value = of([1], [2])
    for op in ("max", "Sum", None, "avg"):
        with pytest.raises(StepError, match=rf"`op` is {op!r}; it must be one of 'mean', 'sum', 'MEAN', 'SUM'"):
            TWO.reduce(op, value)
    for axis in (None, "0", 0.0, True, (0,)):
        with pytest.raises(StepError, match=r"`axis` is .*must be an int"):
            TWO.gather(value, axis)
    for axis in ("0", 0.5, True, [0], (0, "1"), (False,)):
        with pytest.raises(StepError, match=r"`axis` is .*None, an int or a tuple of ints"):
            TWO.reduce("sum", value, axis=axis)
    for axis in (1, -2, (0, 0), (0, -1), 5):
        with pytest.raises(StepError, match=r"the value has shape \(1,\); `axis` .*each once"):
            TWO.reduce("sum", value, axis=axis)


def test_a_stack_of_batches_is_refused_and_one_of_it_is_taken():
    (stack,) = TWO.distribute_dataset([np.arange(4)] * 2, partial="error", steps_per_call=2)
    calls = {
        "local_results": lambda x: [part.tolist() for part in TWO.local_results(x)],
        "gather": lambda x: TWO.gather(x, 0).tolist(),
        "reduce": lambda x: TWO.reduce("sum", x).tolist(),
        "run": lambda x: TWO.run(lambda x: x.sum(), x).value.tolist(),
    }
    for name, call in calls.items():
        with pytest.raises(StepError, match=rf"strategy\.{name}: an array of shape \(2, 4\) is a stack of 2 batches"):
            call(stack)
    results = [call(stack[0]) for call in calls.values()]
    assert results == [[[0, 1], [2, 3]], [0, 1, 2, 3], [2, 4], [1, 5]]
