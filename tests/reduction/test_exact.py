"""The exact algorithms against plain sums, and what they are made of."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StrategyError
from jdist.reduction import bucketed, hierarchical, psum, ring, to_one_device
from tests.by_default import some
from tests.reduction.on_replicas import compiled, in_stablehlo, lowered, mapped, mesh_of, tpu_mesh

ALGORITHMS = {
    "psum": lambda n: psum(),
    "ring": lambda n: ring(),
    "to_one_device": lambda n: to_one_device(),
    "hierarchical, groups of 2": lambda n: hierarchical(min(n, 2), n // min(n, 2)),
    "hierarchical, 2 groups": lambda n: hierarchical(n // min(n, 2), min(n, 2)),
    "hierarchical, one group": lambda n: hierarchical(n, 1),
    "bucketed, one pack": lambda n: bucketed(0),
    "bucketed": lambda n: bucketed(60),
}


def trees(n, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "odd": rng.normal(size=(n, 7)).astype(np.float32),
        "deep": [(rng.normal(size=(n, 3, 5)).astype(np.float32), rng.integers(-9, 9, (n, 2, 2)).astype(np.int32))],
        "scalar": rng.normal(size=n).astype(np.float32),
        "empty": np.zeros((n, 0, 4), np.float32),
        "half": jnp.asarray(rng.integers(-8, 9, (n, 11)), jnp.bfloat16),  # small integers: their sums are exact
        "bytes": rng.integers(0, 9, (n, 13)).astype(np.uint8),
        "above a float's whole numbers": rng.integers(2**24, 2**25, (n, 3)).astype(np.int32),
        "bools": rng.integers(0, 2, (n, 5)).astype(bool),
    }


@pytest.mark.parametrize("n", some([1, 2, 4, 8], [1, 8]))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_sums_every_leaf_and_gives_all_replicas_the_same_bits(name, n):
    reduction, given = ALGORITHMS[name](n), trees(n)
    sums, carry = mapped(reduction, mesh_of(n))(given, ())
    expected, _ = mapped(psum(), mesh_of(n))(given, ())
    assert carry == ()
    assert reduction.exact
    assert jax.tree.structure(sums) == jax.tree.structure(given)

    def compare(got, want, own):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        got = np.asarray(got)
        assert len({row.tobytes() for row in got}) == 1
        is_whole = np.issubdtype(got.dtype, np.integer)
        np.testing.assert_allclose(got[0], np.asarray(own, np.float64).sum(0), rtol=0 if is_whole else 1e-6, atol=1e-6)

    jax.tree.map(compare, sums, expected, given)


@pytest.mark.parametrize("n", some([3, 5, 6, 7], [3, 6]))
@pytest.mark.parametrize("reduction", [ring(), to_one_device()], ids=lambda r: r.name)
def test_any_number_of_replicas(reduction, n):
    given = trees(n)
    sums, _ = mapped(reduction, mesh_of(n))(given, ())
    np.testing.assert_allclose(np.asarray(sums["odd"])[-1], given["odd"].sum(0), atol=1e-5)
    np.testing.assert_array_equal(np.asarray(sums["deep"][0][1])[-1], given["deep"][0][1].sum(0))


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
@pytest.mark.parametrize("n", some([1, 4], [4]))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_in_a_step_of_either_transform(name, n, transform):
    strategy = jdist.mirrored(jax.devices()[:n], transform=transform, all_reduce=ALGORITHMS[name](n))

    def step(w, batch):
        loss, grads = jdist.value_and_grad(lambda w: jdist.mean((batch["x"] @ w["a"] + w["b"] - 1) ** 2))(w)
        # A sum in a loss of its own: its gradient is summed over replicas too.
        through = jax.grad(lambda x: (jdist.all_reduce(x, "sum") ** 2).sum())(batch["x"][0])
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), {"loss": loss, "through": through.sum()}

    x = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    w, metrics = jdist.distribute(step, strategy)({"a": np.ones(3, np.float32), "b": 0.0}, {"x": x})

    expected = jax.grad(lambda w: jnp.mean((x @ w["a"] + w["b"] - 1) ** 2))({"a": jnp.ones(3), "b": 0.0})
    np.testing.assert_allclose(strategy.fetch(w)["a"], 1 - 0.1 * expected["a"], atol=1e-6)
    np.testing.assert_allclose(strategy.fetch(w)["b"], -0.1 * expected["b"], atol=1e-6)
    firsts = x[:: 8 // n]
    np.testing.assert_allclose(metrics["through"], 2 * n * firsts.sum(), rtol=1e-4)


def test_structure():
    given = trees(8)
    floats = {"a": given["odd"], "b": given["deep"][0][0]}  # one dtype, so one vector

    def kinds(reduction):
        return in_stablehlo(lowered(reduction, floats, mesh_of(8)))

    assert kinds(psum()) == {"all_reduce": 2}
    assert kinds(ring()) == {"collective_permute": 2}  # in two loops of 7 rounds
    assert kinds(to_one_device()) == {"collective_permute": 6}
    assert kinds(hierarchical(4, 2)) == {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1}


def test_hierarchical_sums_parts_across_groups():
    text = lowered(hierarchical(4, 2), {"a": np.zeros((8, 10), np.float32)}, mesh_of(8)).as_text()
    groups = dict(re.findall(r'stablehlo\.(\w+)".*?replica_groups = dense<(\[.*?\]\])>', text))
    assert groups["reduce_scatter"] == groups["all_gather"] == "[[0, 1, 2, 3], [4, 5, 6, 7]]"
    assert groups["all_reduce"] == "[[0, 4], [1, 5], [2, 6], [3, 7]]"
    assert re.search(r"all_reduce.*?\(tensor<3xf32>\) -> tensor<3xf32>", text, re.DOTALL)  # a quarter of 10, filled up


def test_hierarchical_over_two_mesh_axes():
    from jax.sharding import AxisType, Mesh

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "chip"), axis_types=(AxisType.Auto,) * 2)
    given = trees(8)
    for reduction in (hierarchical("chip", "host"), hierarchical(4, 2), ring(), to_one_device(), bucketed(60)):
        sums, _ = mapped(reduction, mesh)(given, ())
        np.testing.assert_allclose(np.asarray(sums["odd"]), np.tile(given["odd"].sum(0), (8, 1)), atol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 8), (2, -4), (True, 8), (2.0, 4), ("a", "a"), ("a", 4), ("", "b"), (None, 2)])
def test_hierarchical_refuses_what_are_no_sizes_or_axes(sizes):
    with pytest.raises(StrategyError, match=r"`inner` is .* they must be two integers"):
        hierarchical(*sizes)


@pytest.mark.parametrize("num_replicas", [2, 8])
def test_sizes_that_do_not_fit_are_refused_when_the_strategy_is_built(num_replicas):
    with pytest.raises(StrategyError, match=rf"hierarchical\(3, 2\) is for 6 replicas, but there are {num_replicas}"):
        jdist.mirrored(jax.devices()[:num_replicas], all_reduce=hierarchical(3, 2))
    assert jdist.mirrored(jax.devices()[:6], all_reduce=hierarchical(3, 2)).num_replicas == 6
    assert jdist.mirrored("cpu:0", all_reduce=hierarchical(3, 2)).num_replicas == 1  # where it plays no part


def test_hierarchical_refuses_sizes_and_axes_that_do_not_fit_the_mesh():
    with pytest.raises(StrategyError, match="makes 8 replicas; there are 4"):
        lowered(hierarchical(4, 2), {"a": np.ones((4, 1), np.float32)}, mesh_of(4))
    with pytest.raises(StrategyError, match=r"spread over the mesh axes \('replica',\), not over 'chip' and 'host'"):
        lowered(hierarchical("chip", "host"), {"a": np.ones((8, 1), np.float32)}, mesh_of(8))


def test_packs_are_one_collective_each_in_the_compiled_program():
    given = [np.zeros((8, 1000), np.float32) for _ in range(30)]
    for limit, count in ((0, 1), (120_000, 1), (40_000, 3), (4_000, 30)):
        collectives = compiled(lowered(bucketed(limit), given, mesh_of(8)))
        assert [kind for kind, _ in collectives] == ["all-reduce"] * count


def test_packs_are_one_collective_each_when_compiled_for_tpu(monkeypatch):
    mesh = tpu_mesh(monkeypatch)
    given = [np.zeros((8, 1000), np.float32) for _ in range(30)]
    for limit, count in ((0, 1), (40_000, 3), (4_000, 30)):
        collectives = compiled(lowered(bucketed(limit), given, mesh))
        assert [kind for kind, _ in collectives] == ["all-reduce"] * count


def test_what_is_not_finite_stays_in_its_own_pack():
    given = [np.ones((2, 4), np.float32), np.ones((2, 4), np.float32), np.ones((2, 4), np.int32)]
    given[0][1, 0] = np.inf
    sums, _ = mapped(bucketed(1), mesh_of(2))(given, ())
    assert not np.isfinite(sums[0][0, 0])
    assert np.asarray(sums[1]).tolist() == np.asarray(sums[2]).tolist() == [[2, 2, 2, 2]] * 2
