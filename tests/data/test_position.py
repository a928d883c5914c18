"""Positions of a distributed dataset: resuming, one iterator at a time, interrupts, plain iterables."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.data import from_arrays
from jdist.errors import DatasetError
from tests.data.counting import Counting, feed, real_rows, values

# --- position, state, restore ---


@pytest.mark.parametrize("prefetch", [0, 4])
def test_the_position_counts_batches_handed_out_and_never_prefetched_ones(prefetch):
    dataset = feed(Counting(), prefetch=prefetch)
    assert [dataset.state()["step"] for _ in dataset] == list(range(1, 11))


def test_a_loop_left_early_goes_on_where_it_stopped_and_a_finished_one_starts_again():
    dataset = feed(Counting(num_steps=4))
    for batch in dataset:
        if batch["x"][0] == 1:
            break
    assert values(dataset) == [[2, 2], [3, 3]]
    assert values(dataset) == [[0, 0], [1, 1], [2, 2], [3, 3]]


@given(
    rows=st.integers(1, 30),
    global_batch=st.integers(1, 7),
    stop=st.integers(0, 40),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    steps_per_call=st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_resuming_anywhere_gives_the_rest_on_any_number_of_devices(
    rows, global_batch, stop, before, after, steps_per_call
):
    def make(num_replicas):
        source = from_arrays({"x": np.arange(rows)}, global_batch=global_batch, shuffle_seed=1, epochs=2)
        return feed(source, num_replicas=num_replicas, steps_per_call=steps_per_call, prefetch=stop % 3)

    whole = real_rows(make(before))
    first, seen = make(before), []
    state = first.state()
    for number, batch in enumerate(first):
        if number == stop:
            break
        seen.append(batch)
        state = first.state()
    second = make(after)
    second.restore(json.loads(json.dumps(state)))
    assert real_rows(seen) + real_rows(second) == whole


def test_resuming_asks_for_the_next_batch_and_no_other():
    first = feed(Counting(num_steps=None), prefetch=0)
    state = {**first.state(), "step": 10_000_000}
    source = Counting(num_steps=None)
    dataset = feed(source, prefetch=0)
    dataset.restore(state)
    assert next(iter(dataset))["x"].tolist() == [10_000_000] * 2
    assert source.asked == [10_000_000]
    assert dataset.state()["step"] == 10_000_001


def test_restoring_the_end_gives_nothing_and_then_starts_again():
    dataset = feed(Counting(num_steps=2))
    list(dataset)
    other = feed(Counting(num_steps=2))
    other.restore(dataset.state())
    assert values(other) == []
    assert values(other) == [[0, 0], [1, 1]]


def test_restoring_after_a_finished_pass_goes_to_the_position():
    dataset = feed(Counting(num_steps=3))
    states = [dataset.state() for _ in dataset]
    dataset.restore(states[0])
    assert values(dataset) == [[1, 1], [2, 2]]


def test_positions_of_a_source_that_drops_batches_count_its_own_steps():
    dataset = feed(Counting(num_steps=4, short_at=(1, 3)), partial="drop")
    assert [(batch["x"][0], dataset.position) for batch in dataset] == [(0, 1), (2, 3)]


def test_state_is_the_same_with_several_steps_a_call():
    dataset = feed(Counting(num_steps=5), steps_per_call=2)
    assert [dataset.position for _ in dataset] == [2, 4, 5]


def test_other_options_are_refused_by_what_differs():
    saved = feed(from_arrays({"x": np.arange(9)}, global_batch=4, shuffle_seed=1)).state()
    for arrays, options, message in (
        (np.arange(9), {"global_batch": 2, "shuffle_seed": 1}, "global_batch was 4 and is 2"),
        (np.arange(9), {"global_batch": 4, "shuffle_seed": 2}, "shuffle_seed was 1 and is 2"),
        (np.arange(8), {"global_batch": 4, "shuffle_seed": 1}, "rows was 9 and is 8"),
        (np.arange(9) + 1, {"global_batch": 4, "shuffle_seed": 1}, "another dataset: content was"),
    ):
        with pytest.raises(DatasetError, match=message):
            feed(from_arrays({"x": arrays}, **options)).restore(saved)


NOTHING: Any = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved | {"version": 2}, "version 2, but this jdist reads version 1"),
        (lambda saved: saved | {"step": -1}, "`step` is -1; it must be"),
        (lambda saved: saved | {"step": True}, "`step` is True; it must be"),
        (lambda saved: saved | {"step": "3"}, "`step` is '3'; it must be"),
        (lambda saved: saved | {"step": 11}, "step 11, but the dataset has only 10 steps"),
        (lambda saved: saved | {"fingerprint": "old"}, "fingerprint was 'old' and is 'counting'"),
        (lambda _: {"step": 3}, r"lacks \['version', 'fingerprint'\]"),
        (lambda _: NOTHING, "not a NoneType"),
    ],
)
def test_broken_states_are_refused_and_the_position_stays(change, message):
    dataset = feed(Counting())
    next(iter(dataset))
    with pytest.raises(DatasetError, match=message):
        dataset.restore(change(dataset.state()))
    assert dataset.position == 1


def test_a_plain_iterable_refuses_state_and_says_why():
    dataset = feed([{"x": np.arange(2)}])
    for call in (dataset.state, lambda: dataset.restore({"step": 0})):
        with pytest.raises(DatasetError, match=r"list cannot be saved or restored.*only goes forward.*from_arrays"):
            call()


# --- one iterator at a time, interrupts, plain iterables ---


def test_a_second_iterator_ends_the_first_and_shares_its_position():
    dataset = feed(Counting())
    first = iter(dataset)
    next(first)
    second = iter(dataset)
    assert next(second)["x"].tolist() == [1, 1]
    with pytest.raises(DatasetError, match="another `iter` of the same dataset has started"):
        next(first)
    assert next(second)["x"].tolist() == [2, 2]


def test_restoring_ends_the_iterator():
    dataset = feed(Counting())
    start = dataset.state()
    iterator = iter(dataset)
    next(iterator)
    dataset.restore(start)
    with pytest.raises(DatasetError, match="restored to another position"):
        next(iterator)
    assert next(iter(dataset))["x"].tolist() == [0, 0]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_an_interrupt_the_dataset_goes_on_at_its_position(prefetch):
    interrupts = iter([False, False, True])

    def place(batch):
        if next(interrupts, False):
            raise KeyboardInterrupt
        return batch

    dataset = feed(Counting(num_steps=4), place=place, prefetch=prefetch)
    with pytest.raises(KeyboardInterrupt):
        list(dataset)
    assert dataset.position == 2
    assert values(dataset) == [[2, 2], [3, 3]]


@pytest.mark.parametrize("prefetch", [0, 1, 8])
def test_a_generator_loses_nothing_when_loops_are_left_early(prefetch):
    dataset = feed(({"x": np.array([n, n])} for n in range(6)), prefetch=prefetch)
    seen = [next(iter(dataset))["x"][0] for _ in range(3)]
    assert seen + [batch["x"][0] for batch in dataset] == [0, 1, 2, 3, 4, 5]


def test_an_error_that_came_while_no_one_looked_is_not_lost():
    def source():
        yield {"x": np.array([0, 0])}
        yield {"x": np.array([1, 1])}
        raise OSError("disk on fire")

    dataset = feed(source(), prefetch=8)
    next(iter(dataset))
    iterator = iter(dataset)
    assert next(iterator)["x"].tolist() == [1, 1]
    with pytest.raises(OSError, match="disk on fire"):
        next(iterator)


def test_an_exhausted_iterator_is_an_error_and_not_an_empty_loop():
    dataset = feed(iter([{"x": np.arange(2)}]))
    assert values(dataset) == [[0, 1]]
    for _ in range(2):
        with pytest.raises(DatasetError, match=r"list_iterator is exhausted.*from_arrays"):
            list(dataset)


def test_a_list_can_be_gone_through_again():
    dataset = feed([{"x": np.arange(2)}, {"x": np.arange(2) + 2}])
    assert values(dataset) == values(dataset) == [[0, 1], [2, 3]]
    assert next(iter(dataset))["x"].tolist() == [0, 1]
    assert values(dataset) == [[0, 1], [2, 3]]


def test_an_iterable_that_gives_nothing_the_second_time_is_an_error():
    class Once:
        def __init__(self):
            self.items = iter([{"x": np.arange(2)}])

        def __iter__(self):
            yield from self.items

    dataset = feed(Once())
    list(dataset)
    with pytest.raises(DatasetError, match="this pass over the Once gave no batch"):
        list(dataset)
