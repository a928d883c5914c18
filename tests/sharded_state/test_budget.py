"""The model of configs/text_sharded.yaml: a copy of its state is more than a device's budget, a part of it is not."""

import collections
import gc
import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

import jdist
from jdist.experiment.load import load
from jdist.experiment.prepare import prepare, state_maker
from jdist.experiment.validate import validate
from jdist.support.arrays import is_key

pytestmark = pytest.mark.xdist_group("sharded_budget")  # they share the runs
CONFIG = Path(__file__).parents[2] / "configs" / "text_sharded.yaml"
BUDGET = 32_000_000  # bytes of a device, as the config's header has it
OVERRIDES = ["train.global_batch=8", "train.optimizer.learning_rate=1e-3"]  # without the warm-up: few steps do much
STEPS = 3


def held(arrays):
    """The bytes of arrays on each device."""
    found = collections.Counter()
    for x in arrays:
        for shard in (jax.random.key_data(x) if is_key(x) else x).addressable_shards:
            found[shard.device] += shard.data.nbytes
    return found


def trained(strategy, files):
    """The config's first steps: losses, the report of the state, its bytes and those of all that is alive on each device."""
    document = load(CONFIG, [*OVERRIDES, f"strategy.name={strategy}", f"task.options.files={files}"])
    config = validate(document)
    parts = prepare(config, document)
    gc.collect()
    before = jax.live_arrays()
    state, losses = parts.strategy.init(*state_maker(config, parts)), []
    step = jdist.distribute(parts.task.train_step, parts.strategy)
    for batch in itertools.islice(parts.strategy.distribute_dataset(parts.train_data, prefetch=0), STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    memory = step.lower(state, batch).compile().memory_analysis()
    gc.collect()
    others = set(map(id, before))
    alive = [x for x in jax.live_arrays() if id(x) not in others]
    return losses, parts.strategy.report(state), held(jax.tree.leaves(state)), held(alive), memory.temp_size_in_bytes


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(20):
        (folder / f"{number}.txt").write_text("".join(f"{number * i} of {i}\n" for i in range(200)))
    return {name: trained(name, folder / "*.txt") for name in ("mirrored", "sharded")}


def test_a_copy_of_the_state_is_more_than_the_budget_and_a_part_is_not(runs):
    for _, report, state, alive, _ in runs.values():
        assert set(state.values()) == {report.bytes_per_device}
        assert state.keys() == alive.keys() == set(jax.devices())
    _, whole, copies, _, _ = runs["mirrored"]
    _, parts, _, alive, temporaries = runs["sharded"]
    assert min(copies.values()) == whole.num_bytes > BUDGET
    assert parts.bytes_per_device <= (1 / 8 + 0.02) * whole.num_bytes
    assert max(alive.values()) + temporaries < BUDGET  # all that is there, and what a step takes besides


def test_the_steps_are_the_same(runs):
    losses, expected = (runs[name][0] for name in ("sharded", "mirrored"))
    assert losses[-1] < losses[0] - 0.1
    np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-6)
