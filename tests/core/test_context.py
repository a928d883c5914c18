"""Which strategy is current, and what a trace knows."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.core import context
from jdist.errors import StepError, StrategyError
from tests.toys import TWO

ONE = jdist.one_device()


@pytest.fixture(autouse=True)
def _no_strategy_left():
    yield
    jdist.set_strategy(None)


def test_default_is_current_where_none_was_chosen():
    assert jdist.get_strategy() is jdist.default()
    assert not jdist.has_strategy()
    assert context.current_strategy() is None
    assert context.current_trace() is None


def test_a_scope_may_be_opened_again_and_ends_with_an_error():
    with TWO.scope() as inner:
        assert inner is TWO
        assert jdist.get_strategy() is TWO
        with contextlib.suppress(KeyError), TWO.scope():
            assert jdist.get_strategy() is TWO
            raise KeyError
        assert jdist.get_strategy() is TWO
    assert not jdist.has_strategy()


def test_the_default_strategys_scope_is_none_of_a_strategy():
    with jdist.default().scope():
        assert jdist.get_strategy() is jdist.default()
        assert not jdist.has_strategy()
        with TWO.scope():
            assert jdist.get_strategy() is TWO


OTHERS = {
    "another": ONE,
    "one like it": jdist.mirrored(["cpu:0", "cpu:1"]),
    "default": jdist.default(),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_mixing_two_strategies_in_one_scope_is_refused(other):
    step = jdist.distribute(lambda x: x.sum(), other, args=("batch",))
    assert float(step(np.ones(2, np.float32))) in (
        1.0,
        2.0,
    )  # compiled: that it is not traced again makes no difference
    uses = {
        "scope": lambda: other.scope().__enter__(),
        "init": lambda: other.init(lambda: jnp.zeros(())),
        "run": lambda: other.run(lambda: 0),
        "step": lambda: step(np.ones(2, np.float32)),
    }
    for name, use in uses.items():
        with pytest.raises(StrategyError) as refused, TWO.scope():
            use()
        assert repr(TWO) in str(refused.value), name
        assert repr(other) in str(refused.value), name
        assert not jdist.has_strategy()
    assert float(step(np.ones(2, np.float32))) in (1.0, 2.0)


def test_another_strategys_run_inside_a_step_is_refused():
    with pytest.raises(StrategyError, match="two strategies are mixed"):
        TWO.run(lambda: ONE.run(lambda: 1).value)
    with pytest.raises(StepError, match="inside a step or another run"):
        TWO.run(lambda: TWO.run(lambda: 1).value)


class TestInReplicaContext:
    def test_by_itself_code_runs_once_as_a_replica_does(self):
        assert jdist.in_replica_context()
        with jdist.default().scope():
            assert jdist.in_replica_context()

    def test_not_in_a_scope_or_where_a_strategy_was_set(self):
        with TWO.scope():
            assert not jdist.in_replica_context()
            assert TWO.init(lambda: jnp.bool_(jdist.in_replica_context())).tolist() is False
        jdist.set_strategy(ONE)
        assert not jdist.in_replica_context()

    @pytest.mark.parametrize("transform", ["shard_map", "pmap", "jit"])
    def test_in_a_step(self, transform):
        strategy = jdist.mirrored(["cpu:0", "cpu:1"], transform=transform)
        seen = []

        def step(x):
            seen.append(jdist.in_replica_context())
            return jax.lax.cond(True, lambda y: seen.append(jdist.in_replica_context()) or y, lambda y: y, x.sum())

        with strategy.scope():
            jdist.distribute(step, strategy, args=("batch",))(np.ones(2, np.float32))
            assert not jdist.in_replica_context()
        assert len(seen) >= 2
        assert all(seen)

    def test_in_run(self):
        with TWO.scope():
            assert TWO.run(lambda: jdist.in_replica_context()).value.tolist() == [True, True]


@pytest.mark.parametrize("wrong", ["mirrored", jdist.mirrored])
def test_set_strategy_refuses_what_is_no_strategy(wrong):
    with pytest.raises(StrategyError, match=r"set_strategy needs a strategy.*jdist\.mirrored\(\)"):
        jdist.set_strategy(wrong)
    assert jdist.get_strategy() is jdist.default()


def test_set_strategy_holds_outside_every_scope_until_undone():
    jdist.set_strategy(ONE)
    assert jdist.get_strategy() is ONE
    with TWO.scope():
        assert jdist.get_strategy() is TWO
    assert jdist.has_strategy()
    jdist.set_strategy(TWO)
    assert jdist.get_strategy() is TWO
    jdist.set_strategy(None)
    assert not jdist.has_strategy()


def test_a_scope_is_the_threads_own_and_set_strategy_is_everyones():
    seen = []
    look = lambda: seen.append(jdist.get_strategy())  # noqa: E731
    with TWO.scope():
        for _ in range(2):
            thread = threading.Thread(target=look)
            thread.start()
            thread.join(timeout=10)
            jdist.set_strategy(ONE)
    assert seen == [jdist.default(), ONE]


def test_a_step_and_init_run_in_their_strategys_scope():
    seen = []

    def step(x):
        seen.append((jdist.get_strategy(), context.current_trace().strategy))
        return x.sum()

    with TWO.scope():
        TWO.init(lambda: seen.append(jdist.get_strategy()) or jnp.zeros(()))
        jdist.distribute(step, TWO, args=("batch",))(np.ones(2))
        TWO.run(lambda: seen.append(jdist.get_strategy()) or 0)
    TWO.init(lambda: seen.append(jdist.get_strategy()) or jnp.zeros(()))
    jdist.distribute(step, TWO, args=("batch",))(np.ones(2))
    TWO.run(lambda: seen.append(jdist.get_strategy()) or 0)
    assert jdist.get_strategy() is jdist.default()
    assert len(seen) >= 6
    assert all(s in (TWO, (TWO, TWO)) for s in seen)
    assert context.current_trace() is None


def test_a_trace_ends_with_an_error_in_the_step():
    def step(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jdist.distribute(step, TWO, args=("batch",))(np.ones(2))
    assert context.current_trace() is None
    assert not jdist.has_strategy()


def test_a_function_the_user_jitted_is_not_taken_from_another_strategys_cache():
    helper = jax.jit(lambda x: jdist.all_reduce(x, "sum") * jdist.num_replicas())
    x = np.ones(2, np.float32)

    def under(strategy):
        return jdist.distribute(lambda x: helper(x.sum()), strategy, args=("batch",))(x)

    assert float(helper(2.0)) == 2.0
    assert float(under(TWO)) == 4.0
    assert float(under(ONE)) == 2.0
    assert float(under(jdist.mirrored(["cpu:2", "cpu:3"], axis="batch"))) == 4.0
    assert float(helper(2.0)) == 2.0


def test_at_step_level_tells_inner_functions_from_the_step():
    seen = {}

    def step(x):
        trace = context.current_trace()

        def note(name):
            def inner(y):
                seen[name] = trace.at_step_level()
                return y

            return inner

        note("step")(x)
        jax.jit(note("jit"))(x)
        jax.lax.scan(lambda c, y: (c, note("scan")(y)), 0, x)
        jax.lax.cond(True, note("cond"), lambda y: y, x)
        jax.vmap(note("vmap"))(x)
        jax.checkpoint(note("checkpoint"))(x)
        note("after")(x)
        return x.sum()

    jdist.distribute(step, TWO, args=("batch",))(np.ones(4))
    assert seen.pop("step")
    assert seen.pop("after")
    assert seen == dict.fromkeys(("jit", "scan", "cond", "vmap", "checkpoint"), False)
