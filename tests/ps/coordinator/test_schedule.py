"""Functions scheduled by hand: `strategy.coordinator`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import ArtifactError, ClosureCancelledError, ClosureError, StepError, StrategyError
from tests.ps.hidden_layer import BATCH, create, train_step
from tests.ps.real_cluster import local

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers


@pytest.fixture(scope="module")
def strategy():
    with local(local_workers=2, local_ps=1) as made:
        yield made


def add(x, y):
    return {"sum": x + y}


def square(x):
    return x**2


def test_results_come_as_the_tree_that_the_function_returns(strategy):
    coordinator = strategy.coordinator
    found = [coordinator.schedule(add, args=(np.float32(i),), kwargs={"y": np.ones(2, np.float32)}) for i in range(20)]
    coordinator.join(60)
    assert coordinator.done
    fetched = coordinator.fetch(found)
    assert [x["sum"].tolist() for x in fetched] == [[i + 1.0] * 2 for i in range(20)]
    assert (found[0]["sum"].done, found[0]["sum"].error) == (True, None)
    assert coordinator.num_workers == 2


def test_a_result_is_an_argument_before_it_is_there(strategy):
    value = strategy.coordinator.schedule(square, (np.float32(2),))
    for _ in range(3):
        value = strategy.coordinator.schedule(square, (value,))
    assert float(value) == 2.0**16


def test_each_call_knows_its_worker(strategy):
    def who(x):
        return x + jdist.ps.worker_index()

    found = [strategy.coordinator.schedule(who, (np.int32(10),)) for _ in range(40)]
    assert {int(x) for x in found} == {10, 11}
    with pytest.raises(StepError, match="known only in a function"):
        jdist.ps.worker_index()


def test_beside_the_steps_of_a_state(strategy):
    step, state = jdist.distribute(train_step, strategy), strategy.init(lambda: create(optax.sgd(0.1)))
    values = []
    for i in range(10):
        state, _ = step(state, BATCH)
        values.append(strategy.coordinator.schedule(square, (np.float32(i),)))
    assert [float(x) for x in values] == [i**2 for i in range(10)]
    assert int(strategy.fetch(state).step) == 10
    assert float(strategy.coordinator.schedule(square, (np.float32(2),))) == 4


def test_what_is_asked_wrongly(strategy):
    coordinator = strategy.coordinator
    with pytest.raises(StepError, match="the arguments"):
        coordinator.schedule(square, ("text",))
    with pytest.raises(StepError, match="the result of"):
        coordinator.schedule(lambda x: "text", (np.float32(1),))

    def prints(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(ArtifactError, match="calls the host"):
        coordinator.schedule(prints, (np.float32(1),))
    assert jdist.mirrored().coordinator is None
    coordinator.schedule(lambda x: jnp.linalg.eigvalsh(x), (np.eye(400, dtype=np.float32),))
    with pytest.raises(TimeoutError, match="closures are not done after"):
        coordinator.join(0.0)
    coordinator.join(60)


def test_what_waits_for_a_failed_one_is_cancelled(strategy):
    bad = {**BATCH, "x": np.full_like(BATCH["x"], np.nan)}
    step, state = jdist.distribute(train_step, strategy), strategy.init(lambda: create(optax.sgd(0.1)))
    state, metrics = step(state, BATCH)
    assert np.isfinite(float(metrics["loss"]))
    with strategy.coordinator._job._coordinator.queue.lock:  # so that nothing fails before what waits for it is there
        _, metrics = step(state, bad)
        waits = strategy.coordinator.schedule(square, (metrics["loss"],))
    with pytest.raises(ClosureError, match="NaN or infinite"):
        strategy.coordinator.join(60)
    with pytest.raises(ClosureCancelledError):
        waits.result(10)
    assert isinstance(waits.error, ClosureCancelledError)
    assert float(strategy.coordinator.schedule(square, (np.float32(2),))) == 4


def test_a_result_is_used_as_the_number_that_it_is(strategy):
    value = strategy.coordinator.schedule(square, (np.float32(3),))
    total = 0.0
    total += value
    assert (total, value.item(), value > 8, -value, value**2, bool(value == 9)) == (9.0, 9.0, True, -9.0, 81.0, True)
    assert float(value + value) == 18.0
    assert float(np.sqrt(value)) == 3.0
    assert float(jnp.asarray(value) + 1) == 10.0
    assert len({value, value}) == 1


def draw(key, x):
    return jax.random.normal(key, x.shape) + x


def key_of(seed):
    return jax.random.key(seed)


def test_keys_are_arguments_and_no_results(strategy):
    for key in (jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")):
        found = strategy.coordinator.schedule(draw, (key, np.zeros(4, np.float32)))
        np.testing.assert_allclose(found.result(60), jax.random.normal(key, (4,)), rtol=1e-5)
    with pytest.raises(StepError, match=r"the result of key_of has a PRNG key; return `jax\.random\.key_data\(key\)`"):
        strategy.coordinator.schedule(key_of, (np.int32(3),))


def slow(x):
    return jnp.linalg.eigvalsh(x).sum()


def test_a_call_is_cancelled_while_no_worker_has_it(strategy):
    coordinator = strategy.coordinator  # has far more to do than its workers take ahead
    found = [coordinator.schedule(slow, (np.eye(300, dtype=np.float32),)) for _ in range(400)]
    waits = coordinator.schedule(square, (found[-1],))
    after = coordinator.schedule(add, (waits, waits))["sum"]
    later = coordinator.schedule(square, (np.float32(3),))
    assert waits.cancel()  # its argument is not there yet
    assert found[-2].cancel()  # it is in the queue
    assert not waits.cancel()
    coordinator.join(60)
    for cancelled in (waits, found[-2], after):
        with pytest.raises(ClosureCancelledError):
            cancelled.result(0)
        assert (cancelled.done, isinstance(cancelled.error, ClosureCancelledError)) == (True, True)
    assert not found[0].cancel()
    assert float(later) == 9.0
    assert all(float(x) == 300.0 for x in [*found[:-2], found[-1]])


@pytest.mark.full
def test_in_synchronous_mode_nothing_is_cancelled():
    with local(local_workers=1, local_ps=1, mode="sync") as made:
        step, state = jdist.distribute(train_step, made), made.init(lambda: create(optax.sgd(0.1)))
        state, metrics = step(state, BATCH)
        assert not metrics["loss"].cancel()
        assert np.isfinite(float(metrics["loss"]))


def test_after_close_there_is_an_error(strategy):
    """The last of the file: it closes the servers that the others share."""
    assert float(strategy.coordinator.schedule(square, (np.float32(2),))) == 4.0
    strategy.coordinator.close()
    strategy.coordinator.close()
    with pytest.raises(StrategyError, match="this parameter server was closed"):
        strategy.coordinator.schedule(square, (np.float32(2),))
