"""The prediction of memory beside a real step."""

import jax
import jax.numpy as jnp
import pytest

import jdist
from jdist.experiment.load import load
from jdist.experiment.prepare import prepare
from jdist.experiment.validate import validate
from jdist.plan.compile import MemoryCheck, bytes_on_a_device, check_memory, compile_step, plan_step
from tests.plan.plan_toy import config_file


def test_the_bytes_of_one_device():
    strategy = jdist.mirrored()
    whole = jax.device_put(jnp.zeros(10), strategy.replicated_sharding)
    rows = jax.device_put(jnp.zeros((16, 2)), strategy.batch_sharding)
    key = jax.device_put(jax.random.key(0), strategy.replicated_sharding)
    assert bytes_on_a_device({"whole": whole, "rows": rows, "key": key}) == 40 + 2 * 2 * 4 + 8


def test_the_error_is_signed():
    assert MemoryCheck(what="x", predicted=110, measured=100).error == pytest.approx(0.1)


COMPRESSED = ["strategy.name=mirrored", "strategy.all_reduce={name: compressed, dtype: bf16}"]


@pytest.mark.parametrize(
    "overrides",
    [["strategy.name=mirrored"], ["strategy.name=one_device"], ["strategy.name=default"], COMPRESSED],
    ids=["mirrored", "one_device", "default", "compressed"],
)
def test_a_real_step_has_the_predicted_arguments_and_outputs(tmp_path, overrides):
    document = load(config_file(tmp_path), [*overrides, "train.optimizer.name=adam"])
    config = validate(document)
    parts = prepare(config, document)
    planned = plan_step(config, parts)
    checks = check_memory(config, parts, planned, compile_step(planned).memory)
    assert [check.what for check in checks] == ["arguments", "outputs"]  # a CPU counts no peak
    arguments, outputs = checks
    assert abs(arguments.predicted - arguments.measured) <= 64 * len(jax.tree.leaves(planned.state))
    assert outputs.measured <= outputs.predicted <= outputs.measured + 16 * len(jax.tree.leaves(planned.state)) + 64
