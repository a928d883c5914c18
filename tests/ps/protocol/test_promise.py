"""The promise: each closure takes effect on every shard or on none, once, with the gradients of one computation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.ps.protocol.shard import Rules
from tests.ps.protocol import protocol_world
from tests.ps.protocol.explore import explore, key, wander
from tests.ps.protocol.protocol_world import Budget, start


def name(world):
    return hash(key(world))


EXHAUSTIVE = {
    "one shard, a crash": (1, 2, 2, Budget(crashes=1)),
    "two shards, nothing wrong": (2, 2, 2, Budget()),
    "two shards, a crash": (2, 2, 1, Budget(crashes=1)),
    "two shards, a stalled worker": (2, 2, 1, Budget(suspicions=1)),
    "two shards, a duplicate": (2, 1, 1, Budget(duplicates=1)),
    "two shards, a rollback": (2, 1, 1, Budget(rollbacks=1)),
    "one shard, a closure cancelled, a crash": (1, 2, 2, Budget(cancels=1, crashes=1)),
    "two shards, a closure cancelled, a rollback": (2, 1, 2, Budget(cancels=1, rollbacks=1)),
    "one shard, closures declined, a crash": (1, 2, 2, Budget(declines=2, crashes=1)),
    "one shard, a closure declined, a rollback": (1, 2, 2, Budget(declines=1, rollbacks=1)),
}
LARGE = {
    "two shards, a bound on staleness": (2, 2, 2, Budget()),
    "two shards, a crash and a duplicate": (2, 1, 1, Budget(crashes=1, duplicates=1)),
    "two shards, a stalled worker and a duplicate": (2, 1, 1, Budget(suspicions=1, duplicates=1)),
    "two shards, a rollback and a crash": (2, 1, 1, Budget(rollbacks=1, crashes=1)),
}


@pytest.mark.parametrize(
    "case", [*EXHAUSTIVE, *(pytest.param(case, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]) for case in LARGE)]
)
def test_in_every_order_of_a_small_history(case):
    shards, workers, closures, budget = {**EXHAUSTIVE, **LARGE}[case]
    rules = Rules(max_staleness=0 if "staleness" in case else None)
    world = start(shards=shards, workers=workers, closures=closures, budget=budget, rules=rules)
    assert explore(protocol_world, world, name=name) > 100


def test_closures_of_two_parts_never_mix_after_a_rollback_either():
    world = start(shards=1, workers=2, closures=3, budget=Budget(rollbacks=1), rules=Rules(), depth=2, parts=(2,))
    assert world.dispatch.parts == (2,)
    assert sum(len(known.closures) for known in world.dispatch.workers.values()) == 2
    assert explore(protocol_world, world, name=name) > 100


@pytest.mark.parametrize("max_staleness", [None, 0, 1])
@pytest.mark.parametrize("shards", [1, 2, 3])
@settings(deadline=None, max_examples=25)
@given(
    randomness=st.randoms(use_true_random=False),
    workers=st.integers(1, 3),
    depth=st.integers(1, 3),
    parts=st.sampled_from([(), (2,), (1, 4)]),
)
def test_in_random_orders_of_long_histories(shards, max_staleness, randomness, workers, depth, parts):
    budget = Budget(crashes=3, suspicions=2, duplicates=8, rollbacks=1, cancels=1, declines=3)
    rules = Rules(max_staleness=max_staleness)
    how = {"budget": budget, "depth": depth, "rules": rules, "parts": parts}
    world = wander(protocol_world, start(shards=shards, workers=workers, closures=6, **how), randomness)
    assert world.dispatch.is_idle
