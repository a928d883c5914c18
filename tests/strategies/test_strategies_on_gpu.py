"""Every strategy's step, compiled by XLA's GPU compiler for H100s that are not here."""

import re

import jax
import pytest

import jdist
from jdist.plan.hlo import bytes_accessed, overlap
from jdist.plan.target import find_target_devices, parse_target, strategy_on
from tests.strategies.gpu_steps import PARAMS_BYTES, STATE, Compiled, needs_compiler

pytestmark = needs_compiler
SCALARS = 4 * 2  # the number of real rows, the loss


def exchanged(compiled):
    """Kind, number of groups, their size and how many of each a host has, of every kind of collective."""
    return {(c.kind, c.groups, c.group_size, c.per_domain) for c in compiled.collectives}


def total(compiled):
    assert all(c.certain for c in compiled.collectives)
    return sum(c.bytes for c in compiled.collectives)


def check_asynchronous(compiled):
    """Every all-reduce starts and ends apart, but for scalars, which JAX 0.12 has wait."""
    whole = re.findall(r"= (\S+) all-reduce\(", compiled.text)
    assert all(shape.startswith("f32[]") for shape in whole), whole
    assert compiled.text.count(" all-reduce-start(") == compiled.text.count(" all-reduce-done(") > 0
    assert "is_scheduled=true" in compiled.module.header


@pytest.fixture(scope="module")
def mirrored():
    return Compiled(jdist.mirrored(topology="h100:8"))


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_one_device_exchanges_nothing(name):
    target = parse_target("h100:1")
    devices = find_target_devices(target)
    strategy = strategy_on(target, devices, "one_device") if name == "one_device" else jdist.mirrored(topology="h100:1")
    compiled = Compiled(strategy)
    assert compiled.collectives == ()
    assert compiled.aliases == len(jax.tree.leaves(STATE))


def test_mirrored_exchanges_each_gradient_once(mirrored):
    assert exchanged(mirrored) == {("all-reduce", 1, 8, 8)}
    assert total(mirrored) == PARAMS_BYTES + SCALARS
    assert mirrored.aliases == len(jax.tree.leaves(STATE))  # the donated state is used again
    check_asynchronous(mirrored)


def test_the_global_view_exchanges_the_same(mirrored):
    compiled = Compiled(jdist.mirrored(topology="h100:8", transform="jit"))
    assert exchanged(compiled) == exchanged(mirrored)
    assert PARAMS_BYTES <= total(compiled) <= PARAMS_BYTES + SCALARS
    check_asynchronous(compiled)


def test_multi_worker_crosses_the_network():
    compiled = Compiled(jdist.multi_worker(topology="h100:4x8"))
    assert exchanged(compiled) == {("all-reduce", 1, 32, 8)}
    assert total(compiled) == PARAMS_BYTES + SCALARS
    check_asynchronous(compiled)


def test_hierarchical_reduces_within_each_host_first():
    compiled = Compiled(jdist.multi_worker(topology="h100:4x8", all_reduce="hierarchical"))
    found = {(kind, groups, size, per_host) for kind, groups, size, per_host in exchanged(compiled)}
    assert ("reduce-scatter", 4, 8, 8) in found
    assert ("all-gather", 4, 8, 8) in found
    assert ("all-reduce", 8, 4, 1) in found  # between the hosts, an eighth each
    between = sum(c.bytes for c in compiled.collectives if c.per_domain == 1)
    assert PARAMS_BYTES / 8 <= between <= PARAMS_BYTES / 8 + 1e5


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        # Of each kind: how many, and how often the gradients' bytes they exchange together.
        ("psum", {"all-reduce": (2, 1)}),
        ({"name": "bucketed", "bytes_per_pack": 8_000_000}, {"all-reduce": (5, 1)}),
        ("ring", {"collective-permute": (2 * 7, 2 * 7 / 8)}),
        ({"name": "compressed", "dtype": "bf16"}, {"all-to-all": (1, 1 / 2), "all-gather": (1, 1 / 2)}),
        # With the scale of each block of 256 numbers.
        ({"name": "compressed", "dtype": "int8"}, {"all-to-all": (1, 65 / 256), "all-gather": (1, 65 / 256)}),
        (
            {"name": "hierarchical", "inner": 4, "outer": 2},
            {"reduce-scatter": (1, 1), "all-reduce": (1, 1 / 4), "all-gather": (1, 1)},
        ),
        ("to_one_device", {"collective-permute": (2 * 3, 2 * 3)}),
    ],
    ids=lambda value: value["name"] + value.get("dtype", "") if isinstance(value, dict) and "name" in value else None,
)
def test_every_reduction_exchanges_what_it_says(reduction, expected):
    compiled = Compiled(jdist.mirrored(topology="h100:8", all_reduce=reduction))
    assert all(c.certain for c in compiled.collectives)
    found = {}
    for c in compiled.collectives:
        if c.bytes > 16 * c.count:  # no scalars: the loss, flags, the number of real rows
            count, times = found.get(c.kind, (0, 0))
            found[c.kind] = count + c.count, times + c.bytes / PARAMS_BYTES
    scalars = sum(c.count for c in compiled.collectives) - sum(count for count, _ in found.values())
    assert set(found) == set(expected)
    for kind, (count, times) in expected.items():
        # Scalars go with the gradients, or by themselves.
        assert count <= found[kind][0] <= count + 1
        assert found[kind][1] == pytest.approx(times, rel=2e-3)
    assert scalars <= 2


