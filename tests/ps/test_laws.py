"""The law of microbatches under parameter servers: those of a worker, and workers themselves, are replicas in time."""

import contextlib
import functools
import itertools
import re
import warnings

import pytest

import jdist
from jdist.errors import BoundaryError
from tests.by_default import some
from tests.conformance.test_laws import STEPS, assert_same, cpus, result
from tests.step.test_notices import BATCH, GLOBAL, SHARED, STATE, step_of

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers

LAYOUTS = {  # servers and how they are reached, microbatches
    "async": ({"local_workers": 1, "local_ps": 2}, 4),
    "sync": ({"local_workers": 2, "local_ps": 1, "mode": "sync"}, 2),
}


@pytest.fixture(scope="module")
def strategy_of():
    """The strategy of each mode, whose servers serve all steps."""
    with contextlib.ExitStack() as ends:

        @functools.cache
        def make(mode):
            made = jdist.parameter_server(**LAYOUTS[mode][0])
            ends.callback(lambda: made.coordinator.close())
            return made

        yield make


# What a worker of synchronous mode would have to wait for, as the others' gradients are combined first.
REFUSED = {
    "sharpness_aware": "from what its workers have combined already",
    "looked_at_after_the_update": "from what its workers have combined already",
    "in_eight_bits": "what the step combines by max over all rows",
    "penalised_by_the_gradient": "from what its workers have combined already",
    "looking_ahead_by_an_inner_gradient": "from what its workers have combined already",
    **dict.fromkeys(
        [
            "contrastive_over_gathered_rows",
            "led_by_one_replica",
            "gathered_along_the_second_axis",
            "weighted_by_the_parameters",
            "weighted_by_a_running_mean",
            "with_a_variance_of_all_rows",
        ],
        "depends on the state, which only the workers have",
    ),
}


# What would be written over what other workers have written.
NO_GRADIENT_OF_OURS = "clipping_the_gradient_of_each_example"


EVERY = list(itertools.product(LAYOUTS, STEPS))
IN_BOTH = [name for name in STEPS if name not in REFUSED and name != NO_GRADIENT_OF_OURS]
# What both modes compute runs by default in one of them, in the one and in the other by turns.
BY_DEFAULT = [
    (mode, name) for mode, name in EVERY if name not in IN_BOTH or mode == ("async", "sync")[IN_BOTH.index(name) % 2]
]


@pytest.mark.parametrize(("mode", "name"), some(EVERY, BY_DEFAULT))
def test_microbatches_under_parameter_servers_are_replicas(strategy_of, mode, name):
    strategy, accumulate = strategy_of(mode), LAYOUTS[mode][1]
    if name == NO_GRADIENT_OF_OURS:
        with pytest.raises(BoundaryError, match=r"without `jdist\.value_and_grad`.* or use `jdist\.mirrored\(\)`"):
            result(STEPS[name], strategy, accumulate)
        return
    if mode == "sync" and name in REFUSED:
        with pytest.raises(BoundaryError, match=REFUSED[name]):
            result(STEPS[name], strategy, accumulate)
        return
    assert_same(result(STEPS[name], strategy, accumulate), result(STEPS[name], jdist.mirrored(cpus(4))))


@pytest.mark.parametrize(
    ("mode", "accumulate", "parts"), [("sync", 1, 2), ("sync", 2, 4), ("async", 2, 2), ("async", 1, 1)]
)
@pytest.mark.parametrize(
    ("step", "words"),
    [
        (step_of(SHARED["diffusion"]), "from a key that all replicas share: each of the {parts} has the same numbers"),
        (
            step_of(GLOBAL["a sum"]),
            "divides its loss by 16, the rows of the global batch.* gradients are {parts} times too small",
        ),
    ],
)
def test_what_a_trace_shows_is_warned_of_once(strategy_of, mode, accumulate, parts, step, words):
    strategy = strategy_of(mode)
    run = jdist.distribute(step, strategy, accumulate=accumulate)
    state = strategy.init(lambda: STATE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            state, _ = run(state, BATCH)
    words = words.format(parts=parts)
    found = [each for each in caught if re.search(words, str(each.message))]
    assert len(found) == (parts > 1), [str(each.message) for each in caught]
    assert all(each.filename == __file__ for each in found)
