"""Names of tf.distribute and Keras are answered with those of jdist."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest

import jdist
from jdist.support.tensorflow_names import NAMES

GUIDE = (Path(__file__).parents[2] / "docs" / "tf_symbols.md").read_text()
STRATEGY = jdist.mirrored(["cpu:0", "cpu:1"])
BATCHES = iter(STRATEGY.distribute_dataset([np.arange(4)], partial="error", prefetch=0))
CONTEXT = jdist.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=2)


@pytest.mark.parametrize(
    ("owner", "name", "answer"),
    [
        (
            jdist,
            "MirroredStrategy",
            "has no attribute 'MirroredStrategy': TensorFlow's MirroredStrategy is `jdist.mir",
        ),
        (
            STRATEGY,
            "experimental_distribute_dataset",
            "is `strategy.distribute_dataset(dataset)`. docs/tf_symbols.md",
        ),
        (STRATEGY, "extended", "is not needed: `strategy.devices`"),
        (STRATEGY, "batch_reduce", "is `jdist.all_reduce(tree)` in a step"),
        (STRATEGY, "experimental_assign_to_logical_device", "is `jax.device_put(x, device)`"),
        (STRATEGY, "experimental_split_to_logical_devices", "is `jax.lax.with_sharding_constraint("),
        (jdist, "merge_call", "is not needed: a step calls `jdist.all_reduce`"),
        (BATCHES, "get_next", "TensorFlow's get_next is `next(iterator)`"),
        (BATCHES, "get_next_as_optional", "is `next(iterator, None)`"),
        (STRATEGY, "num_replicas_in_sync", "is `num_replicas`"),
        (CONTEXT, "get_per_replica_batch_size", "is `context.per_replica_batch(global_batch)`"),
        (jdist, "get_replica_context", "is not needed: `jdist.all_reduce`"),
        (jdist.callbacks, "ModelCheckpoint", "TensorFlow's ModelCheckpoint is `jdist.callbacks.checkpoint("),
        (jdist.callbacks, "EarlyStopping", "is `jdist.callbacks.early_stopping("),
        (jdist.callbacks, "early_stoping", "Did you mean 'early_stopping'?"),
        (jdist.ps.RemoteValue([], list), "fetch", "TensorFlow's fetch is `value.result()`"),
        (jdist.ps.RemoteValue([], list), "get", "TensorFlow's get is `value.result()`"),
        (jdist, "mirorred", "Did you mean 'mirrored'?"),
        (STRATEGY, "num_replica", "Did you mean 'num_replicas'?"),
    ],
)
def test_a_name_that_there_is_not(owner, name, answer):
    assert not hasattr(owner, name)
    with pytest.raises(AttributeError, match=re.escape(answer)):
        getattr(owner, name)


def test_the_names_are_those_of_the_guide():
    for name in NAMES:
        assert name in GUIDE or name == "experimental_run_v2", name


def test_keyword_arguments():
    x = {"x": np.ones(4, np.float32)}
    with pytest.raises(TypeError, match=r"from_arrays has no argument 'global_batch_size': .* is `global_batch`"):
        jdist.data.from_arrays(x, global_batch_size=2)
    with pytest.raises(TypeError, match=r"mirrored has no argument 'cross_device_ops': .* is `all_reduce`"):
        jdist.mirrored(cross_device_ops=None)
    for call, name, ours in [
        (jdist.compute_average_loss, "global_batch_size", "global_batch"),
        (jdist.callbacks.early_stopping, "monitor", "metric"),
    ]:
        with pytest.raises(TypeError, match=rf"{call.__name__} has no argument '{name}': .* is `{ours}`"):
            call(**{name: 2})
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch_sizes'"):
        jdist.data.from_arrays(x, batch_sizes=2)


def test_a_coordinator_is_refused_a_strategy():
    with pytest.raises(jdist.errors.StrategyError, match=r"take `strategy\.coordinator`"):
        jdist.ps.ClusterCoordinator(STRATEGY)


def test_a_strategy_is_copied_as_before():
    assert copy.copy(STRATEGY).devices == STRATEGY.devices
    assert copy.deepcopy(CONTEXT) == CONTEXT
