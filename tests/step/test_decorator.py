"""The decorator, in its two forms."""

import functools
import gc
import weakref

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
