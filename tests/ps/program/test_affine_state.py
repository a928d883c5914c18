"""What a step carries besides the gradient: two workers that have pulled the same state both count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import BoundaryError
from jdist.ps.program.layout import make_layout
from jdist.ps.program.partition import fixed_shards
from jdist.ps.program.sync import make_sync_function
from tests.by_default import some
from tests.ps.hidden_layer import BATCH, create, loss, raw
from tests.ps.program.test_layout import shares
from tests.ps.program.test_split_step import apart, computed
from tests.ps.real_cluster import local
from tests.ps.server.test_shard_server import Job, push

OTHER = {
    "x": np.random.default_rng(7).normal(size=(8, 3)).astype(np.float32),
    "y": np.random.default_rng(8).normal(size=8).astype(np.float32),
    "mask": np.arange(8) < 3,
}


def carrying(rule):
    """A step that updates parameters, and carries what else there is by `rule(old values, batch)`."""

    def step(state, batch):
        value, grads = jdist.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads, **rule(state.extra, batch)), {"loss": value}

    return step


@jax.jit
def smoothed(old, x):
    return jnp.where(True, optax.incremental_update(x, old, 0.1), old)


# name: (the leaves at first, from those and a batch to the new ones)
LINEAR = {
    "counter": ({"n": jnp.int32(5)}, lambda s, b: {"n": s["n"] + b["mask"].sum()}),
    "counter of one byte": ({"n": jnp.uint8(250)}, lambda s, b: {"n": s["n"] + b["mask"].sum().astype(jnp.uint8)}),
    "total in float": ({"n": jnp.float32(5)}, lambda s, b: {"n": s["n"] + b["mask"].sum()}),
    "what is left": ({"n": jnp.float32(50)}, lambda s, b: {"n": s["n"] - 2 * b["mask"].sum()}),
    "running mean": ({"m": jnp.ones(3)}, lambda s, b: {"m": 0.9 * s["m"] + 0.1 * b["x"].mean(0)}),
    "by a difference": ({"m": jnp.ones(3)}, lambda s, b: {"m": s["m"] + (b["x"].mean(0) - s["m"]) / 10}),
    "within a function": ({"m": jnp.ones(3)}, lambda s, b: {"m": smoothed(s["m"], b["x"].mean(0))}),
    "of all replicas": (
        {"m": jnp.ones(3)},
        lambda s, b: {"m": jdist.aggregate(0.9 * s["m"] + 0.1 * b["x"].mean(0), "mean")},
    ),
    "in bfloat16": (
        {"m": jnp.ones(3, jnp.bfloat16)},
        lambda s, b: {"m": (0.9 * s["m"] + 0.1 * b["x"].mean(0)).astype(jnp.bfloat16)},
    ),
    "reshaped": ({"m": jnp.ones((3, 1))}, lambda s, b: {"m": (s["m"][:, 0] * 0.5 + b["x"].mean(0))[:, None]}),
    "histogram": (
        {"h": jnp.zeros(4, jnp.int32)},
        lambda s, b: {"h": s["h"].at[(b["y"] > 0).astype(jnp.int32) + 1].add(1)},
    ),
    "a factor of the batch": ({"m": jnp.float32(3)}, lambda s, b: {"m": s["m"] * b["y"].max() + b["y"].sum()}),
    "factors for each": ({"m": jnp.ones(3)}, lambda s, b: {"m": s["m"] * b["x"].max(0) + b["x"].sum(0)}),
    "sometimes": (
        {"m": jnp.ones(3)},
        lambda s, b: {"m": jnp.where(b["mask"].sum() > 4, 0.9 * s["m"] + 0.1 * b["x"].mean(0), s["m"])},
    ),
    "begun anew": ({"n": jnp.float32(2)}, lambda s, b: {"n": jnp.where(b["mask"].sum() > 4, 0.0, s["n"]) + 1}),
    "infinity, until a batch says more": (
        {"n": jnp.float32(np.inf)},
        lambda s, b: {"n": jnp.where(b["mask"].sum() > 4, b["y"].sum(), s["n"])},
    ),
}

# By sums, maxima and counts of one microbatch's rows, of which the mean over microbatches is not that of all rows.
ASKED = ["a factor of the batch", "factors for each", "sometimes", "begun anew", "infinity, until a batch says more"]
OTHERS = {
    "maximum": ({"m": jnp.float32(0)}, lambda s, b: {"m": jnp.maximum(s["m"], b["y"].max())}),
    "square": ({"m": jnp.float32(2)}, lambda s, b: {"m": s["m"] * s["m"] + b["y"].sum()}),
    "a choice by itself": ({"m": jnp.float32(2)}, lambda s, b: {"m": jnp.where(s["m"] > 1, 0, s["m"]) + b["y"].sum()}),
    "turned round": ({"m": jnp.ones((3, 3))}, lambda s, b: {"m": s["m"].T + b["x"].mean(0)}),
    "the last": ({"m": jnp.ones(3)}, lambda s, b: {"m": b["x"].mean(0)}),
    "a flag": ({"f": jnp.bool_(False)}, lambda s, b: {"f": s["f"] | (b["y"].max() > 0)}),
    "rounded": ({"n": jnp.int32(7)}, lambda s, b: {"n": s["n"] // 2 + b["mask"].sum()}),
    "a key": (
        {"k": jax.random.key(1)},
        lambda s, b: {"k": jax.random.fold_in(s["k"], b["mask"].sum())},
    ),
}


def pushed_by_each(parts, leaves, given, layout):
    """What workers push that have all pulled the same leaves."""
    found = [computed(parts, [leaves[i] for i in parts.read], *arguments) for arguments in given]
    return [[shares(layout, shard, pushed, scalars) for shard in layout.shards] for pushed, scalars, _, _ in found]


def together(layout, leaves, pushes):
    """The leaves after those pushes, one after the other, on every server."""
    for each in pushes:
        new = [np.array(x) for x in leaves]
        for shard, given in zip(layout.shards, each, strict=True):
            kept = [rows.cut(leaves[rows.of]) for rows in shard.rows]
            made = jax.jit(layout.program(shard, 0))([*kept, *given])
            for rows, x in zip(shard.rows, made, strict=False):
                rows.put(new[rows.of], x)
        leaves = new
    return leaves


def name_of(case):
    return case.replace(" ", "_")


@functools.cache
def both_workers(which, num_ps, accumulate):
    """Of all cases: the carried leaves after a closure of each of two workers; after both in turn; after the second alone."""
    cases = {"linear": LINEAR, "others": OTHERS}[which]
    cases = {case: rule for case, rule in cases.items() if accumulate == 1 or case not in ASKED}
    first = {f"{name_of(case)}.{k}": x for case, (leaves, _) in cases.items() for k, x in leaves.items()}

    def rules(old, batch):
        return {
            f"{name_of(case)}.{k}": x
            for case, (leaves, rule) in cases.items()
            for k, x in rule({k: old[f"{name_of(case)}.{k}"] for k in leaves}, batch).items()
        }

    step, state = carrying(rules), create(optax.sgd(0.1), **first)
    parts, state, batches, others = apart(step, state, BATCH, accumulate=accumulate)
    layout = make_layout([parts], num_ps=num_ps, partitioner=fixed_shards(2))
    given = [(batches, others), (({k: jnp.asarray(x) for k, x in OTHER.items()},), others)]
    found = together(layout, raw(state), pushed_by_each(parts, raw(state), given, layout))
    one, expected = jdist.distribute(step, jdist.one_device(), donate=False, accumulate=accumulate), state
    for batch in (BATCH, OTHER):
        expected, _ = one(expected, batch)
    last, _ = one(state, OTHER)
    paths = [str(path[-1]) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    made = [dict(zip(paths, leaves, strict=True)) for leaves in (found, raw(expected), raw(last))]
    return {
        case: [[x[f"['{name_of(case)}.{k}']"] for k in leaves] for x in made] for case, (leaves, _) in cases.items()
    }


def near(a, b):
    for x, y in zip(a, b, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.dtype == jnp.bfloat16:  # rounded at each of two steps
            np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=2**-7)
        elif jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("case", LINEAR)
def test_nothing_is_lost_of_what_two_workers_add(case):
    found, expected, _ = both_workers("linear", 2, 1)[case]
    near(found, expected)


@pytest.mark.parametrize("case", OTHERS)
def test_of_what_is_no_sum_the_last_writer_wins(case):
    found, _, last = both_workers("others", 1, 1)[case]
    near(found, last)


@pytest.mark.parametrize("case", [case for case in LINEAR if case not in ASKED])
def test_a_closure_of_several_microbatches_counts_each(case):
    found, expected, _ = both_workers("linear", 1, 2)[case]
    near(found, expected)


@pytest.mark.parametrize("case", ASKED)
def test_a_closure_of_several_microbatches_asks_for_what_is_no_mean(case):
    first, rule = LINEAR[case]
    with pytest.raises(BoundaryError, match=r"averages into .*does not show that this is a mean"):
        apart(carrying(rule), create(optax.sgd(0.1), **first), BATCH, accumulate=2)


def test_a_slope_that_the_program_tells_does_not_travel():
    first, rule = LINEAR["running mean"]
    parts, *_ = apart(carrying(rule), create(optax.sgd(0.1), **first), BATCH)
    assert sorted(parts.update.pushed_shapes[j].shape for j in parts.pushed) == [(3,), (3, 4), (4,)]
    first, rule = LINEAR["a factor of the batch"]
    parts, *_ = apart(carrying(rule), create(optax.sgd(0.1), **first), BATCH)
    assert sorted(parts.update.pushed_shapes[j].shape for j in parts.pushed) == [(), (), (3, 4), (4,)]


def test_a_result_may_depend_on_what_is_carried_and_on_the_gradients():
    def step(state, batch):
        _, grads = jdist.value_and_grad(loss)(state.params, batch)
        seen = state.extra["seen"] + batch["mask"].sum()
        return state.apply_gradients(grads=grads, seen=seen), {"each": optax.tree.norm(grads) / seen}

    state = create(optax.sgd(0.1), seen=jnp.float32(3))
    parts, state, batches, others = apart(step, state, BATCH)
    outputs = computed(parts, [raw(state)[i] for i in parts.read], batches, others)[3]
    expected = jdist.distribute(step, jdist.one_device(), donate=False)(state, BATCH)[1]["each"]
    np.testing.assert_allclose(outputs[0], expected, rtol=1e-6)


@pytest.mark.soak
def test_many_workers_do_not_make_a_running_mean_swing():
    """`new - old` of thirty workers, added up, would pull the mean back thirty times for what one of them saw."""
    first, rule = LINEAR["running mean"]
    parts, state, batches, others = apart(carrying(rule), create(optax.sgd(0.0), **first), BATCH)
    layout = make_layout([parts], num_ps=1, partitioner=fixed_shards(1))
    leaves, place = raw(state), next(i for i, x in enumerate(raw(state)) if np.shape(x) == (3,))
    for _ in range(4):
        leaves = together(layout, leaves, pushed_by_each(parts, leaves, [(batches, others)], layout) * 30)
    np.testing.assert_allclose(leaves[place], BATCH["x"].mean(0), rtol=1e-4, atol=1e-4)


def test_a_late_gradient_counts_less_and_what_is_carried_counts_in_full():
    first, rule = LINEAR["total in float"]
    state = create(optax.sgd(1.0), **first)
    job = Job(1, step=carrying(rule), state=state, on_stale="down_weight", max_staleness=0).restore()
    for closure in (0, 1, 2):  # of staleness 0, 1 and 2
        job.clients[0].say([push(closure=closure, base=0)], [np.asarray(x) for x in job.computed()[0]])
    assert float(job.kept(".extra['n']")) == 5 + 3 * 6
    grads = jax.grad(loss)(state.params, BATCH)
    expected = state.params["b"] - (1 + 1 / 2 + 1 / 3) * grads["b"]
    np.testing.assert_allclose(job.kept(".params['b']"), expected, rtol=1e-5)


@pytest.mark.parametrize("case", ["total in float", "running mean"])
def test_a_round_carries_every_row_of_a_counter_and_the_mean_of_what_is_averaged(case):
    first, rule = LINEAR[case]
    step, state = carrying(rule), create(optax.sgd(0.1), **first)
    parts, state, batches, others = apart(step, state, BATCH, closures=2)
    sync = make_sync_function(parts, 2)
    old, (place,) = raw(state), [i for i, x in enumerate(jax.tree.leaves(state)) if x is state.extra[next(iter(first))]]
    made = [
        jax.jit(sync.run)([*(old[i] for i in parts.read), *share])
        for share in sync.cut(jax.tree.leaves((batches, others)))
    ]
    layout = make_layout([parts], num_ps=1, partitioner=fixed_shards(1))
    n = len(parts.pushed)
    mean = [np.mean([np.asarray(each[j]) for each in made], 0) for j in range(n)]
    scalars, _, _ = sync.combine([each[n + 1 :] for each in made])
    (shard,) = layout.shards
    found = together(layout, old, [[shares(layout, shard, mean, scalars)]])
    each = [rule(state.extra, {k: x[4 * i : 4 * i + 4] for k, x in BATCH.items()}) for i in range(2)]
    values = [np.asarray(new) for one in each for new in one.values()]
    start = np.asarray(next(iter(first.values())))
    expected = start + sum(x - start for x in values) if case == "total in float" else np.mean(values, 0)
    np.testing.assert_allclose(found[place], expected, rtol=1e-6)


@pytest.mark.parametrize("closures", [1, 2])
def test_what_a_closure_pushes_has_the_types_that_servers_expect(closures):
    """Arrays travel as their bytes: an integer that became a float would be read as another integer."""
    parts, state, batches, others = apart(counting, started(), BATCH, closures=closures)
    sync, old = make_sync_function(parts, closures), raw(state)
    for share in sync.cut(jax.tree.leaves((batches, others))):
        made = jax.eval_shape(sync.run, [*(old[i] for i in parts.read), *share])
        found = [x.dtype for x in made[: len(parts.pushed)]]
        assert found == [parts.update.pushed_shapes[j].dtype for j in parts.pushed]


def counting(state, batch):
    value, grads = jdist.value_and_grad(loss)(state.params, batch)
    return state.apply_gradients(
        grads=grads,
        seen=state.extra["seen"] + batch["mask"].sum(),
        exact=state.extra["exact"] + batch["mask"].sum(),
        mean=0.99 * state.extra["mean"] + 0.01 * batch["x"].mean(0),
    ), {"loss": value}


def started():
    return create(optax.sgd(0.01), seen=jnp.float32(0), exact=jnp.int32(0), mean=jnp.ones(3))


@pytest.mark.parametrize("wire", some(["float32", "bf16"], ["float32"]))
def test_two_real_workers_count_every_row(wire):
    with local(local_workers=2, local_ps=2, partitioner=fixed_shards(2), wire=wire) as strategy:
        step, state = jdist.distribute(counting, strategy), strategy.init(started)
        for _ in range(100):
            state, _ = step(state, BATCH)
        found = strategy.fetch(state)
    assert (float(found.extra["seen"]), int(found.extra["exact"]), int(found.step)) == (600, 600, 100)
    mean = BATCH["x"].mean(0)  # as if the workers had taken turns
    np.testing.assert_allclose(found.extra["mean"], mean + (1 - mean) * 0.99**100, rtol=1e-5, atol=1e-5)