def test_microbatches_are_exchanged_once_an_update(mirrored):
    compiled = Compiled(jdist.mirrored(topology="h100:8"), accumulate=4)
    assert exchanged(compiled) == exchanged(mirrored)
    assert total(compiled) == total(mirrored)


def test_steps_of_a_call_exchange_each_their_own(mirrored):
    compiled = Compiled(jdist.mirrored(topology="h100:8"), steps_per_call=3)
    assert exchanged(compiled) == exchanged(mirrored)
    assert total(compiled) == 3 * total(mirrored)
    assert compiled.aliases == len(jax.tree.leaves(STATE))


@pytest.mark.parametrize(("precision", "kind"), [("bf16", "bf16"), ("fp16", "f16")])
def test_products_in_16_bits_take_operands_of_16_bits(precision, kind, mirrored):
    compiled = Compiled(jdist.mirrored(topology="h100:8"), precision=jdist.precision(precision))
    operands = {shape.partition("[")[0] for shape in dot_operands(compiled.module)}
    assert operands == {kind}
    assert {shape.partition("[")[0] for shape in dot_operands(mirrored.module)} == {"f32"}


def dot_operands(module):
    """The shapes of what matrix products read, in fusions and in calls of cuBLAS."""
    shapes = []
    for known in module.computations.values():
        for instruction in known.values():
            if instruction.opcode == "dot" or '"__cublas' in instruction.attributes:
                shapes += [known[name].shape for name in instruction.operands[:2] if name in known]
    return shapes


@pytest.mark.parametrize("policy", ["raise", "skip", "apply"])
def test_the_guard_exchanges_no_more(policy, mirrored):
    compiled = Compiled(jdist.mirrored(topology="h100:8"), non_finite=policy)
    assert exchanged(compiled) == exchanged(mirrored)
    assert total(compiled) == total(mirrored)


def test_a_state_of_126_mb_takes_its_memory_once(mirrored):
    memory = mirrored.memory
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(STATE))
    assert 120e6 < state < 165e6
    assert state <= memory.argument_size_in_bytes <= state + 1e6
    assert memory.alias_size_in_bytes >= state
    assert memory.temp_size_in_bytes <= 2 * PARAMS_BYTES  # the gradients, and what sums them


def test_the_bytes_of_a_step_are_near_those_by_hand(mirrored):
    products = 3 * PARAMS_BYTES  # each layer's weights are read twice, and its gradient is written
    summed, guarded, adam = 2 * PARAMS_BYTES, PARAMS_BYTES, 7 * PARAMS_BYTES  # adam reads four arrays, and writes three
    by_hand = products + summed + guarded + adam
    # The compiler joins gradients before it sums them, and takes them apart again.
    assert by_hand < bytes_accessed(mirrored.module) < by_hand + 5 * PARAMS_BYTES


def test_packs_are_in_flight_while_lower_layers_compute(mirrored):
    """What `bucketed` is for: a pack of gradients is sent while those of the layers below are computed."""
    packed = Compiled(jdist.mirrored(topology="h100:8", all_reduce={"name": "bucketed", "bytes_per_pack": 8_000_000}))
    total_bytes, beside = overlap(packed.module)
    assert PARAMS_BYTES <= total_bytes <= PARAMS_BYTES + SCALARS
    assert beside >= 0.7 * total_bytes
    # One all-reduce of the whole tree, which the compiler cuts by size alone, mostly starts when all products are done.
    whole, whole_beside = overlap(mirrored.module)
    assert PARAMS_BYTES <= whole <= PARAMS_BYTES + SCALARS
    assert whole_beside <= 0.5 * whole
    assert (
        packed.memory.temp_size_in_bytes < 0.8 * mirrored.memory.temp_size_in_bytes
    )  # a pack's sum is used as it comes
