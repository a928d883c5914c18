"""Strategies without a name of their own for TPUs, compiled by the real TPU compiler on the topologies of test_tpu.py."""

import importlib.util
import itertools

import jax
import pytest

from jdist.plan.collectives import collectives, host_copies
from jdist.plan.hlo import parse
from jdist.plan.target import find_target_devices, parse_target, strategy_on
from tests.by_default import some
from tests.strategies.tpu_steps import (
    COLLECTIVE,
    TOPOLOGIES,
    check_donated,
    digits_batch,
    digits_step,
    host_computations,
    size_bytes,
    transformer_batch,
    transformer_step,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed here: pip install 'jdist[plan-tpu]'"
)
MODELS = {"cnn": (digits_step, digits_batch), "transformer": (transformer_step, transformer_batch)}
# The compiler takes its time.
CASES = pytest.mark.parametrize(
    ("topology", "model"), some(itertools.product(TOPOLOGIES, MODELS), [("v5e:2x4", "cnn"), ("v5p:16x16x16", "cnn")])
)
REDUCES, GATHERS = ("all-reduce", "reduce-scatter"), ("all-gather", "collective-permute")


def compiled(topology, strategy, model):
    target = parse_target(topology)
    make_step, make_batch = MODELS[model]
    step, state = make_step(strategy_on(target, find_target_devices(target), strategy))
    lowered = step.lower(state, make_batch(4 * step.strategy.num_replicas))
    program = lowered.compile()
    return step.strategy, state, program, parse(program.as_text())


@CASES
def test_one_device_exchanges_nothing(topology, model):
    strategy, state, _, module = compiled(topology, "one_device", model)
    assert collectives(module, dict(strategy.mesh.shape)) == ()
    assert host_copies(module)[0] == 0
    check_donated(module, state)


@CASES
def test_central_storage_keeps_the_state_on_the_hosts_and_exchanges_it_on_the_devices(topology, model):
    strategy, state, program, module = compiled(topology, "central_storage", model)
    count, params = TOPOLOGIES[topology], size_bytes(state.params)
    found = collectives(module, dict(strategy.mesh.shape))
    assert {c.group_size for c in found} <= {count, count // 2}  # halves: what a gather's neighbours pass on
    assert all(c.certain for c in found)
    on_hosts = host_computations(program.as_text())
    assert on_hosts
    assert not any(COLLECTIVE.search(text) for text in on_hosts)
    assert host_copies(module)[0] > 0
    check_donated(module, state)

    reduced = sum(c.bytes for c in found if c.kind in REDUCES)
    gathered = sum(c.bytes for c in found if c.kind in GATHERS)
    # Each gradient is reduced once and each parameter gathered once, by an all-reduce too where the compiler finds that
    # cheaper. On v5e it turns a gather of the CNN into a loop of products over the parts, which passes them on more often.
    most = 5 if (topology, model) == ("v5e:2x4", "cnn") else 2
    padding = 0.02 * params + 1e4
    assert params <= reduced <= 2 * (params + padding)
    assert 2 * params <= reduced + gathered <= most * (params + padding)

    memory = program.memory_analysis()
    hosts = count * memory.host_argument_size_in_bytes
    tiles = count * len(jax.tree.leaves(state)) * 4096  # an array takes at least one tile
    assert size_bytes(state) - 1e4 <= hosts <= 1.05 * size_bytes(state) + tiles
    assert memory.host_alias_size_in_bytes == memory.host_argument_size_in_bytes
