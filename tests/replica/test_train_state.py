"""TrainState, and an optimiser that ignores what others need."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import StepError


def state(**options):
    return jdist.TrainState.create(params={"w": jnp.float32(1)}, tx=optax.sgd(0.5), **options)


def test_create():
    made = state(apply_fn=len, rng=jax.random.key(0), ema={"w": 3.0})
    assert made.step.dtype == jnp.int32
    assert (int(made.step), made.apply_fn) == (0, len)
    assert made.extra == {"ema": {"w": 3.0}}
    assert jnp.issubdtype(made.rng.dtype, jax.dtypes.prng_key)
    assert state().rng is None
    assert state().extra == {}


def test_apply_gradients_counts_updates_and_writes_collections():
    before = state(ema=1.0, stats=2.0)
    after = before.apply_gradients(grads={"w": 1.0}, ema=5.0)
    assert (int(after.step), float(after.params["w"])) == (1, 0.5)
    assert after.extra == {"ema": 5.0, "stats": 2.0}
    assert (int(before.step), before.extra["ema"]) == (0, 1.0)


def test_the_optimisers_state_is_carried():
    made = jdist.TrainState.create(params=1.0, tx=optax.sgd(0.1, momentum=0.9))
    made = made.apply_gradients(grads=1.0).apply_gradients(grads=1.0)
    assert float(made.params) == pytest.approx(1 - 0.1 - 0.19)


def test_replace_takes_fields_and_collections():
    changed = state(ema=1.0).replace(step=jnp.int32(7), ema=2.0)
    assert (int(changed.step), changed.extra) == (7, {"ema": 2.0})
    assert state(a=1, b=2).replace(extra={"c": 3}).extra == {"c": 3}


@pytest.mark.parametrize("call", [lambda s: s.replace(emma=1), lambda s: s.apply_gradients(grads={"w": 1.0}, emma=1)])
def test_an_undeclared_collection_is_refused_by_name(call):
    with pytest.raises(StepError, match=r"`emma` is not a collection.*it has \['ema'\].*create\(\.\.\., emma=\.\.\.\)"):
        call(state(ema=1))
    with pytest.raises(StepError, match=r"it has none"):
        call(state())


def test_a_collection_read_as_an_attribute_is_told_where_it_is():
    state = jdist.TrainState.create(params={"w": 1.0}, tx=optax.sgd(0.5), batch_stats={"mean": 0.0})
    with pytest.raises(
        AttributeError, match=r"no attribute 'batch_stats'; it is a collection: read `state\.extra\['batch_stats'\]`"
    ):
        _ = state.batch_stats
    with pytest.raises(AttributeError, match=r"no attribute 'loss'$"):
        _ = state.loss
    assert copy.deepcopy(state).extra == state.extra


def test_it_crosses_jit_with_its_functions_static():
    made = state(apply_fn=len, ema=1.0)
    assert len(jax.tree.leaves(made)) == 3
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(made)]
    assert paths == [".step", ".params['w']", ".extra['ema']"]
    stepped = jax.jit(lambda s: s.apply_gradients(grads={"w": 1.0}))(made)
    assert stepped.apply_fn is len
    assert stepped.tx is made.tx
    assert jax.tree.structure(stepped) == jax.tree.structure(made)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        state().step = 1


class TestOptimizer:
    def test_marking_changes_no_number_and_twice_is_once(self):
        tx = optax.adam(0.1)
        marked = jdist.optimizer(tx)
        assert jdist.optimizer(marked) is marked
        params, grads = {"w": jnp.float32(1)}, {"w": jnp.float32(2)}
        expected = tx.update(grads, tx.init(params), params)
        got = marked.update(grads, marked.init(params), params)
        assert jax.tree.map(float, got) == jax.tree.map(float, expected)

    def test_marks_of_one_optimiser_are_equal_so_that_nothing_compiles_twice(self):
        tx = optax.sgd(0.1)
        assert jdist.optimizer(tx) == jdist.optimizer(tx)
        assert hash(jdist.optimizer(tx)) == hash(jdist.optimizer(tx))

    def test_it_chains_and_takes_extra_arguments(self):
        def update(updates, opt_state, params=None, *, scale, **extra):
            return jax.tree.map(lambda g: g * scale, updates), opt_state

        scaled = optax.GradientTransformationExtraArgs(lambda params: (), update)
        marked = jdist.optimizer(optax.chain(jdist.optimizer(optax.sgd(1.0)), scaled))
        updates, _ = marked.update(2.0, marked.init(1.0), 1.0, scale=3.0)
        assert float(updates) == -6.0

    def test_a_plain_optimiser_ignores_extra_arguments(self):
        marked = jdist.optimizer(optax.sgd(1.0))
        assert float(marked.update(2.0, marked.init(1.0), 1.0, value=3.0)[0]) == -2.0


class TestArgumentsOfTheOptimiser:
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))

    @pytest.mark.parametrize(
        ("tx", "names"),
        [
            (plateau, ["value"]),
            (optax.contrib.momo(), ["value"]),
            (optax.polyak_sgd(), ["value"]),
            (optax.chain(optax.clip(1.0), optax.contrib.momo_adam()), ["value"]),
            (optax.contrib.prodigy(), []),
            (optax.contrib.schedule_free_adamw(), []),
        ],
    )
    def test_other_names_reach_an_update_that_takes_more(self, tx, names):
        params = {"w": jnp.ones(2)}
        state = jdist.TrainState.create(params=params, tx=tx, seen=jnp.zeros(()))
        expected, opt_state = params, tx.init(params)
        for loss in (1.0, 1.0, 1.0):
            arguments = dict.fromkeys(names, jnp.float32(loss))
            state = state.apply_gradients(grads=params, seen=state.extra["seen"] + 1, **arguments)
            updates, opt_state = tx.update(params, opt_state, expected, **arguments)
            expected = optax.apply_updates(expected, updates)
        jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (expected, opt_state))
        assert state.extra["seen"] == 3

    @pytest.mark.parametrize(("tx", "name"), [(plateau, "sean"), (optax.sgd(0.1), "value")])
    def test_a_name_that_nothing_reads_is_told(self, tx, name):
        state = jdist.TrainState.create(params={"w": jnp.ones(2)}, tx=tx, seen=jnp.zeros(()))
        with pytest.raises(StepError, match=rf"`{name}` is not a collection of this state.*`update` does not read it"):
            state.apply_gradients(grads={"w": jnp.ones(2)}, **{"value": jnp.zeros(()), name: jnp.zeros(())})
