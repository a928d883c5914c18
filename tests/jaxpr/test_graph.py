"""What depends on what in a traced function, and pieces cut out of it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.jaxpr import graph


def f(a, b):
    c = a * 2.0
    d = jnp.sin(b)
    return c + 1.0, c * d, jnp.float32(7)


def traced(fn=f, *args):
    closed = jax.make_jaxpr(fn)(*(args or (1.0, 2.0)))
    body = graph.body_of(closed)
    return closed, body.invars, body.outvars


def test_dependents_holds_the_sources_and_all_that_follows():
    closed, (a, b), (x, y, literal) = traced()
    assert {v in graph.dependents(closed, [a]) for v in (a, x, y)} == {True}
    from_b = graph.dependents(closed, [b])
    assert (y in from_b, x in from_b, a in from_b) == (True, False, False)
    assert graph.is_literal(literal)
    assert not graph.is_literal(x)


def test_uses_primitive_looks_into_nested_functions():
    def nested(x):
        inner = jax.jit(lambda z: jnp.cos(z))
        y, _ = jax.lax.scan(lambda c, _: (jax.lax.cond(c > 0, inner, lambda z: z, c), None), x, None, length=2)
        return y + jax.jit(lambda z: z + 1)(x)

    closed, _, _ = traced(nested, 1.0)
    scan, *others = [eqn for eqn in graph.body_of(closed).eqns]
    assert graph.uses_primitive(scan, "cos")
    assert not graph.uses_primitive(scan, "sin")
    assert not any(graph.uses_primitive(eqn, "cos") for eqn in others)


def test_needed_stops_at_what_is_given():
    closed, (a, b), (x, *_) = traced()
    equations, reads = graph.needed(closed, [x], given=set())
    assert [eqn.primitive.name for eqn in equations] == ["mul", "add"]
    assert (a in reads, b in reads) == (True, False)
    c = equations[0].outvars[0]
    equations, reads = graph.needed(closed, [x], given={c})
    assert [eqn.primitive.name for eqn in equations] == ["add"]
    assert (c in reads, a in reads) == (True, False)


def test_subfunction_computes_from_the_middle():
    closed, (a, b), (x, y, literal) = traced()
    c = graph.needed(closed, [x], set())[0][0].outvars[0]
    piece = graph.subfunction(closed, [c], [x, literal, c])
    assert [float(v) for v in piece([jnp.float32(5)])] == [6.0, 7.0, 5.0]
    (value,) = graph.subfunction(closed, [b, a], [y])([jnp.float32(0.5), jnp.float32(3)])
    assert float(value) == jnp.sin(0.5) * 6
    assert graph.subfunction(closed, [], [])([]) == []


def test_constants_that_the_function_closes_over_stay():
    table = jnp.arange(3.0)
    closed, invars, outvars = traced(lambda i: table[i] + table, 1)
    (value,) = graph.subfunction(closed, invars, outvars)([jnp.int32(2)])
    assert value.tolist() == [2, 3, 4]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8), st.integers(0, 7))
def test_cutting_anywhere_and_going_on_gives_the_whole(pairs, cut):
    """A random chain of additions, cut at any equation into two pieces."""

    def chain(x, y):
        values = [x, y]
        for i, j in pairs:
            values.append(values[i % len(values)] + 2.0 * values[j % len(values)])
        return values[-1]

    closed, invars, outvars = traced(chain, 3.0, 5.0)
    eqns = graph.body_of(closed).eqns
    middle = eqns[cut % len(eqns)].outvars[0]
    values = [jnp.float32(3), jnp.float32(5)]
    (at_middle,) = graph.subfunction(closed, invars, [middle])(values)
    (end,) = graph.subfunction(closed, [*invars, middle], outvars)([*values, at_middle])
    assert float(end) == float(chain(jnp.float32(3), jnp.float32(5)))


def test_what_is_handed_on_unchanged_is_read_where_it_came_from():
    """By a scan's `xs` and carry, a call, a condition, and each within another; never what one of them has changed."""

    def step(layers, x, fixed):
        def layer(carry, w):
            x, fixed = carry
            doubled, same = jax.jit(lambda w: (2 * w, w))(w)
            return (jnp.tanh(x @ w), fixed), (same, doubled)

        (x, fixed), (same, doubled) = jax.lax.scan(jax.checkpoint(layer), (x, fixed), layers)
        chosen, other = jax.lax.cond(x.sum() > 0, lambda a, b: (a, b), lambda a, b: (a, a), same, doubled)
        return x, fixed, same, doubled, chosen, other

    arguments = jnp.ones((3, 2, 2)), jnp.ones(2), jnp.float32(5)
    closed, (_, x, _), outvars = traced(step, *arguments)
    assert graph.dependents(closed, [x]) >= set(outvars)
    forwarded = graph.forwarded(closed)
    layers, x, fixed = graph.body_of(forwarded).invars
    y, fixed_out, same, doubled, chosen, other = graph.body_of(forwarded).outvars
    assert (fixed_out, same, chosen) == (fixed, layers, layers)
    assert {y, doubled, other} <= graph.dependents(forwarded, [x])
    results = graph.subfunction(forwarded, [layers, x, fixed], graph.body_of(forwarded).outvars)(arguments)
    for got, wanted in zip(results, step(*arguments), strict=True):
        assert got.tolist() == wanted.tolist()


