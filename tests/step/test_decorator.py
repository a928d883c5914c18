"""The decorator, in its two forms."""

import functools
import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StepError
from tests.toys import BATCH, TWO, add


class TestForms:
    def test_decorator_and_function(self, strategy):
        decorated = jdist.distribute(strategy, donate=False)(add)
        called = jdist.distribute(add, strategy, donate=False)
        for step in (decorated, called):
            state, metrics = step(1.0, BATCH)
            assert (float(state), float(metrics["x"])) == (2.5, 1.5)
            assert step.strategy is strategy
            assert step.options.donate is False

    def test_it_looks_like_the_step(self):
        step = jdist.distribute(add, TWO)
        assert (step.__name__, step.__doc__, step.__wrapped__) == ("add", "Adds the mean of x.", add)
        assert repr(step) == f"<add distributed by {TWO!r}>"

    def test_a_callable_without_a_name(self):
        class Step:
            def __call__(self, w, batch):
                return w + 1, {}

        step = jdist.distribute(Step(), TWO)
        assert float(step(1.0, BATCH)[0]) == 2.0
        assert "the step" in repr(step)

    def test_a_method_and_a_partial(self):
        class Trainer:
            rate = 2.0

            def step(self, w, batch):
                return w + self.rate, {}

        assert float(jdist.distribute(Trainer().step, TWO)(1.0, BATCH)[0]) == 3.0
        partial = functools.partial(lambda rate, w, batch: (w + rate, {}), 5.0)
        assert float(jdist.distribute(partial, TWO)(1.0, BATCH)[0]) == 6.0

    def test_nothing_keeps_a_dropped_step_alive(self, quick_collection):
        def local(w, batch):
            return w + 1, {}

        step = jdist.distribute(local, TWO)
        step(1.0, BATCH)
        gone = weakref.ref(step)
        del step, local
        gc.collect()
        assert gone() is None


def test_distribute_refuses_what_is_no_strategy_or_no_step():
    with pytest.raises(
        StepError, match=r"needs a strategy, it got <function.*@jdist\.distribute\(jdist\.mirrored\(\)\)"
    ):
        jdist.distribute(lambda state, batch: state)
    with pytest.raises(StepError, match=r"needs a strategy, it got 'mirrored'"):
        jdist.distribute("mirrored")
    with pytest.raises(StepError, match=r"needs a strategy, it got 'mirrored'"):
        jdist.distribute(lambda state, batch: state, "mirrored")
    with pytest.raises(StepError, match=r"needs a function to distribute, it got 3"):
        jdist.distribute(3, jdist.default())
    with pytest.raises(StepError, match=r"takes the step first: write `distribute\(step, strategy\)`"):
        jdist.distribute(jdist.default(), jdist.default())


class Trainer:
    """A class with a distributed method, as trainers are written."""

    def __init__(self, rate):
        self.rate, self.traced = rate, 0

    @jdist.distribute(TWO)
    def train_step(self, state, batch):
        self.traced += 1
        return state - self.rate * batch["x"].mean(), {"rate": jnp.float32(self.rate)}

    @staticmethod
    @jdist.distribute(TWO)
    def eval_step(state, batch):
        return state, {"mean": batch["x"].mean()}


class TestMethods:
    batch = {"x": np.ones(4, np.float32)}  # noqa: RUF012 - no test changes it

    def test_each_object_has_a_step_of_its_own_that_is_traced_once(self):
        one, other = Trainer(0.5), Trainer(0.25)
        for trainer, expected in ((one, 0.5), (other, 0.75), (one, 0.5)):
            state, metrics = trainer.train_step(jnp.float32(1), self.batch)
            assert (float(state), float(metrics["rate"])) == (expected, trainer.rate)
        assert (one.traced, other.traced) == (1, 1)
        assert one.train_step.strategy is TWO
        history = jdist.fit(one.train_step, jnp.float32(1), self.batch, global_batch=4, callbacks=[])[1]
        assert len(history.rows) > 0

    def test_a_static_method_takes_no_object(self):
        assert float(Trainer(1).eval_step(jnp.float32(1), self.batch)[1]["mean"]) == 1
        assert float(Trainer.eval_step(jnp.float32(1), self.batch)[1]["mean"]) == 1

    def test_an_unbound_method_and_an_object_without_room_are_told(self):
        with pytest.raises(StepError, match=r"the parameter `state` of train_step has the role 'batch'"):
            Trainer.train_step(Trainer(1), jnp.float32(1), self.batch)

        class Slotted:
            __slots__ = ()
            step = Trainer.__dict__["train_step"]

        with pytest.raises(StepError, match=r"train_step is a method of a Slotted: `__slots__` leave no room"):
            _ = Slotted().step
