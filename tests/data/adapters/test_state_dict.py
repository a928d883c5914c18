"""Loaders with `state_dict` and `load_state_dict`, and states that JSON has to hold."""

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest

from jdist.data.sources.sequential import from_plain, to_plain
from jdist.errors import DatasetError
from tests.data.adapters.positions import check_position, fed, flat, rows
from tests.data.job import Job


class Loader:
    """Batches in a random order, drawn from a generator that goes on from pass to pass; 7 of 3 rows."""

    def __init__(self, batches=7):
        self.batches, self.generator, self.order, self.at = batches, np.random.default_rng(5), None, 0

    def __iter__(self) -> Iterator:
        if self.order is None or self.at == self.batches:
            self.order, self.at = self.generator.permutation(3 * self.batches), 0
        while self.at < self.batches:
            start, self.at = 3 * self.at, self.at + 1
            yield {"y": self.order[start : start + 3]}

    def __len__(self):
        return self.batches

    def state_dict(self):
        return {"at": self.at, "order": self.order, "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state):
        self.at, self.order = state["at"], state["order"]
        self.generator.bit_generator.state = state["generator"]


def test_a_position_is_exact():
    first, second, _ = check_position(Loader, stops=(0, 1, 6))
    assert sorted(flat(first)) == sorted(flat(second)) == [*range(21)]
    assert first == second, "the convention has no state between passes, so that each begins as the first"
    assert len(fed(Loader())) == 7


def test_processes_whose_loaders_end_unequally_end_together_and_go_on():
    def program(job, saved=None, stop=None):
        def run(process):
            dataset = job.dataset(process, Loader((7, 4)[process]), autoshard="off")
            if saved is not None:
                dataset.restore(saved)
            batches = [batch["y"][batch["mask"]].tolist() for batch in itertools.islice(dataset, stop)]
            return batches if stop is None else dataset.state()

        return job.run(run)

    whole = program(Job(2))
    assert [len(batches) for batches in whole] == [7, 7]
    assert [sorted(flat(batches)) for batches in whole] == [[*range(21)], [*range(12)]]
    for stop in (2, 5):  # before and behind the end of the second
        saved, _ = program(Job(2), stop=stop)
        assert program(Job(2), saved=saved) == [batches[stop:] for batches in whole]


def test_processes_that_share_a_loader_need_the_same():
    refused = Job(2).batches([Loader(7), Loader(4)], autoshard="auto")
    assert all("batches is 7 on process 0, and 4 on process 1" in str(error) for error in refused)


def test_states_survive_json():
    state = {
        "a": [1, 2.5, None, True, "x"],
        "b": (b"\0\1", {3: np.arange(4, dtype=np.uint8)}),
        "c": np.float32(2.5),
        "d": np.zeros((2, 0)),
        "e": 2**100,
    }
    back = from_plain(json.loads(json.dumps(to_plain(state, "loader"))))
    assert back["a"] == state["a"]
    assert back["e"] == state["e"]
    assert back["b"][0] == b"\0\1"
    np.testing.assert_array_equal(back["b"][1][3], np.arange(4, dtype=np.uint8), strict=True)
    assert isinstance(back["b"], tuple)
    assert back["c"] == 2.5
    assert back["d"].shape == (2, 0)


def test_a_state_that_cannot_be_saved_is_named():
    class Odd(Loader):
        def state_dict(self):
            return {**super().state_dict(), "handles": [object()]}

    dataset = fed(Odd())
    assert len(rows(dataset)) == 7
    with pytest.raises(DatasetError, match=r"position of the Odd cannot be saved: .* object at \['handles'\]\[0\]"):
        dataset.state()


def test_another_loader_is_refused():
    class Other(Loader):
        pass

    with pytest.raises(DatasetError, match="kind was Loader and is Other"):
        fed(Other()).restore(fed(Loader()).state())
    with pytest.raises(DatasetError, match=r"not the saved position of a Loader, which has `sources`"):
        fed(Loader()).restore({"version": 1, "step": 1, "fingerprint": "kind=Loader batches=7"})
