"""Values that differ from replica to replica."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.core.per_replica import PerReplica, is_per_replica, put_per_replica, take_per_replica
from jdist.errors import StepError


def test_local_results_are_host_trees_in_the_order_of_the_replicas():
    value = PerReplica({"a": jnp.arange(6).reshape(3, 2), "b": (jnp.array([1.0, 2.0, 3.0]),)})
    results = value.local_results()
    assert [r["a"].tolist() for r in results] == [[0, 1], [2, 3], [4, 5]]
    assert [float(r["b"][0]) for r in results] == [1, 2, 3]
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(results))
    assert PerReplica({}).local_results() == ()


def test_local_results_of_keys():
    results = PerReplica(jax.random.split(jax.random.key(0), 2)).local_results()
    assert len(results) == 2


def test_it_crosses_jit_as_a_pytree():
    doubled = jax.jit(lambda v: jax.tree.map(lambda x: 2 * x, v))(PerReplica(jnp.arange(2)))
    assert isinstance(doubled, PerReplica)
    assert doubled.value.tolist() == [0, 2]


def test_take_and_put_undo_each_other():
    tree = {"a": 1, "b": PerReplica({"x": 2, "y": 3}), "c": [PerReplica(4), None]}
    emptied, taken = take_per_replica(tree)
    assert taken == [{"x": 2, "y": 3}, 4]
    assert jax.tree.leaves(emptied) == [1]
    assert put_per_replica(emptied, taken) == tree
    assert put_per_replica(*take_per_replica({"a": 1})) == {"a": 1}


@pytest.mark.parametrize("value", [[1, 2], {"a": np.zeros(2), "b": np.zeros(3)}], ids=str)
def test_arrays_without_one_leading_axis_of_replicas_are_refused(value):
    with pytest.raises(
        StepError, match=r"one leading axis of replicas, it has the shapes \(.*write `jdist\.PerReplica\.of\("
    ):
        PerReplica(value).local_results()


def test_is_per_replica():
    assert is_per_replica(PerReplica(1))
    assert not is_per_replica({"a": PerReplica(1)})


def test_one_result_for_each_replica_of_a_step():
    strategy = jdist.mirrored(["cpu:0", "cpu:1"])
    step = jdist.distribute(
        lambda x: {"mean": x.mean(), "own": jdist.PerReplica({"m": x.mean(), "x": x})}, strategy, args=("batch",)
    )
    out = step(np.array([1, 2, 3, 4], np.float32))
    assert float(out["mean"]) == 2.5
    first, second = out["own"].local_results()
    assert (float(first["m"]), float(second["m"])) == (1.5, 3.5)
    assert (first["x"].tolist(), second["x"].tolist()) == ([1, 2], [3, 4])


class TestOf:
    def test_values_of_one_size_are_stacked(self):
        value = PerReplica.of([{"a": np.arange(2), "b": 1.5}, {"a": np.arange(2, 4), "b": 2}])
        assert value.value["a"].tolist() == [[0, 1], [2, 3]]
        assert value.value["b"].tolist() == [1.5, 2.0]
        assert value.value["b"].dtype == np.float32
        doubled = jdist.mirrored(["cpu:0", "cpu:1"]).run(lambda v: 2 * v["a"], value)
        assert doubled.value.tolist() == [[0, 2], [4, 6]]

    def test_values_of_different_sizes_are_kept_apart(self):
        value = PerReplica.of([{"a": np.arange(4), "b": 0}, {"a": np.arange(2), "b": 1}])
        assert [r["a"].tolist() for r in value.local_results()] == [[0, 1, 2, 3], [0, 1]]
        assert [int(r["b"]) for r in value.local_results()] == [0, 1]

    def test_compiled_code_takes_no_sizes_that_differ(self):
        value = PerReplica.of([np.arange(4), np.arange(2)])
        with pytest.raises(StepError, match=r"differs in size between replicas: \[\(4,\)\], \[\(2,\)\].*mask"):
            jdist.mirrored(["cpu:0", "cpu:1"]).run(lambda x: x.sum(), value)

    def test_keys_are_stacked(self):
        value = PerReplica.of([jax.random.key(0), jax.random.key(1)])
        assert value.value.shape == (2,)
        assert jnp.issubdtype(value.value.dtype, jax.dtypes.prng_key)

    def test_it_does_not_show_the_callers_own_memory(self):
        mine = [np.zeros(2), np.zeros(3)]
        even, uneven = PerReplica.of(mine[:1]), PerReplica.of(mine)
        mine[0][:] = 7
        assert even.local_results()[0].tolist() == uneven.local_results()[0].tolist() == [0, 0]

    def test_what_is_refused(self):
        with pytest.raises(StepError, match="no values; pass one for each replica"):
            PerReplica.of([])
        with pytest.raises(StepError, match=r"the value of replica 1 has the tree .*not in structure"):
            PerReplica.of([{"a": 1}, {"b": 1}])
        for wrong in ("text", np.array(["a"]), object()):
            with pytest.raises(StepError, match=rf"is not an array of numbers: \['a'\] is a {type(wrong).__name__}"):
                PerReplica.of([{"a": wrong}])


class TestValuesFromFunction:
    @pytest.mark.parametrize("transform", ["shard_map", "pmap", "jit"])
    def test_each_replica_is_told_its_number(self, transform):
        strategy = jdist.mirrored(["cpu:0", "cpu:1"], transform=transform)
        seen = []

        def fn(context):
            seen.append(context)
            return {"x": np.full(3, context.replica_id_in_sync_group)}

        value = strategy.distribute_values_from_function(fn)
        assert seen == [jdist.ValueContext(0, 2), jdist.ValueContext(1, 2)]
        assert value.value["x"].sharding == strategy.batch_sharding
        assert [r["x"].tolist() for r in strategy.local_results(value)] == [[0, 0, 0], [1, 1, 1]]
        if transform != "jit":
            assert strategy.run(lambda v: v["x"].sum(), value).value.tolist() == [0, 3]

    def test_on_one_replica(self):
        for strategy in (jdist.default(), jdist.one_device("cpu:1")):
            value = strategy.distribute_values_from_function(lambda context: context.num_replicas_in_sync)
            (result,) = strategy.local_results(strategy.run(lambda x: x + 1, value))
            assert result == 2

    def test_different_sizes_stay_on_the_host(self):
        strategy = jdist.mirrored(["cpu:0", "cpu:1"])
        value = strategy.distribute_values_from_function(lambda c: np.arange(4 - 2 * c.replica_id_in_sync_group))
        assert strategy.gather(value, 0).tolist() == [0, 1, 2, 3, 0, 1]
        assert float(strategy.reduce("mean", value, axis=0)) == pytest.approx(7 / 6)


def test_entries_of_a_tree_are_per_replica_as_in_tensorflow():
    strategy = jdist.mirrored(jax.devices()[:2])
    number, rest = strategy.run(lambda: (jdist.replica_id(), {"twice": 2 * jdist.replica_id()}))
    assert number.local_results() == (0, 1)
    assert rest["twice"].local_results() == (0, 2)
    assert list(rest) == ["twice"]
    uneven = jdist.PerReplica.of([{"x": np.arange(2)}, {"x": np.arange(3)}])
    assert [len(x) for x in uneven["x"].local_results()] == [2, 3]
    for use in (lambda x: x[0], list):
        with pytest.raises(TypeError, match=r"holds one .*, a version for each replica, .* `x.local_results"):
            use(number)
