"""Values that differ from replica to replica."""

import jax
import jax.numpy as jnp
import numpy as np

import jdist
from jdist.values import PerReplica, is_per_replica, put_per_replica, take_per_replica


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
