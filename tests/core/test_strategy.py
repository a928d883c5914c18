"""The Strategy value."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jdist
from jdist.data.options import FeedOptions


def test_it_is_an_immutable_value_compared_by_identity():
    one, other = jdist.mirrored(["cpu:0"]), jdist.mirrored(["cpu:0"])
    assert one != other
    assert len({one, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "other"


def test_fields_of_mirrored():
    strategy = jdist.mirrored(["cpu:3", "cpu:1"], transform="pmap", axis="batch")
    assert strategy.name == "mirrored"
    assert strategy.devices == (jax.devices("cpu")[3], jax.devices("cpu")[1])
    assert list(strategy.mesh.devices.flat) == list(strategy.devices)
    assert (strategy.axes, strategy.mesh.axis_names) == (("batch",), ("batch",))
    assert (strategy.num_replicas, strategy.transform, strategy.cluster.num_processes) == (2, "pmap", 1)
    assert strategy.replicated_sharding == NamedSharding(strategy.mesh, PartitionSpec())
    assert strategy.batch_sharding.is_equivalent_to(NamedSharding(strategy.mesh, PartitionSpec("batch")), 1)


def test_fields_of_default():
    strategy = jdist.default()
    assert (strategy.mesh, strategy.devices, strategy.axes, strategy.transform) == (None, (), (), None)
    assert strategy.num_replicas == 1
    assert strategy.replicated_sharding is strategy.batch_sharding is None


def test_repr_is_for_people():
    kind = jax.devices("cpu")[0].device_kind
    assert repr(jdist.mirrored(["cpu:0", "cpu:2"])) == (
        f"Strategy(mirrored: 2 replicas on cpu devices [0, 2] ({kind}), mesh replica=2, transform shard_map, "
        "all-reduce psum)"
    )
    assert repr(jdist.one_device("cpu:1")).startswith("Strategy(one_device: 1 replica on cpu devices [1] ")
    assert repr(jdist.default()) == "Strategy(default: the step runs unchanged, on the device that JAX chooses)"


def test_html_is_a_table_and_escapes():
    html = jdist.mirrored(["cpu:0", "cpu:1"])._repr_html_()
    assert html.startswith("<table>")
    assert html.endswith("</table>")
    assert "<td>mirrored</td>" in html
    assert "<td>shard_map</td>" in html
    assert "transform" not in jdist.default()._repr_html_()
    reduction = jdist.reduction.Reduction("<b>mine", lambda tree: (), lambda tree, carry, axes: (tree, carry))
    assert "&lt;b&gt;mine" in jdist.mirrored(["cpu:0"], all_reduce=reduction)._repr_html_()


def test_methods_call_the_operations_with_the_strategy_first():
    calls = []

    def record(name):
        return lambda *args: calls.append((name, *args)) or name

    names = ("init", "fetch", "check", "run", "feed_batches", "feed_pipelines", "distribute")
    operations = dataclasses.replace(jdist.default().operations, **{name: record(name) for name in names})
    strategy = dataclasses.replace(jdist.default(), operations=operations)
    assert strategy.init("fn", 1) == "init"
    assert strategy.fetch("state") == "fetch"
    assert strategy.check("state") is None
    assert strategy.run("fn", 1, a=2) == "run"
    assert strategy.distribute_dataset("data", partial="drop") == "feed_batches"
    options = jdist.InputOptions(prefetch=7)
    assert strategy.distribute_datasets_from_function("fn", options) == "feed_pipelines"
    given = {"num_replicas": 1, "with_mask": False, "steps_per_call": 1, "batch_axis": 0}
    batches = FeedOptions(partial="drop", input=jdist.InputOptions(), **given)
    pipelines = FeedOptions(partial="pad", input=options, **given)
    assert calls == [
        ("init", strategy, "fn", (1,)),
        ("fetch", strategy, "state"),
        ("check", strategy, "state"),
        ("run", strategy, "fn", (1,), {"a": 2}),
        ("feed_batches", strategy, "data", batches),
        ("feed_pipelines", strategy, "fn", pipelines),
    ]


def test_distribute_dataset_feeds_the_step_without_another_copy():
    strategy = jdist.mirrored(["cpu:0", "cpu:1"])
    (batch,) = strategy.distribute_dataset([{"x": np.arange(4.0)}])
    assert batch["x"].sharding == batch["mask"].sharding == strategy.batch_sharding
    (stacked,) = strategy.distribute_dataset([{"x": np.arange(4.0)}] * 2, steps_per_call=2)
    assert stacked["x"].shape == (2, 4)
    assert stacked["x"].sharding.spec == PartitionSpec(None, ("replica",))
    (host,) = jdist.default().distribute_dataset([{"x": np.arange(4.0)}])
    assert host["x"].tolist() == [0, 1, 2, 3]
