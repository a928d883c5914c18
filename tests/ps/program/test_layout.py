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
from tests.ps.hidden_layer import BATCH, create, loss, raw, train_step
from tests.ps.program.test_split_step import apart, computed


def shares(layout, shard, arrays, scalars):
    """Cuts what a worker computed: a server's rows of the pushed arrays, then the scalars."""
    by_number = dict(zip(layout.steps[0].pushed, arrays, strict=True))
    return [rows.cut(by_number[rows.of]) for rows in shard.views[0].rows] + list(scalars)


def one_step(layout, parts, leaves, batches, others, *, packed=False):
    """The new leaves after one closure, each server running its own program on its own rows; and the outputs."""
    pushed, scalars, finite, outputs = computed(parts, [leaves[i] for i in parts.read], batches, others)
    assert bool(finite)
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
            rows.put(new[rows.of], x)
    return new, outputs


def with_statistics(state, batch):
    value, grads = jdist.value_and_grad(loss)(state.params, batch)
    mean = 0.9 * state.extra["mean"] + 0.1 * jdist.aggregate(batch["x"].mean(0), "mean")
    return state.apply_gradients(grads=grads, mean=mean).replace(rng=jax.random.split(state.rng)[0]), value


def scaled(state, batch, scale, *, power):
    value, grads = jdist.value_and_grad(loss)(state.params, batch)
    return state.apply_gradients(grads=jax.tree.map(lambda g: g * scale**power, grads)), {"loss": value}


CASES = {
    "sgd": (train_step, lambda: create(optax.sgd(0.1, 0.9)), (), {}),
    "clipped adam": (train_step, lambda: create(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))), (), {}),
    "clipped lamb": (train_step, lambda: create(optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(0.1))), (), {}),
    "lamb": (train_step, lambda: create(optax.lamb(0.1)), (), {}),
    "statistics": (with_statistics, lambda: create(optax.adam(0.1), mean=jnp.zeros(3)), (), {}),
    "other arguments": (scaled, lambda: create(optax.sgd(0.1)), (np.float32(0.5),), {"power": 2}),
    "accumulate": (train_step, lambda: create(optax.sgd(0.1)), (), {"accumulate": 2}),
}


@pytest.mark.parametrize("num_ps", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_worker_and_the_servers_together_make_the_step(num_ps, case):
    step, make, arguments, keywords = CASES[case]
    parts, state, *given = apart(step, make(), BATCH, *arguments, **keywords)
    layout = make_layout([parts], num_ps=num_ps, partitioner=fixed_shards(2))
    found, outputs = one_step(layout, parts, raw(state), *given, packed=num_ps == 2)
    options = {"accumulate": keywords["accumulate"]} if "accumulate" in keywords else {}
    called = {k: v for k, v in keywords.items() if k not in options}
    distributed = jdist.distribute(step, jdist.one_device(), donate=False, **options)
    expected, *wanted = distributed(state, BATCH, *arguments, **called)
    for a, b in zip([*found, *outputs], [*raw(expected), *jax.tree.leaves(wanted)], strict=True):
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