def test_a_carry_that_changes_places_is_not_handed_on():
    def swap(a, b):
        return jax.lax.scan(lambda carry, _: (carry[::-1], carry[0]), (a, b), None, length=3)

    closed, invars, outvars = traced(swap, 1.0, 2.0)
    assert graph.body_of(graph.forwarded(closed)).outvars == outvars
    assert not set(invars) & set(outvars)


_PAIR = jax.jit(lambda x: (jnp.sin(x), jnp.cos(x) * np.arange(3.0, dtype=np.float32)))


def _called_twice(x):
    a, _ = _PAIR(x)
    b, c = _PAIR(a)
    _, d = _PAIR(b + c)
    return b * c + d


@pytest.mark.parametrize(
    "function",
    [
        _called_twice,
        jax.jit(_called_twice),
        lambda x: jax.linearize(_called_twice, x)[1](x),
        lambda x: jax.linearize(jax.jit(_called_twice), x)[1](x),
        jax.grad(lambda x: jax.jit(_called_twice)(x).sum()),
        lambda x: jax.jvp(jax.grad(lambda x: jax.jit(_called_twice)(x).sum()), (x,), (x,))[1],
        lambda x: jax.jit(lambda x: (x, 1.0, x * 2))(x),
    ],
)
@pytest.mark.parametrize("every", [True, False])
def test_what_is_entered_computes_the_same_and_defines_each_variable_once(function, every):
    closed, x = jax.make_jaxpr(function)(jnp.ones(3)), jnp.linspace(0.1, 1.0, 3)
    calls = iter(range(100))
    entered = graph.entered(closed, lambda eqn: eqn.primitive.name in graph.CALLS and (every or next(calls) % 2 == 0))
    jaxpr = graph.body_of(entered)
    defined = [
        *jaxpr.constvars,
        *jaxpr.invars,
        *(v for eqn in jaxpr.eqns for v in eqn.outvars if not graph.is_dropped(v)),
    ]
    assert len(defined) == len(set(defined))
    chex.assert_trees_all_close(graph.run(entered, [x]), graph.run(closed, [x]), rtol=1e-6)


def test_a_call_is_one_equation_of_the_same_results():
    offset = np.arange(3.0, dtype=np.float32)
    closed = jax.make_jaxpr(lambda x, y: (x + offset, y, 1.0))(jnp.ones(3), 2)
    program = jax.make_jaxpr(lambda *values: graph.call(closed, values))(jnp.ones(3), 2)
    assert [graph.is_called(eqn) for eqn in graph.body_of(program).eqns] == [True]
    chex.assert_trees_all_equal(graph.run(program, [jnp.ones(3), 2]), [1 + offset, 2, 1.0])


def test_what_a_call_hands_on_stays_the_same_object():
    """Readers ask by identity which leaves of a state a step has changed."""
    found = []

    def program(x, y):
        results = graph.call(jax.make_jaxpr(lambda x, y: (x, y + 1, x))(x, y), [x, y])
        found.append([result is x for result in results])
        return results

    jax.make_jaxpr(program)(1.0, 2.0)
    assert found == [[True, False, True]]
