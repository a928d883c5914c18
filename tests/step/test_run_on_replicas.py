"""`strategy.run`: any function, once on every replica."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StepError
from tests.toys import TWO


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_each_replica_has_its_own_number_and_result(transform):
    strategy = jdist.mirrored(["cpu:0", "cpu:1"], transform=transform)
    result = strategy.run(lambda: {"id": jdist.replica_id(), "n": jdist.num_replicas(), "none": None})
    assert result.value["id"].tolist() == [0, 1]
    assert result.value["n"].tolist() == [2, 2]
    assert result.value["none"] is None


def test_per_replica_values_and_batches_arrive_in_parts_and_all_else_whole():
    (batch,) = TWO.distribute_dataset([{"x": np.arange(4.0)}])
    own = TWO.run(lambda: {"k": jdist.replica_id() * 10})

    def fn(batch, own, whole, *, scale, nested):
        assert batch["x"].shape == (2,)
        assert whole.shape == (4,)
        return batch["x"].sum() * scale + own["k"] + whole[0] + nested["p"].sum()

    nested = {"p": jdist.PerReplica(jnp.array([[100.0, 0], [200, 0]]))}
    result = TWO.run(fn, batch, own, np.arange(4.0), scale=2.0, nested=nested)
    assert [float(x) for x in result.local_results()] == [102.0, 220.0]


def test_results_feed_the_next_run():
    first = TWO.run(lambda: jax.random.normal(jdist.replica_rng(jax.random.key(0)), (3,)))
    second = TWO.run(lambda x: jdist.all_reduce(x), first)
    np.testing.assert_allclose(second.value[0], first.value.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(second.value[0], second.value[1])


def test_on_one_replica_results_have_a_leading_axis_too():
    strategy = jdist.one_device("cpu:1")
    result = strategy.run(lambda x: x + jdist.replica_id(), jdist.PerReplica(jnp.array([[1.0, 2.0]])))
    assert result.value.tolist() == [[1.0, 2.0]]
    assert result.local_results()[0].tolist() == [1.0, 2.0]
    (batch,) = strategy.distribute_dataset([np.arange(3.0)], partial="error")
    assert strategy.run(lambda x: x, batch).value.tolist() == [[0, 1, 2]]


def test_the_default_strategy_simply_calls_the_function():
    default, seen = jdist.default(), object()
    assert default.run(lambda x, *, flag: (x, flag, "text"), seen, flag=True) == (seen, True, "text")
    own = jdist.PerReplica(jnp.array([[1.0, 2.0]]))
    assert default.run(lambda x: x.tolist(), own) == [1.0, 2.0]  # a value, not a tracer
    (batch,) = default.distribute_dataset([np.arange(3.0)], partial="error")
    result = default.run(lambda x: x + jdist.replica_id(), batch)
    assert result.tolist() == [0, 1, 2]
    assert default.reduce("sum", result, axis=0) == 3
    assert default.local_results(result)[0].tolist() == [0, 1, 2]
    with pytest.raises(jdist.errors.JDistError, match="3"):
        default.run(lambda x: x, jdist.PerReplica(jnp.ones(3)))


@pytest.mark.parametrize("strategy", [jdist.default(), TWO], ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("fn", "given", "expected"),
    [
        (lambda x, y=1.0: x + y, {"args": (2.0,)}, 3.0),
        (lambda x, y=1.0: x + y, {"args": [2.0], "kwargs": None}, 3.0),
        (lambda x, y=1.0: x + y, {"args": (2.0,), "kwargs": {"y": 5.0}}, 7.0),
        (lambda *xs, **named: xs[0] + named["y"], {"args": (2.0,), "kwargs": {"y": 5.0}}, 7.0),
        (lambda: 3.0, {"args": ()}, 3.0),
        (lambda args: args[0], {"args": (2.0,)}, 2.0),  # its own parameter
        (lambda *, kwargs: kwargs["y"], {"kwargs": {"y": 5.0}}, 5.0),
    ],
)
def test_arguments_in_the_form_of_tensorflow(strategy, fn, given, expected):
    (result,) = {float(x) for x in strategy.local_results(strategy.run(fn, **given))}
    assert result == expected


@pytest.mark.parametrize("given", [{"args": 2.0}, {"args": (2.0,), "kwargs": [1]}])
def test_arguments_in_no_form_of_tensorflow_are_refused(given):
    with pytest.raises(
        StepError, match=r"strategy\.run: `args` is .*must be a tuple and a dict.*`strategy\.run\(fn, x"
    ):
        TWO.run(lambda x: x, **given)


def test_arguments_that_are_no_arrays():
    assert TWO.run(lambda name: len(name), "abc").value.tolist() == [3, 3]


def test_a_flag_can_be_branched_on():
    def fn(x, *, training):
        return x if training else -x

    for training in (True, False):
        assert TWO.run(fn, 1.0, training=training).value.tolist() == [1 if training else -1] * 2


def test_what_is_no_function_is_refused():
    with pytest.raises(StepError, match=r"strategy\.run needs a function .* it got a float"):
        TWO.run(1.0)
    with pytest.raises(StepError, match=r"distribute_values_from_function needs a function .* it got a float"):
        TWO.distribute_values_from_function(1.0)


def test_per_replica_values_of_another_number_of_replicas_are_refused():
    with pytest.raises(jdist.errors.JDistError, match="3"):
        TWO.run(lambda x: x, jdist.PerReplica(jnp.ones(3)))


def test_twice_the_number_of_replicas_is_refused():
    with pytest.raises(jdist.errors.JDistError, match="4"):
        TWO.run(lambda x: x, jdist.PerReplica(jnp.arange(4.0)))


def test_a_result_that_is_text_is_refused_by_name():
    with pytest.raises(StepError, match=r"result of strategy\.run has a leaf .*: \['t'\] is a str\. Return numbers"):
        TWO.run(lambda: {"t": "abc"})
