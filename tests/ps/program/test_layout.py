"""Which server keeps what; the servers' programs together are the update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.ps.program.artifact import pack, unpack
from jdist.ps.program.layout import Rows, make_layout
from jdist.ps.program.partition import fixed_shards, min_size
from tests.ps.hidden_layer import BATCH, create, train_step
from tests.ps.program.test_split_step import apart, computed


def raw(state):
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(state)
    ]


def shares(layout, shard, arrays, scalars):
    """Cuts what a worker computed: a server's rows of the pushed arrays, then the scalars."""
    by_number = dict(zip(layout.steps[0].pushed, arrays, strict=True))
    return [rows.cut(by_number[rows.of]) for rows in shard.views[0].rows] + list(scalars)


def one_step(layout, parts, leaves, batches, others, *, packed=False):
    """The new leaves after one closure, each server running its own program on its own rows."""
    pushed, scalars, _, _ = computed(parts, [leaves[i] for i in parts.read], batches, others)
    new = [np.array(x) for x in leaves]
    for shard in layout.shards:
        kept = [rows.cut(leaves[rows.of]) for rows in shard.rows]
        pushes = shares(layout, shard, pushed, scalars)
        assert [(tuple(np.shape(x)), np.dtype(x.dtype).name) for x in pushes] == [
            (s.shape, s.dtype) for s in shard.views[0].pushes
        ]
        program = layout.program(shard, 0)
        run = unpack(pack(program, [*kept, *pushes])) if packed else jax.jit(program)
        for rows, x in zip(shard.rows, run([*kept, *pushes]), strict=False):
            new[rows.of][... if rows.stop is None else slice(rows.start, rows.stop)] = x
    return new


@pytest.mark.parametrize("num_ps", [1, 2, 3])
@pytest.mark.parametrize(
    "tx", [optax.adam(0.1), optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(0.1))], ids=["adam", "lamb"]
)
def test_the_servers_together_make_the_step(num_ps, tx):
    state = create(tx)
    parts, *given = apart(train_step, state, BATCH)
    layout = make_layout([parts], num_ps=num_ps, partitioner=fixed_shards(2))
    found = one_step(layout, parts, raw(state), *given[1:], packed=num_ps == 2)
    expected, _ = jdist.distribute(train_step, jdist.one_device(), donate=False)(state, BATCH)
    for a, b in zip(found, raw(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_rows_of_a_parameter_and_of_its_moments_are_together():
    state = create(optax.adam(0.1))
    parts, *_ = apart(train_step, state, BATCH)
    layout = make_layout([parts], num_ps=2, partitioner=fixed_shards(2))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    kept = [{(paths[rows.of], rows.start, rows.stop) for rows in shard.rows} for shard in layout.shards]
    for name in (".params['a']", ".opt_state[0].mu['a']", ".opt_state[0].nu['a']"):
        assert (name, 0, 2) in kept[0]
        assert (name, 2, 3) in kept[1]
    assert all((".opt_state[0].count", 0, None) in rows for rows in kept)
    assert [(".rng", 0, None) in rows for rows in kept] == [True, False]


def test_every_row_that_a_worker_reads_comes_from_one_server():
    state = create(optax.adam(0.1))
    parts, *_ = apart(train_step, state, BATCH)
    layout = make_layout([parts], num_ps=3, partitioner=min_size(16))
    pulled = [shard.rows[k] for shard in layout.shards for k in (*shard.views[0].pulled, *shard.views[0].pulled_once)]
    assert len(set(pulled)) == len(pulled)
    whole = raw(state)
    for i in parts.read:
        rows = sum((r.stop - r.start) if r.stop is not None else max(1, whole[i].size) for r in pulled if r.of == i)
        assert rows == (max(1, whole[i].size) if Rows(i) in pulled else whole[i].shape[0])


def test_servers_that_would_keep_nothing_take_no_part():
    state = create(optax.sgd(0.1))
    parts, *_ = apart(train_step, state, BATCH)
    assert [shard.server for shard in make_layout([parts], num_ps=5, partitioner=fixed_shards(1)).shards] == [0, 1]
