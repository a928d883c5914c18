"""Steps taken apart: the worker's part and the servers' units, put together, are the step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import BoundaryError
from jdist.ps.program.split_step import split_step
from jdist.step.options import make_options
from jdist.step.outputs import Traced
from jdist.step.program_spec import ProgramSpec
from jdist.step.signature import Signature
from tests.ps.hidden_layer import BATCH, create, loss, train_step


def with_statistics(state, batch):
    value, grads = jdist.value_and_grad(loss)(state.params, batch)
    mean = 0.9 * state.extra["mean"] + 0.1 * jdist.aggregate(batch["x"].mean(0), "mean")
    return state.apply_gradients(grads=grads, mean=mean).replace(rng=jax.random.split(state.rng)[0]), value


def scaled(state, batch, scale, *, power):
    value, grads = jdist.value_and_grad(loss)(state.params, batch)
    return state.apply_gradients(grads=jax.tree.map(lambda g: g * scale**power, grads)), {"loss": value}


def spec_of(step, strategy, **options):
    options = make_options(**options)
    return ProgramSpec(step, strategy, options, None, Traced(), [], step.__name__), Signature(step, options)


def apart(step, state, *arguments, strategy=None, **keywords):
    strategy = strategy or jdist.one_device()
    options = {"accumulate": keywords.pop("accumulate")} if "accumulate" in keywords else {}
    spec, signature = spec_of(step, strategy, **options)
    call, state, batches, others = signature.bind((state, *arguments), keywords)
    spec = ProgramSpec(step, strategy, spec.options, call, spec.traced, spec.flag_names, spec.name)
    return split_step(spec, state, batches, others), state, batches, others


def computed(parts, read, batches, others):
    """What a worker computes of a step: pushed arrays, scalars, whether all gradients are finite, and outputs."""
    results = jax.jit(parts.worker)([*read, *jax.tree.leaves((batches, others))])
    n, m = len(parts.pushed), len(parts.update.scalar_shapes)
    outputs = results[n + m + 1 :][: parts.outputs_treedef.num_leaves]
    return results[:n], results[n : n + m], results[n + m], outputs


def together(parts, state, batches, others):
    """One closure: the worker, then each unit by itself, by rows where it may be cut."""
    leaves, treedef = jax.tree.flatten(state)
    typed = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    raw = [jax.random.key_data(x) if is_key else x for x, is_key in zip(leaves, typed, strict=True)]
    pushed, scalars, finite, outputs = computed(parts, [raw[i] for i in parts.read], batches, others)
    assert bool(finite)
    update, pushed = parts.update, dict(zip(parts.pushed, pushed, strict=True))
    given = {i: raw[i] for i in (*update.constant, *update.everywhere)}
    new = {**given, **update.new_leaves(update.everywhere, given, {}, scalars)}
    for unit in update.units:
        cuts = [slice(0, 1), slice(1, None)] if unit.by_rows else [...]
        made = [
            update.new_leaves(
                unit.leaves,
                {**given, **{i: raw[i][cut] for i in unit.leaves}},
                {j: pushed[j][cut] for j in unit.pushed},
                scalars,
            )
            for cut in cuts
        ]
        new |= {i: jnp.concatenate([m[i] for m in made]) if unit.by_rows else made[0][i] for i in unit.leaves}
    values = [jax.random.wrap_key_data(new[i]) if is_key else new[i] for i, is_key in enumerate(typed)]
    return jax.tree.unflatten(treedef, values), jax.tree.unflatten(parts.outputs_treedef, outputs)


CASES = {
    "sgd": (train_step, lambda: create(optax.sgd(0.1, 0.9)), (), {}),
    "clipped adam": (train_step, lambda: create(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))), (), {}),
    "lamb": (train_step, lambda: create(optax.lamb(0.1)), (), {}),
    "statistics": (with_statistics, lambda: create(optax.adam(0.1), mean=jnp.zeros(3)), (), {}),
    "other arguments": (scaled, lambda: create(optax.sgd(0.1)), (np.float32(0.5),), {"power": 2}),
    "accumulate": (train_step, lambda: create(optax.sgd(0.1)), (), {"accumulate": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_parts_together_are_the_step(case):
    step, make, arguments, keywords = CASES[case]
    state = make()
    parts, state, batches, others = apart(step, state, BATCH, *arguments, **keywords)
    found, (outputs,) = together(parts, state, batches, others)
    options = {"accumulate": keywords["accumulate"]} if "accumulate" in keywords else {}
    called = {k: v for k, v in keywords.items() if k not in options}
    expected, wanted = jdist.distribute(step, jdist.one_device(), donate=False, **options)(
        state, BATCH, *arguments, **called
    )
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves((found, outputs)), jax.tree.leaves((expected, wanted)), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_worker_of_several_devices_is_mirrored_over_them():
    state = create(optax.sgd(0.1))
    one, *given = apart(train_step, state, BATCH)
    four, *_ = apart(train_step, state, BATCH, strategy=jdist.mirrored(jax.devices()[:4]))
    read = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(state)
    ]
    results = [computed(parts, [read[i] for i in parts.read], *given[1:]) for parts in (one, four)]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_optimisers_state_is_not_read_by_the_worker():
    state = create(optax.adam(0.1))
    parts, *_ = apart(train_step, state, BATCH)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert {paths[i] for i in parts.read} == {".step", ".params['a']", ".params['b']", ".rng"}
    assert paths.index(".rng") in parts.update.constant


def test_a_gradient_that_is_not_finite_is_seen_by_the_worker():
    parts, state, batches, others = apart(train_step, create(optax.sgd(0.1)), BATCH)
    bad = ({**batches[0], "x": batches[0]["x"] * np.float32("nan")},)
    read = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(state)
    ]
    assert not bool(computed(parts, [read[i] for i in parts.read], bad, others)[2])


def logging_norms(state, batch):
    new, metrics = train_step(state, batch)
    updates = jax.tree.map(jnp.subtract, new.params, state.params)
    norms = {"l2_params": optax.tree.norm(new.params), "l2_updates": optax.tree.norm(updates)}
    return new, {**metrics, "norms": norms, "l2_before": optax.tree.norm(state.params)}


def test_a_metric_of_the_updated_parameters_is_left_out_by_name():
    state = create(optax.adam(0.1))
    with pytest.warns(
        UserWarning, match=r"\['norms'\]\['l2_params'\], \['norms'\]\['l2_updates'\], which depends on what"
    ):
        parts, *_ = apart(logging_norms, state, BATCH)
    outputs = jax.tree.unflatten(parts.outputs_treedef, range(parts.outputs_treedef.num_leaves))[0]
    assert outputs["norms"] == {}
    assert outputs.keys() == {"loss", "noise", "norm", "norms", "l2_before"}


def test_a_result_of_the_updated_parameters_that_is_no_entry_of_a_dict_is_refused():
    def step(state, batch):
        new, _ = train_step(state, batch)
        return new, optax.tree.norm(new.params)

    with pytest.raises(BoundaryError, match=r"the step returns it, which depends on what its own update has changed"):
        apart(step, create(optax.sgd(0.1)), BATCH)


def test_a_step_that_updates_by_the_batch_without_a_gradient_of_ours_is_refused():
    def step(params, batch):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, batch)), {}

    with pytest.raises(
        BoundaryError, match=r"computes \['a'\], \['b'\] from the batch without .*Change `jax\.value_and_grad`"
    ):
        apart(step, create(optax.sgd(0.1)).params, BATCH)
