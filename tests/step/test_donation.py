"""A call takes its state's buffers: what else shares them is copied first, and what an earlier call took is named."""

import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import DonatedStateError
from tests.toys import ON_ALL_DEVICES

BATCH = {"x": np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8)}


def create():
    return {"params": {"w": jnp.ones((8, 8)), "b": jnp.zeros(8)}, "key": jax.random.key(0), "n": jnp.int32(0)}


def proximal(state, batch, old, *, older=None):
    """A step of gradient descent that stays near older parameters."""

    def loss_of(params):
        loss = jdist.mean(((batch["x"] @ params["w"] + params["b"]) ** 2).sum(1))
        for there in (old, older):
            if there is not None:
                loss += sum(jnp.sum((params[k] - there[k]) ** 2) for k in params)
        return loss

    loss, grads = jdist.value_and_grad(loss_of)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {**state, "params": params, "n": state["n"] + 1}, {"loss": loss}


@pytest.fixture(params=ON_ALL_DEVICES, ids=lambda s: f"{s.name}-{s.transform}")
def strategy(request):
    return request.param


# In a process of its own: JAX ends it where they are not copied first.
PROGRAM = """
    from tests.step.test_donation import BATCH, ON_ALL_DEVICES, create, jax, jdist, jnp, np, proximal

    def train(strategy, step, keep):
        state, losses = strategy.init(create), []
        for i in range(4):
            params = keep(state["params"])
            state, metrics = step(state, BATCH, params, older=keep(state["params"]) if i % 2 else None)
            losses.append(float(metrics["loss"]))
        return losses, strategy.fetch(state)["params"]

    for strategy in ON_ALL_DEVICES:
        print(strategy.name, strategy.transform, flush=True)
        step = jdist.distribute(proximal, strategy)
        copied = train(strategy, step, lambda params: jax.tree.map(np.array, params))
        shared = train(strategy, step, lambda params: params)
        jax.tree.map(np.testing.assert_array_equal, copied, shared)
    print("all arguments", flush=True)

    def step(state, batch, *others):
        return {k: x if k == "key" else x + 1 for k, x in state.items()}, {"total": sum(x.sum() for x in others)}

    for strategy in ON_ALL_DEVICES[:-1]:
        print(strategy.name, strategy.transform, flush=True)
        one, place = jnp.arange(8.0), strategy.replicated_sharding
        put = (lambda x: jax.device_put(x, place)) if place else (lambda x: jax.device_put(x, jax.devices()[0]))
        key = put(jax.random.key(3))
        train_step = jdist.distribute(step, strategy, args=("state", "batch", "replicated", "replicated"))
        state = {"w": put(one), "of the same array": put(one), "key": key}
        state, metrics = train_step(state, np.zeros(8), put(one), one)  # `one` is what both were made of
        assert float(metrics["total"]) == 2 * 28
        own = state["w"].addressable_data(0)
        bits = jax.random.key_data(state["key"])
        state, metrics = train_step(state, np.zeros(8), own, bits)
        assert float(metrics["total"]) == 28 + 8 + 3, metrics
        again = jax.random.normal(key=jax.random.key(1))
        state, metrics = train_step(state, np.zeros(8), again, [state["w"], {"a": state["w"]}][0])
        assert strategy.fetch(state["w"]).tolist() == list(range(3, 11))
    print("all views")
"""


