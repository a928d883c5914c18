"""Steps under a parameter server as a user writes them: several of them, evaluations, other states, what they return."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist.errors import BatchError, BoundaryError, NonFiniteError, StepError, StrategyError
from jdist.train import Checkpointer
from tests.pictures import check_picture
from tests.ps.hidden_layer import BATCH, create, loss, rows, train_step
from tests.ps.real_cluster import local

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers


@pytest.fixture(scope="module")
def strategy():
    """One worker and two servers; with one worker asynchronous training is exact."""
    with local(local_workers=1, local_ps=2, partitioner=jdist.ps.fixed_shards(2)) as made:
        yield made


@pytest.fixture(scope="module")
def in_step():
    """Synchronous mode, one worker and one server."""
    with local(local_workers=1, local_ps=1, mode="sync") as made:
        yield made


def eval_step(state, batch):
    return {"loss": loss(state.params, batch)}


def near(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-5)


def under(strategy, do):
    """What `do(strategy)` gives, and what it gives on one device."""
    return do(strategy), do(jdist.one_device())


def test_an_evaluation_sees_the_state_after_all_steps_before_it(strategy):
    def do(strategy):
        train = jdist.distribute(train_step, strategy)
        evaluate = jdist.distribute(eval_step, strategy, returns="metrics")
        state, found = strategy.init(lambda: create(optax.adam(0.1))), []
        for _ in range(4):
            for _ in range(3):
                state, _ = train(state, BATCH)
            found.append(evaluate(state, BATCH)["loss"])
        return [float(x) for x in found], strategy.fetch(state).params

    (losses, params), (expected, expected_params) = under(strategy, do)
    near(losses, expected)
    near(params, expected_params)
    assert len(set(losses)) == 4


def test_two_steps_update_one_state_in_turn(strategy):
    def only(name):
        def step(state, batch):
            value, grads = jdist.value_and_grad(loss)(state.params, batch)
            kept = {k: g if k == name else jnp.zeros_like(g) for k, g in grads.items()}
            return state.apply_gradients(grads=kept), {"loss": value}

        return step

    def do(strategy):
        a, b = (jdist.distribute(only(name), strategy) for name in "ab")
        state = strategy.init(lambda: create(optax.sgd(0.05, 0.9)))
        for _ in range(3):
            state, _ = a(state, BATCH)
            state, metrics = b(state, BATCH)
        return float(metrics["loss"]), strategy.fetch(state).params

    found, expected = under(strategy, do)
    near(found, expected)


def test_a_step_without_a_gradient_and_one_that_changes_what_another_keeps_everywhere(strategy):
    def count(state, batch):
        return {**state, "n": state["n"] + 1}

    def reset(state, batch):
        return {**state, "n": jnp.int32(0), "resets": state["resets"] + state["n"]}

    def do(strategy):
        counting, resetting = (jdist.distribute(f, strategy, returns="state") for f in (count, reset))
        state = strategy.init(lambda: {"n": jnp.int32(0), "resets": jnp.int32(0), "w": jnp.ones((4, 2))})
        for _ in range(5):
            state = counting(state, BATCH)
        state = counting(resetting(state, BATCH), BATCH)
        return strategy.fetch(state)

    found, expected = under(strategy, do)
    assert (int(found["n"]), int(found["resets"])) == (int(expected["n"]), int(expected["resets"])) == (1, 5)


def test_two_states_in_turn_each_keep_their_own_values(strategy):
    def do(strategy):
        step = jdist.distribute(train_step, strategy)
        first, second = (strategy.init(lambda tx=tx: create(tx)) for tx in (optax.sgd(0.1), optax.adam(0.1)))
        for _ in range(2):
            first, _ = step(first, BATCH)
            second, _ = step(second, BATCH)
            second, _ = step(second, BATCH)
        first, second = strategy.fetch(first), strategy.fetch(second)
        return int(first.step), int(second.step), first.params, second.params

    found, expected = under(strategy, do)
    assert found[:2] == (2, 4)
    near(found, expected)


def test_a_tree_of_arrays_is_taken_for_a_state_and_a_checkpoint_holds_one(strategy, tmp_path):
    step = jdist.distribute(train_step, strategy)
    state = strategy.init(lambda: create(optax.adam(0.1)))
    state, _ = step(state, BATCH)
    with Checkpointer(tmp_path / "checkpoints", check=strategy.check) as checkpoints:
        checkpoints.save(1, state, wait=True)
        state, _ = step(state, BATCH)
        after = strategy.fetch(state)
        restored = checkpoints.restore(state).state
    assert int(restored.step) == 1
    again, _ = step(restored, BATCH)
    near(strategy.fetch(again).params, after.params)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints, local(local_workers=1, local_ps=1) as other:
        for there in (other, jdist.one_device()):  # onto another number of servers, and onto none
            restored = checkpoints.restore(there.init(lambda: create(optax.adam(0.1)))).state
            found, _ = jdist.distribute(train_step, there)(restored, BATCH)
            near(there.fetch(found).params, after.params)
    assert int(strategy.fetch(again).step) == 2


def test_several_steps_a_call_and_rows_in_input_order_without_padding(strategy):
    def step(state, batch):
        value, grads = jdist.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": value}

    def predict(state, batch):
        return batch["x"] @ state.params["a"]

    def do(strategy):
        rows = {"x": np.arange(30, dtype=np.float32).reshape(10, 3) / 30, "y": np.ones(10, np.float32)}
        source = jdist.data.from_arrays(rows, global_batch=4, epochs=2)
        state = strategy.init(lambda: create(optax.sgd(0.1)))
        many = jdist.distribute(step, strategy, steps_per_call=4)
        losses = []
        for batch in strategy.distribute_dataset(source, steps_per_call=4):  # the last call has 2
            state, metrics = many(state, batch)
            losses.append(metrics["loss"])
        predicting = jdist.distribute(predict, strategy, returns="examples")
        source = jdist.data.from_arrays(rows, global_batch=4)
        found = [np.asarray(predicting(state, batch)) for batch in strategy.distribute_dataset(source)]
        assert [x.shape for x in found] == [(4, 4), (4, 4), (2, 4)]
        return [np.asarray(x) for x in losses], np.concatenate(found)

    found, expected = under(strategy, do)
    assert [x.shape for x in found[0]] == [(4,), (2,)]
    near(found, expected)


def test_fit_with_several_steps_a_call_and_fewer_in_the_last(strategy):
    def do(strategy):
        rows = {"x": np.arange(30, dtype=np.float32).reshape(10, 3) / 30, "y": np.ones(10, np.float32)}
        state = strategy.init(lambda: create(optax.sgd(0.1)))
        given = {"global_batch": 4, "epochs": 3, "steps_per_call": 2, "progress": False, "log_to": None}
        state, history = jdist.fit(train_step, state, rows, strategy=strategy, **given)
        assert [row["step"] for row in history.epochs] == [4, 6, 9]  # where the call ends that ends the epoch
        if strategy.coordinator is not None:  # others compute, and read: nothing is said of what is not known here
            row = history.rows[-1]
            assert {"input_wait_share", "mfu", "peak_memory_bytes"}.isdisjoint(row)
            assert sum(share for name, share in row.items() if name.endswith("_share")) == pytest.approx(1, abs=0.02)
        return strategy.fetch(state).params, history["epoch/loss"][1]

    near(*under(strategy, do))


def test_a_batch_stacked_for_another_number_of_steps_a_call_is_refused(strategy):
    many = jdist.distribute(train_step, strategy, steps_per_call=2)
    state = strategy.init(lambda: create(optax.sgd(0.1)))
    for batch in (BATCH, {"x": np.ones((2, 4, 3), np.float32), "y": np.ones((1, 4), np.float32)}, {"x": 1.0, "y": 1.0}):
        with pytest.raises(BatchError, match=r"steps_per_call=2, and its batch has .*1 to 2 steps.*Pass the same"):
            many(state, batch)


def test_a_gradient_that_is_not_finite(strategy):
    bad = {**BATCH, "x": np.full_like(BATCH["x"], np.nan)}
    state = strategy.init(lambda: create(optax.sgd(0.1)))
    step = jdist.distribute(train_step, strategy)
    state, _ = step(state, BATCH)
    state, _ = step(state, bad)
    with pytest.raises(NonFiniteError, match="a gradient is NaN or infinite"):
        step.wait()
    assert int(strategy.fetch(state).step) == 1
    skipping = jdist.distribute(train_step, strategy, non_finite="skip")
    for batch in (BATCH, bad, BATCH):
        state, _ = skipping(state, batch)
    assert (skipping.num_skipped, int(strategy.fetch(state).step)) == (1, 3)
    state, _ = jdist.distribute(train_step, strategy, non_finite="apply")(state, bad)
    assert np.isnan(strategy.fetch(state).params["a"]).all()


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_the_mean_of_an_epoch_leaves_out_the_steps_that_were_left_out_and_no_other(request, mode, steps_per_call):
    def step(state, batch):
        def loss_of(params):
            value = loss(params, batch)
            # The root of zero is finite, its gradient is not.
            return value + jnp.sqrt(jnp.where(jdist.all_reduce(batch["bad"], "max").max() > 0, 0 * value, 1)), value

        (_, value), grads = jdist.value_and_grad(loss_of, has_aux=True)(state.params)
        odd = jnp.where(jdist.all_reduce(batch["odd"], "max").max() > 0, jnp.nan, 1.0)
        return state.apply_gradients(grads=grads), {"loss": value, "number": jdist.mean(batch["number"]), "odd": odd}

    rng, number = np.random.default_rng(0), np.arange(20.0, dtype=np.float32) // 4
    rows = {"x": rng.normal(size=(20, 3)).astype(np.float32), "y": np.ones(20, np.float32), "number": number}
    rows |= {"bad": (number == 1).astype(np.float32), "odd": (number == 2).astype(np.float32)}
    given = {"epochs": 1, "steps_per_call": steps_per_call, "progress": False, "log_to": None, "verify": "off"}
    made = request.getfixturevalue({"async": "strategy", "sync": "in_step"}[mode])
    state = made.init(lambda: create(optax.sgd(0.1)))
    distributed = jdist.distribute(step, made, non_finite="skip", steps_per_call=steps_per_call)
    source = jdist.data.from_arrays(rows, global_batch=4)
    state, history = jdist.fit(distributed, state, source, **given)
    assert int(made.fetch(state).step) == 4
    (row,) = history.epochs
    assert row["number"] == pytest.approx((0 + 2 + 3 + 4) / 4)
    assert np.isfinite(row["loss"])
    assert np.isnan(row["odd"])


def test_nnx_objects_are_refused_with_what_to_write_and_that_works(strategy):
    def fresh():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    with pytest.raises(StepError, match=r"cannot be changed in place. Split them, `graphdef, state = nnx.split"):
        jdist.nnx.distribute(strategy)(lambda model, optimizer, batch: None)

    def do(strategy):
        graphdef, state = nnx.split(fresh())

        def step(state, batch):
            model, optimizer = nnx.merge(graphdef, state)
            value, grads = jdist.nnx.value_and_grad(
                lambda m: jdist.mean((m(batch["x"])[:, 0] - batch["y"]) ** 2, batch["mask"])
            )(model)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), {"loss": value}

        train, state = jdist.distribute(step, strategy), strategy.init(lambda: state)
        for _ in range(3):
            state, metrics = train(state, BATCH)
        return float(metrics["loss"]), jax.tree.leaves(strategy.fetch(state))

    found, expected = under(strategy, do)
    near(found, expected)


def test_workers_with_several_devices_run_the_step_mirrored_over_them():
    def step(state, batch):
        value, grads = jdist.value_and_grad(loss)(state.params, batch)
        replicas, noise = jdist.all_reduce(jnp.float32(1), "sum"), jax.random.normal(jdist.replica_rng(state.rng), ())
        metrics = {"loss": value, "norm": optax.tree.norm(grads), "replicas": replicas, "own": jdist.PerReplica(noise)}
        return state.apply_gradients(grads=grads), metrics

    def do(strategy):
        train, state, found = jdist.distribute(step, strategy), strategy.init(lambda: create(optax.adam(0.1))), []
        for batch in strategy.distribute_dataset(jdist.data.from_arrays(rows(30), global_batch=8)):
            state, metrics = train(state, batch)
            found.append(metrics)
        return jax.tree.map(np.asarray, found), strategy.fetch(state).params

    with local(local_workers=1, local_ps=1, devices_per_worker=4) as made:
        (metrics, params), (expected, expected_params) = do(made), do(jdist.mirrored(jax.devices()[:4]))
        near(metrics, expected)
        near(params, expected_params)
        assert float(metrics[0]["replicas"]) == 4
        assert metrics[0]["own"].value.shape == (4,)
        odd = {k: v[:6] for k, v in BATCH.items()}
        with pytest.raises(BatchError, match=r"6 rows does not divide by 4 \(4 devices of a worker\)"):
            jdist.distribute(step, made)(made.init(lambda: create(optax.sgd(0.1))), odd)


def test_keys_are_arguments_of_a_step(strategy):
    def step(state, batch, key):
        noise = jax.random.normal(key, (2,))
        loss, grads = jdist.value_and_grad(lambda w: jdist.mean((batch["x"] @ w - 1 + noise.sum()) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grads}, {"loss": loss}

    def do(strategy):
        train = jdist.distribute(step, strategy)
        state = strategy.init(lambda: {"w": jnp.zeros(2)})
        for i in range(3):
            state, metrics = train(state, {"x": np.ones((4, 2), np.float32)}, jax.random.key(i))
        return float(metrics["loss"]), strategy.fetch(state)

    near(*under(strategy, do))


class TestAKeyOfTheStateThatTheBatchChanges:
    @staticmethod
    def step(state, batch):
        loss, grads = jdist.value_and_grad(lambda w: jdist.mean((batch["x"] @ w - 1) ** 2))(state["w"])
        key = jax.random.fold_in(state["key"], batch["rows"].sum())
        return {"w": state["w"] - 0.1 * grads, "key": key}, {"loss": loss}

    def do(self, strategy):
        train = jdist.distribute(self.step, strategy)
        state = strategy.init(lambda: {"w": jnp.zeros(2), "key": jax.random.key(1)})
        for i in range(3):
            state, _ = train(state, {"x": np.ones((4, 2), np.float32), "rows": np.full(4, i, np.int32)})
        found = strategy.fetch(state)
        return found["w"], jax.random.key_data(found["key"])

    def test_is_what_one_device_makes_of_it(self, strategy):
        near(*under(strategy, self.do))

    def test_in_synchronous_mode_is_refused(self, in_step):
        with pytest.raises(BoundaryError, match=r"\['key'\], a PRNG key, from the batch"):
            self.do(in_step)


def test_what_a_state_on_servers_and_its_step_do_not_have_is_said(strategy):
    state = strategy.init(lambda: create(optax.sgd(0.1)))
    with pytest.raises(AttributeError, match=r"Take `strategy\.fetch\(state\)\.params` .* a learning rate, .*argument"):
        _ = state.params
    with pytest.raises(StepError, match=r"Lower it under `jdist\.one_device"):
        jdist.distribute(train_step, strategy).lower(state, {})


def test_a_state_of_other_servers_is_refused_with_how_to_take_it(strategy):
    other = jdist.parameter_server(local_workers=1)
    state = other.init(lambda: create(optax.sgd(0.1)))
    with pytest.raises(StrategyError, match=r"`state = strategy\.init\(lambda: other\.fetch\(state\)\)`"):
        jdist.distribute(train_step, strategy)(state, BATCH)


TX = optax.adam(0.1)
SEVERAL = {"args": ("state", "state", "batch")}


def params_and_opt_state(params, opt_state, batch):
    value, grads = jdist.value_and_grad(loss)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {"loss": value}


def create_both():
    params = create(TX).params
    return params, TX.init(params)


class TestSeveralStates:
    """`params, opt_state, metrics = step(params, opt_state, batch)` in a loop."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda strategy: strategy.init(create_both),
            lambda strategy: [strategy.init(lambda i=i: create_both()[i]) for i in range(2)],
            lambda strategy: create_both(),
        ],
        ids=["one init", "two inits", "arrays"],
    )
    @pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
    def test_computes_what_one_device_does(self, strategy, make, options):
        def do(strategy):
            run = jdist.distribute(params_and_opt_state, strategy, **SEVERAL, **options)
            (params, opt_state), losses = make(strategy), []
            for _ in range(4):
                params, opt_state, metrics = run(params, opt_state, BATCH)
                losses.append(metrics["loss"])
            assert (
                jax.tree.leaves(run.last_state) == jax.tree.leaves((params, opt_state)) or strategy.coordinator is None
            )
            fetched = strategy.fetch((params, opt_state))
            near(strategy.fetch(params), fetched[0])
            return [float(x) for x in losses], fetched

        (losses, states), (expected, expected_states) = under(strategy, do)
        near(losses, expected)
        near(states, expected_states)

    def test_an_evaluation_of_one_of_them_and_a_step_of_both_in_another_order(self, strategy):
        def swapped(opt_state, params, batch):
            params, opt_state, metrics = params_and_opt_state(params, opt_state, batch)
            return opt_state, params, metrics

        def decay(params, batch):
            return jax.tree.map(lambda x: x * 0.5, params), {}

        def do(strategy):
            run = jdist.distribute(params_and_opt_state, strategy, **SEVERAL)
            back = jdist.distribute(swapped, strategy, **SEVERAL)
            halve = jdist.distribute(decay, strategy)
            evaluate = jdist.distribute(loss, strategy, returns="metrics")
            params, opt_state = strategy.init(create_both)
            params, opt_state, _ = run(params, opt_state, BATCH)
            found = [evaluate(params, BATCH)]
            opt_state, params, _ = back(opt_state, params, BATCH)
            found.append(evaluate(params, BATCH))
            params, _ = halve(params, BATCH)
            found.append(evaluate(params, BATCH))
            return [float(x) for x in found], strategy.fetch(params)

        (losses, params), (expected, expected_params) = under(strategy, do)
        near(losses, expected)
        near(params, expected_params)

    def test_states_made_apart_stay_what_they_have_become(self, strategy):
        run = jdist.distribute(params_and_opt_state, strategy, **SEVERAL)
        params, opt_state = (strategy.init(lambda i=i: create_both()[i]) for i in range(2))
        new, _, _ = run(params, opt_state, BATCH)
        near(strategy.fetch(params), strategy.fetch(new))
        evaluate = jdist.distribute(loss, strategy, returns="metrics")
        assert float(evaluate(params, BATCH)) == float(evaluate(new, BATCH))

    def test_refused(self, strategy):
        run = jdist.distribute(params_and_opt_state, strategy, **SEVERAL)
        (params, opt_state), (other, _) = strategy.init(create_both), strategy.init(create_both)
        for states in ((params, strategy.init(lambda: create_both()[1])), (other, opt_state), (params, params)):
            with pytest.raises(StepError, match=r"make them all by one .*strategy\.init\(lambda: \(params, opt_state"):
                run(*states, BATCH)
        alone = strategy.init(lambda: create_both()[0])
        with pytest.raises(StepError, match="with one state twice; pass a different state for each"):
            run(alone, alone, BATCH)
        with pytest.raises(
            TypeError, match=r"is a dict, not a tuple of states\. .*strategy\.init\(lambda: \(params, opt_state\)\)"
        ):
            _, _ = alone

    def test_prepare(self, strategy):
        run = jdist.distribute(params_and_opt_state, strategy, **SEVERAL)
        states = run.prepare(*create_both(), BATCH)
        near(strategy.fetch(states), create_both())


