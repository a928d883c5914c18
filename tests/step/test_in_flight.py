"""At most so many steps not waited for."""

import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.step.in_flight import Window, wait_for


class Token:
    """Stands for a device array that counts who waited for it."""

    def __init__(self, value=0):
        self.value, self.waits = value, 0

    def block_until_ready(self):
        self.waits += 1
        return self

    def addressable_data(self, index):
        return np.asarray([self.value, index])


def values_to(seen):
    return lambda value, lineage: seen.append(value)


def window(limit, seen=None):
    return Window(jdist.default(), limit, values_to([] if seen is None else seen))


@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_never_more_than_the_limit_and_the_oldest_first(limit):
    """Each wait is for the older half at most, so that the newer half keeps the devices busy."""
    seen, newest = [], -1
    held = window(limit, seen)
    tokens = [Token(value) for value in range(6 * limit)]
    for number, token in enumerate(tokens):
        held.add(token)
        newest = max([newest, *(i for i, t in enumerate(tokens) if t.waits)])
        in_flight = number - newest
        assert in_flight < max(limit, 1) or limit == 1
        assert in_flight >= limit // 2 or newest < 0
    assert newest >= 0
    assert seen, "the tokens' values were never looked at"
    assert [int(value[0]) for value in seen] == sorted(int(value[0]) for value in seen)


def test_drain_looks_at_the_newest_and_forgets_all():
    seen, tokens = [], [Token(1), Token(2)]
    held = window(3, seen)
    for token in tokens:
        held.add(token)
    held.drain()
    assert [int(token[0]) for token in seen] == [2]
    held.drain()
    assert len(seen) == 1


def test_an_error_of_inspect_reaches_the_caller_and_leaves_an_empty_window():
    def inspect(token, lineage):
        raise FloatingPointError(int(token[0]))

    held = Window(jdist.default(), 3, inspect)
    held.add(Token(5))
    with pytest.raises(FloatingPointError, match="5"):
        held.drain()
    held.drain()


def test_clear_forgets():
    seen = []
    held = window(3, seen)
    held.add(Token())
    held.clear()
    held.drain()
    assert not seen


def test_wait_for_waits_for_the_strategys_steps_and_looks_at_those_that_made_the_state():
    mine, other, state = jdist.one_device(), jdist.one_device(), object()
    seen, unseen, elsewhere = [], [], []
    first = Window(mine, 3, values_to(seen), lambda: state)
    second = Window(mine, 3, values_to(unseen), object)
    third = Window(other, 3, values_to(elsewhere), lambda: state)
    tokens = [Token(), Token(), Token()]
    for held, token in zip((first, second, third), tokens, strict=True):
        held.add(token)
    wait_for(mine, state)
    assert (len(seen), len(unseen), len(elsewhere)) == (1, 0, 0)
    assert [token.waits for token in tokens] == [0, 1, 0]  # reading the first one's value is a wait as well
    second.drain()
    assert len(unseen) == 1


def test_a_dropped_window_is_forgotten():
    strategy, seen = jdist.one_device(), []
    held = Window(strategy, 3, values_to(seen))
    held.add(Token())
    del held
    wait_for(strategy, None)
    assert not seen


@pytest.mark.parametrize("limit", [1, 3])
def test_a_step_never_runs_further_ahead(limit):
    step = jdist.distribute(lambda w, b: (w + 1, {}), jdist.one_device(), max_in_flight=limit)
    state, most = jnp.float32(0), 0
    for _ in range(3 * limit + 2):
        state, _ = step(state, {"x": np.ones(1)})
        most = max(most, len(step._window._tokens))
    assert most == limit - 1
    step.wait()
    assert len(step._window._tokens) == 0


@pytest.mark.parametrize("kind", ["evaluation", "apply"])
def test_every_kind_of_call_is_waited_for(kind):
    """Some 200 calls in flight over eight virtual CPU devices end in an abort of the process."""
    strategy = jdist.mirrored()
    state = strategy.init(lambda: jnp.ones((256, 256)))

    def measure(state, batch):
        return jnp.mean(batch["x"] @ state)

    def train(state, batch):
        return state * 1.0, measure(state, batch)

    if kind == "evaluation":
        step = jdist.distribute(measure, strategy, returns=("metrics",))
    else:
        step = jdist.distribute(train, strategy, non_finite="apply", check_replicas=0)
    batch = {"x": np.ones((512, 256), np.float32)}
    for _ in range(300):
        result = step(state, batch)
        if kind == "apply":
            state, result = result
    assert float(result) == 256