def test_arguments_that_share_buffers_with_the_donated_state():
    """Its leaves, and views that share a buffer with one."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=300, check=False
    )
    assert "all arguments\n" in ran.stdout, ran.stdout + ran.stderr[-3000:]
    assert ran.stdout.endswith("all views\n"), ran.stdout + ran.stderr[-3000:]


@pytest.mark.parametrize("strategy", ON_ALL_DEVICES[:2], ids=lambda s: s.name)
def test_a_batch_that_is_a_leaf_of_the_state(strategy):
    step = jdist.distribute(lambda state, x: ({"rows": state["rows"] + x}, {"sum": x.sum()}), strategy)
    state = strategy.init(lambda: {"rows": jnp.arange(8.0)})
    for _ in range(2):
        state, metrics = step(state, state["rows"])
    assert float(metrics["sum"]) == 56
    assert strategy.fetch(state)["rows"].tolist() == (4 * np.arange(8)).tolist()


class TestDonated:
    """Arguments that an earlier call has consumed."""

    @pytest.fixture
    def gone(self, strategy):
        state = strategy.init(create)
        target = state["params"]
        jdist.distribute(proximal, strategy)(state, BATCH, None)
        return target

    def test_in_a_step(self, strategy, gone):
        step = jdist.distribute(proximal, strategy)
        with pytest.raises(
            DonatedStateError, match=r"argument 3 `old` of proximal.*first: \['b'\].*jnp.copy.*donate=False"
        ):
            step(strategy.init(create), BATCH, gone)
        with pytest.raises(DonatedStateError, match=r"keyword argument `older` of proximal was donated.*\['b'\]"):
            step(strategy.init(create), BATCH, None, older=gone)
        with pytest.raises(DonatedStateError, match="the state passed in was donated"):
            step({"params": gone, "key": jax.random.key(0), "n": 0}, BATCH, None)

    def test_as_a_batch(self, strategy):
        rows = jax.device_put(BATCH["x"], strategy.batch_sharding)
        jdist.distribute(lambda x, batch: x + 1, strategy)  # not called: `rows` goes as JAX donates it
        jax.jit(lambda x: x + 1, donate_argnums=0)(rows)
        with pytest.raises(DonatedStateError, match=r"argument 2 `batch` of proximal.*\['x'\]"):
            jdist.distribute(proximal, strategy)(strategy.init(create), {"x": rows}, None)

    def test_elsewhere(self, strategy, gone):
        with pytest.raises(DonatedStateError, match=r"argument 1 of strategy.init was donated.*donate=False"):
            strategy.init(lambda params: params, gone)
        if strategy.transform != "jit":
            with pytest.raises(DonatedStateError, match=r"argument 2 of strategy.run was donated.*donate=False"):
                strategy.run(lambda a, b: b["b"], 1, gone)
            with pytest.raises(DonatedStateError, match=r"keyword argument `b` of strategy.run was donated"):
                strategy.run(lambda a, b: b["b"], 1, b=gone)
        for call in (
            strategy.fetch,
            strategy.check,
            strategy.local_results,
            lambda value: strategy.reduce("mean", value),
            lambda value: strategy.gather(value, 0),
        ):
            with pytest.raises(DonatedStateError, match=r"donated to an earlier call.*\['b'\].*donate=False"):
                call(gone)

    def test_per_replica_values(self, strategy):
        rows = jax.device_put(np.ones((strategy.num_replicas, 3)), strategy.batch_sharding)
        value = jdist.PerReplica(rows)
        rows.delete()
        for call in (value.local_results, value.all_results, lambda: strategy.reduce("mean", value)):
            with pytest.raises(DonatedStateError, match=r"was donated to an earlier call.*donate=False"):
                call()
        with pytest.raises(DonatedStateError, match=r"was donated to an earlier call.*donate=False"):
            jdist.PerReplica.of([rows])

    def test_in_the_loop(self, strategy, gone):
        def train_step(params, batch):
            loss, grads = jdist.value_and_grad(lambda p: jdist.mean((batch["x"] @ p["w"]) ** 2, batch["mask"]))(params)
            return jax.tree.map(jnp.subtract, params, grads), {"loss": loss}

        def eval_step(params, batch):
            return {"loss": jdist.mean((batch["x"] @ params["w"]) ** 2, batch["mask"])}

        with pytest.raises(DonatedStateError, match=r"donated.*donate=False"):
            jdist.fit(train_step, gone, BATCH, strategy=strategy, global_batch=8, progress=False, log_to=None)
        with pytest.raises(DonatedStateError, match=r"donated.*donate=False"):
            jdist.evaluate(eval_step, gone, BATCH, strategy=strategy, global_batch=8)
        with pytest.raises(DonatedStateError, match=r"donated.*donate=False"):
            jdist.predict(lambda p, batch: batch["x"] @ p["w"], gone, BATCH, strategy=strategy, global_batch=8)

    def test_in_a_checkpoint(self, strategy, gone, tmp_path):
        with (
            jdist.train.Checkpointer(tmp_path) as checkpoints,
            pytest.raises(DonatedStateError, match=r"donated.*donate=False"),
        ):
            checkpoints.save(1, gone)


class TestThreads:
    """One step, called from several threads."""

    def run(self, function, count=4):
        answers = [None] * count

        def call(i):
            try:
                answers[i] = function(i)
            except Exception as exc:  # noqa: BLE001 - the thread that started this one looks at it
                answers[i] = exc

        threads = [threading.Thread(target=call, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def test_each_caller_gets_its_own_results(self, strategy):
        def step(state, batch):
            return {"n": state["n"] + batch["x"][0].astype(jnp.int32)}, {"x": jdist.mean(batch["x"])}

        train_step = jdist.distribute(step, strategy)
        batches = [{"x": np.full(8, i, np.float32)} for i in range(4)]
        states = [strategy.init(lambda: {"n": jnp.int32(0)}) for _ in range(4)]

        def train(i):
            state, seen = states[i], set()
            for _ in range(50):
                state, metrics = train_step(state, batches[i])
                seen.add(float(metrics["x"]))
            return int(strategy.fetch(state)["n"]), seen

        assert self.run(train) == [(50 * i, {float(i)}) for i in range(4)]
        train_step.wait()

    def test_evaluation_from_several_threads(self, strategy):
        eval_step = jdist.distribute(lambda w, batch: {"x": jdist.mean(w * batch["x"])}, strategy, returns=("metrics",))
        w = strategy.init(lambda: jnp.float32(2))

        def evaluate(i):
            batch = {"x": np.full(8, i, np.float32)}
            return {float(eval_step(w, batch)["x"]) for _ in range(50)}

        assert self.run(evaluate) == [{2.0 * i} for i in range(4)]

    def test_a_state_that_two_donate(self, strategy):
        train_step = jdist.distribute(lambda state, batch: ({"w": state["w"] + 1}, {"x": batch["x"].mean()}), strategy)
        batch = {"x": np.ones(8, np.float32)}
        for _ in range(20):
            state = strategy.init(lambda: {"w": jnp.zeros(8)})
            answers = self.run(lambda i, state=state: train_step(state, batch), count=2)
            (error,) = [answer for answer in answers if isinstance(answer, Exception)]
            assert isinstance(error, DonatedStateError), error
            (done,) = [answer for answer in answers if not isinstance(answer, Exception)]
            assert strategy.fetch(done[0])["w"].tolist() == [1.0] * 8


@pytest.mark.parametrize("strategy", ON_ALL_DEVICES[:2], ids=lambda s: s.name)  # of many replicas XLA ends the process
def test_a_call_that_fails_while_it_runs_says_why(strategy):
    """It has consumed its own state by then, which is not what went wrong."""

    def refuses(value):
        raise ValueError("no such row")

    def step(state, batch):
        found = jax.pure_callback(refuses, jax.ShapeDtypeStruct((), np.float32), batch["x"].sum())
        return {"w": state["w"] + 1}, {"found": jdist.all_reduce(found, "mean")}

    made = jdist.distribute(step, strategy, check_replicas=0)
    with pytest.raises(Exception, match="no such row") as raised:
        float(made({"w": jnp.zeros(3)}, BATCH)[1]["found"])
    assert not isinstance(raised.value, DonatedStateError)