def test_batches_whose_rows_are_on_another_axis(strategy):
    axes = {"x": 1, "y": 0}
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.normal(size=(5, rows, 3)).astype(np.float32), "y": rng.normal(size=rows).astype(np.float32)}
        for rows in (8, 8, 5)
    ]

    def step(w, batch):
        def loss_fn(w):
            sums = (batch["x"] @ w).sum(0)
            return jdist.mean((sums - batch["y"]) ** 2, batch["mask"]), sums

        (value, sums), grads = jdist.value_and_grad(loss_fn, has_aux=True)(w)
        return w - 0.01 * grads, {"loss": value}, sums

    def do(strategy):
        run = jdist.distribute(step, strategy, batch_axis=axes, returns=("state", "metrics", "examples"), accumulate=2)
        w, found = strategy.init(lambda: jnp.ones(3)), []
        for batch in strategy.distribute_dataset(batches, batch_axis=axes):
            w, metrics, sums = run(w, batch)
            found.append((metrics["loss"], sums))
        return [(float(value), np.asarray(sums)) for value, sums in found], strategy.fetch(w)

    (found, w), (expected, expected_w) = under(strategy, do)
    assert [len(sums) for _, sums in found] == [8, 8, 5]
    near(found, expected)
    near(w, expected_w)
    with pytest.raises(StrategyError, match="batches that workers read have their rows first"):
        strategy.distribute_datasets_from_function(lambda context: batches, batch_axis=1)


