"""Which strategy is current, and what a trace knows."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import context

TWO = jdist.mirrored(["cpu:0", "cpu:1"])
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


def test_scopes_nest_and_end_with_an_error():
    with TWO.scope() as inner:
        assert inner is TWO
        assert jdist.get_strategy() is TWO
        with contextlib.suppress(KeyError), ONE.scope():
            assert jdist.get_strategy() is ONE
            raise KeyError
        assert jdist.get_strategy() is TWO
        with jdist.default().scope():
            assert jdist.get_strategy() is jdist.default()
            assert not jdist.has_strategy()
    assert not jdist.has_strategy()


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

    with ONE.scope():
        TWO.init(lambda: seen.append(jdist.get_strategy()) or jnp.zeros(()))
        jdist.distribute(step, TWO, args=("batch",))(np.ones(2))
        TWO.run(lambda: seen.append(jdist.get_strategy()) or 0)
        assert jdist.get_strategy() is ONE
    assert len(seen) >= 3
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
