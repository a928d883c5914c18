"""Steps taken apart: what the worker reads, computes and cannot compute."""

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
from tests.ps.hidden_layer import BATCH, create, loss, raw, train_step


def apart(step, state, *arguments, strategy=None, closures=1, **keywords):
    options = make_options(**({"accumulate": keywords.pop("accumulate")} if "accumulate" in keywords else {}))
    call, state, batches, others = Signature(step, options).bind((state, *arguments), keywords)
    spec = ProgramSpec(step, strategy or jdist.one_device(), options, call, Traced(), [], step.__name__)
    return split_step(spec, state, batches, others, closures=closures), state, batches, others


def computed(parts, read, batches, others):
    """What a worker computes of a step: pushed arrays, scalars, whether all gradients are finite, and outputs."""
    results = jax.jit(parts.worker)([*read, *jax.tree.leaves((batches, others))])
    n, m = len(parts.pushed), len(parts.update.scalar_shapes)
    outputs = results[n + m + 1 :][: parts.outputs_treedef.num_leaves]
    return results[:n], results[n : n + m], results[n + m], outputs


def test_a_worker_of_several_devices_is_mirrored_over_them():
    state = create(optax.sgd(0.1))
    one, *given = apart(train_step, state, BATCH)
    four, *_ = apart(train_step, state, BATCH, strategy=jdist.mirrored(jax.devices()[:4]))
    results = [computed(parts, [raw(state)[i] for i in parts.read], *given[1:]) for parts in (one, four)]
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
    assert not bool(computed(parts, [raw(state)[i] for i in parts.read], bad, others)[2])


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