def test_a_picture_shows_which_server_has_which_part(strategy):
    servers = {place.name: place for group in strategy.report().places for place in group.places}
    assert list(servers) == ["coordinator", "worker 0", "ps 0", "ps 1"]
    state = strategy.init(lambda: create(optax.adam(0.1)))
    assert "here until the first step" in str(strategy.report(state))
    with pytest.raises(StepError, match=r"not of this parameter_server: it is a TrainState.*A step decides"):
        strategy.report(jax.eval_shape(lambda: create(optax.adam(0.1))))
    with pytest.raises(StepError, match="mirrored has none"):
        jdist.mirrored().report(state)
    total = strategy.report(state).num_bytes
    state, _ = jdist.distribute(train_step, strategy)(state, BATCH)
    picture = jdist.show(state)
    assert str(picture) == str(strategy.report(state))
    assert picture.num_bytes == total
    kept = [holding for group in picture.places[2:] for place in group.places for holding in place.holdings]
    pieces = [holding for holding in kept if holding.way == 0]
    # The pieces of all servers are each array once, one behind the other.
    in_pieces = [leaf for leaf in picture.leaves if leaf.kept == "in pieces, each on one server"]
    assert sum(piece.num_bytes for piece in pieces) == sum(leaf.num_bytes for leaf in in_pieces) > 0
    assert {leaf.kept for leaf in picture.leaves} <= {
        "in pieces, each on one server",
        "whole on every server",
        "whole in this process",
    }
    assert [piece.spans[0][0] for piece in pieces] == [0.0, *(piece.spans[0][1] for piece in pieces[:-1])]
    check_picture(str(picture.svg))


def test_a_state_that_was_on_servers_which_were_closed_is_said_to_be_lost(strategy):
    """The last of the file: it closes the servers that the others share."""
    state, _ = jdist.distribute(train_step, strategy)(strategy.init(lambda: create(optax.sgd(0.1))), BATCH)
    strategy.coordinator.close()
    with pytest.raises(StrategyError, match="this state is gone: its parameter servers were closed"):
        strategy.fetch(state)
    with pytest.raises(StrategyError, match="this parameter server was closed"):
        jdist.distribute(train_step, strategy)(state, BATCH)
