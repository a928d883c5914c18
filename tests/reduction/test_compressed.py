"""Compressed all-reduce: what crosses the wire, what is left out, and that it arrives later."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StrategyError
from jdist.reduction import Reduction, compressed
from tests.by_default import some
from tests.reduction.on_replicas import carries, compiled, in_stablehlo, lowered, mapped, mesh_of, tpu_mesh

DTYPES = ["bf16", "int8"]
WIRE = {"bf16": "u16", "int8": "s8"}  # the bits of bf16, as XLA's CPU backend sends float32 for it


def trees(n, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(n, 33, 17)).astype(np.float32),
        "small": (1e-4 * rng.normal(size=(n, 300))).astype(np.float32),
        "half": jnp.asarray(rng.normal(size=(n, 5)), jnp.bfloat16),
        "count": rng.integers(0, 9, (n, 3)).astype(np.int32),
    }


def floats(tree):
    return np.concatenate(
        [np.asarray(tree[k], np.float64).reshape(len(tree[k]), -1) for k in ("half", "small", "w")], 1
    )


@pytest.mark.parametrize("n", some([2, 3, 8], [2, 3]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_arrives_and_what_is_left_out_make_the_sum(dtype, n):
    reduction, given = compressed(dtype), trees(n)
    run, left = mapped(reduction, mesh_of(n)), carries(reduction, given, n)
    for round_ in range(3):
        given = trees(n, seed=round_)
        owed = floats(given).sum(0) + np.asarray(left, np.float64).sum(0)
        sums, left = run(given, left)
        assert sums["half"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(sums["count"]), np.tile(given["count"].sum(0), (n, 1)))
        for leaf in jax.tree.leaves(sums):
            assert len({row.tobytes() for row in np.asarray(leaf)}) == 1
        arrived, remain = floats(sums)[0], np.asarray(left, np.float64).sum(0)
        in_float32 = np.s_[5:]  # the first five come back rounded to bf16, as they came
        np.testing.assert_allclose((arrived + remain)[in_float32], owed[in_float32], atol=1e-5)
        assert np.abs(remain).max() > 1e-5  # it does round
        error = np.linalg.norm(arrived - floats(given).sum(0)) / np.linalg.norm(arrived)
        assert error < {"bf16": 0.01, "int8": 0.03}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_else_crosses_the_wire(dtype):
    given = {"w": np.zeros((8, 1000), np.float32), "b": np.zeros((8, 9), np.float32)}
    program = lowered(compressed(dtype), given, mesh_of(8))
    assert in_stablehlo(program) == {"all_to_all": 1, "all_gather": 1}
    assert sorted(compiled(program)) == [
        ("all-gather", frozenset({WIRE[dtype]})),
        ("all-to-all", frozenset({WIRE[dtype]})),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_else_crosses_the_wire_of_a_tpu(dtype, monkeypatch):
    program = lowered(compressed(dtype), {"w": np.zeros((8, 100_000), np.float32)}, tpu_mesh(monkeypatch))
    assert sorted(compiled(program)) == [
        ("all-gather", frozenset({WIRE[dtype]})),
        ("all-to-all", frozenset({WIRE[dtype]})),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_xla_would_send_float32_where_a_program_says_bf16(dtype):
    """The reason for sending bits; once this fails, `compressed` can send bf16 itself."""
    wire = jnp.bfloat16 if dtype == "bf16" else jnp.int8

    def apply(tree, carry, axes):
        return jax.lax.all_gather(tree.astype(wire), axes, tiled=True)[: tree.size].astype(jnp.float32), carry

    program = lowered(Reduction("plain", lambda tree: (), apply), np.zeros((8, 64), np.float32), mesh_of(8))
    assert compiled(program) == [("all-gather", frozenset({"f32" if dtype == "bf16" else "s8"}))]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_seen_by_all_and_not_kept(dtype, bad):
    reduction, given = compressed(dtype), trees(4)
    given["w"][2, 5, 5] = bad
    sums, left = mapped(reduction, mesh_of(4))(given, carries(reduction, given, 4))
    assert not np.isfinite(np.asarray(sums["w"])[:, 5, 5]).any()
    assert np.isfinite(np.asarray(left)).all()


def test_a_block_of_zeros_stays_zero():
    reduction, given = compressed("int8"), {"w": np.zeros((4, 600), np.float32)}
    sums, left = mapped(reduction, mesh_of(4))(given, carries(reduction, given, 4))
    assert not np.asarray(sums["w"]).any()
    assert not np.asarray(left).any()


@pytest.mark.parametrize("dtype", ["float16", "int4", None, 8])
def test_other_types_are_refused(dtype):
    with pytest.raises(StrategyError, match="it must be 'bf16' or 'int8'"):
        compressed(dtype)


def forgetful(dtype):
    """As `compressed`, without the residuals of the step before."""
    whole = compressed(dtype)
    return whole._replace(apply=lambda tree, left, axes: whole.apply(tree, jnp.zeros_like(left), axes))


def distance(reduction, dtype, steps=600):
    """How far from the minimum a step stays whose gradient is small beside something large that cancels in the sum.

    In bf16 the large part is added to the small one, in int8 it is another element of the same block.
    """
    strategy = jdist.mirrored(jax.devices()[:4], all_reduce=reduction)

    @jdist.distribute(strategy)
    def step(w, batch):
        def loss(w):
            pull = 1000 * batch["sign"].mean()
            return ((w["small"] - 1) ** 2).sum() + pull * (w["small"].sum() if dtype == "bf16" else w["large"])

        value, grads = jdist.value_and_grad(loss)(w)
        return jax.tree.map(lambda p, g: p - 0.02 * g, w, grads), {"loss": value}

    w, batch = (
        {"large": np.float32(0), "small": np.zeros(3, np.float32)},
        {"sign": np.array([1, -1, 1, -1], np.float32)},
    )
    for _ in range(steps):
        w, _ = step(w, batch)
    return float(np.abs(strategy.fetch(w)["small"] - 1).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_gradients_beside_large_ones_arrive_thanks_to_the_residuals(dtype):
    assert distance("psum", dtype) < 1e-3
    assert distance(compressed(dtype), dtype) < 0.1
    assert distance(forgetful(dtype), dtype) > 0.5
