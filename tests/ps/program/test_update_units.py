"""Where leaves are updated: units, rows, and what a worker computes; the update in pieces is the update."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist.jaxpr.elementwise import prepared
from jdist.ps.program.update_units import Update
from tests.by_default import some

PARAMS = {
    "a": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32),
    "b": np.random.default_rng(1).normal(size=(6,)).astype(np.float32),
    "c": np.float32(0.5),
}
GRADS = jax.tree.map(lambda x: np.asarray(np.sin(3 * x) * 4, np.float32), PARAMS)


def traced(tx, step=None):
    """The update part of an optimiser, the old state's leaves and the pushed arrays."""
    state = {"params": PARAMS, "opt": tx.init(PARAMS), "step": np.int32(3), "frozen": np.ones(5, np.float32)}
    leaves, treedef = jax.tree.flatten(state)
    grads, grads_def = jax.tree.flatten(GRADS)

    def update(*values):
        state = jax.tree.unflatten(treedef, values[: len(leaves)])
        grads = jax.tree.unflatten(grads_def, values[len(leaves) :])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}
        late = (optax.tree.norm(grads), optax.tree.norm(updates))
        return *jax.tree.leaves(new), *late

    arguments = [*leaves, *grads]
    closed = prepared(jax.make_jaxpr(update)(*arguments), arguments)
    return Update(closed, len(leaves)), leaves, grads, jax.jit(update)(*arguments), treedef


def names(treedef, leaves):
    paths = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(treedef, range(treedef.num_leaves)))
    named = {i: jax.tree_util.keystr(path, simple=True, separator="/") for path, i in paths}
    return {named[i] for i in leaves}


def in_pieces(update, leaves, grads, rows):
    """The new leaves, each unit by itself and where that is possible by rows."""
    scalars = update.worker_scalars(grads)
    everywhere = {i: leaves[i] for i in (*update.everywhere, *update.constant)}
    new = {**everywhere, **update.new_leaves(update.everywhere, everywhere, {}, scalars)}
    for unit in update.units:
        size = leaves[unit.leaves[0]].shape[0] if unit.by_rows else None
        cuts = [slice(i, i + rows) for i in range(0, size, rows)] if unit.by_rows else [...]
        parts = []
        for cut in cuts:
            old = {**everywhere, **{i: leaves[i][cut] for i in unit.leaves}}
            parts.append(update.new_leaves(unit.leaves, old, {j: grads[j][cut] for j in unit.pushed}, scalars))
        for i in unit.leaves:
            new[i] = np.concatenate([part[i] for part in parts]) if unit.by_rows else parts[0][i]
    return [new[i] for i in range(len(leaves))]


def check_in_pieces(update, leaves, grads, expected, *, rows=1, atol=0.0):
    for found, wanted in zip(in_pieces(update, leaves, grads, rows), expected, strict=False):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=atol)


ELEMENTWISE = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, 0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.1),
    "adabelief": lambda: optax.adabelief(0.1),
    "lion": lambda: optax.lion(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "block clipped": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "lookahead-like": lambda: optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale(-0.1)),
}
WHOLE = {
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adaptive clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
}


@pytest.mark.parametrize("rows", some([1, 4], [1]))
@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_the_update_in_pieces_is_the_update(name, rows):
    update, leaves, grads, expected, _ = traced({**ELEMENTWISE, **WHOLE}[name]())
    check_in_pieces(update, leaves, grads, expected, rows=rows, atol=1e-7)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_parameter_and_its_moments_are_a_unit_and_may_be_cut(name):
    update, _, _, _, treedef = traced(ELEMENTWISE[name]())
    assert len(update.units) == 3
    for unit in update.units:
        (parameter,) = (path for path in names(treedef, unit.leaves) if path.startswith("params/"))
        assert all(path.endswith(parameter.removeprefix("params/")) for path in names(treedef, unit.leaves))
        assert len(unit.pushed) == 1 or (name, parameter) == ("clipped", "params/c")  # which the worker clips
        assert unit.by_rows == (parameter != "params/c")
    assert "step" in names(treedef, update.everywhere)
    assert names(treedef, update.constant) == {"frozen"}


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_a_whole_parameter_is_not_cut(name):
    update, _, _, _, treedef = traced(WHOLE[name]())
    (unit,) = (unit for unit in update.units if "params/a" in names(treedef, unit.leaves))
    assert not unit.by_rows


def test_the_norm_of_all_gradients_is_the_workers():
    update, *_ = traced(ELEMENTWISE["clipped"]())
    assert update.scalar_shapes
    assert not traced(ELEMENTWISE["adamw"]())[0].scalar_shapes


def test_a_norm_of_all_parameters_makes_one_unit_of_them():
    def update_fn(updates, state, params=None):
        norm = optax.tree.norm(params)
        return jax.tree.map(lambda g: -0.1 * g / norm, updates), state

    tx = optax.GradientTransformation(lambda params: (), update_fn)
    update, leaves, grads, expected, treedef = traced(tx)
    (unit,) = update.units
    assert (names(treedef, unit.leaves), unit.by_rows) == ({"params/a", "params/b", "params/c"}, False)
    check_in_pieces(update, leaves, grads, expected)


def test_what_depends_on_the_order_of_updates_is_nowhere_twice():
    update, leaves, grads, expected, treedef = traced(optax.apply_if_finite(optax.sgd(0.1), 3))
    (unit,) = (unit for unit in update.units if unit.pushed)  # whether an update counts depends on those before it
    assert names(treedef, unit.leaves) >= {"params/a", "params/b", "params/c"}
    assert names(treedef, update.everywhere) == {"step"}
    check_in_pieces(update, leaves, grads, expected)


def test_late_results_of_gradients_alone_are_the_workers():
    update, _, grads, expected, _ = traced(optax.adam(0.1))
    assert not update.late_reads_state(0)
    assert update.late_reads_state(1)
    np.testing.assert_allclose(update.late(grads, [0])[0], expected[-2], rtol=1e-6)


def test_an_array_constant_of_the_step_keeps_its_leaf_whole():
    mask = jnp.asarray(np.arange(24).reshape(6, 4) % 2, jnp.float32)

    def update_fn(updates, state, params=None):
        return {**updates, "a": -0.1 * updates["a"] * mask}, state

    update, leaves, grads, expected, treedef = traced(optax.GradientTransformation(lambda params: (), update_fn))
    cut = {path: unit.by_rows for unit in update.units for path in names(treedef, unit.leaves)}
    assert cut == {"params/a": False, "params/b": True, "params/c": False}
    check_in_pieces(update, leaves, grads, expected)


def test_it_is_a_value():
    update, *_ = traced(optax.sgd(0.1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        update.units = ()
