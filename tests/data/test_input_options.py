"""How batches are made ahead: the options, both ways to give them, and where batches lie meanwhile."""

import threading

import jax
import numpy as np
import pytest

import jdist
from jdist.data import from_arrays
from jdist.errors import DatasetError
from tests.data.counting import distributed_dataset
from tests.toys import TWO


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": -1}, "`prefetch` is -1; it must be a whole number, 0 or more"),
        ({"prefetch_to_device": "yes"}, "`prefetch_to_device` is 'yes'; it must be True or False"),
        ({"replication": "per_host"}, "`replication` is 'per_host'; it must be 'per_worker' or 'per_replica'"),
        ({"autoshard": "rows"}, "`autoshard` is 'rows'; it must be one of 'auto', 'file', 'data', 'off'"),
    ],
)
def test_values_that_are_not_allowed_are_refused(options, message):
    with pytest.raises(DatasetError, match=message):
        jdist.InputOptions(**options)


class Asked:
    """Five batches; remembers which were asked for, and tells when so many were."""

    def __init__(self, tell_at=None):
        self.count = 0
        self.tell_at = tell_at
        self.told = threading.Event()

    def __iter__(self):
        for number in range(5):
            self.count += 1
            if self.count == self.tell_at:
                self.told.set()
            yield {"x": np.full(2, number)}


def test_the_depth_says_how_far_ahead_batches_are_made():
    eager = Asked(tell_at=4)  # one for the consumer, and three ahead of it
    iterator = iter(TWO.distribute_dataset(eager, jdist.InputOptions(prefetch=3)))
    next(iterator)
    assert eager.told.wait(timeout=60)
    lazy = Asked()
    iterator = iter(TWO.distribute_dataset(lazy, jdist.InputOptions(prefetch=0)))
    next(iterator)
    assert lazy.count == 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_kept_on_the_host_are_placed_as_they_are_taken(prefetch):
    placed = []

    def place(batch):
        placed.append(threading.current_thread())
        return batch["x"].tolist()

    source = from_arrays({"x": np.arange(6)}, global_batch=2)
    dataset = distributed_dataset(source, num_replicas=2, place=place, prefetch=prefetch, prefetch_to_device=False)
    iterator = iter(dataset)
    for number in range(3):
        assert len(placed) == number
        assert next(iterator) == [2 * number, 2 * number + 1]
    assert set(placed) == {threading.current_thread()}
    assert list(iterator) == []
    assert dataset.position == 3


@pytest.mark.parametrize("to_device", [True, False])
def test_the_step_receives_the_same_batches_either_way(to_device):
    source = from_arrays({"x": np.arange(9)}, global_batch=4)
    batches = list(TWO.distribute_dataset(source, jdist.InputOptions(prefetch_to_device=to_device), steps_per_call=2))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batches))
    assert batches[0]["x"].sharding.spec == jax.sharding.PartitionSpec(None, ("replica",))
    assert [batch["x"].tolist() for batch in batches] == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 8, 8, 8]]]


def test_an_iterator_left_early_loses_no_batch_that_waits_on_the_host():
    numbers = ({"x": np.full(2, number)} for number in range(6))
    dataset = TWO.distribute_dataset(numbers, jdist.InputOptions(prefetch=3, prefetch_to_device=False))
    for batch in dataset:
        assert batch["x"].tolist() == [0, 0]
        break
    assert [int(batch["x"][0]) for batch in dataset] == [1, 2, 3, 4, 5]
