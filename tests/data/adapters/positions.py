"""The law of positions: whoever goes on in a new process gets what an uninterrupted consumer gets, also in later passes."""

import itertools
import json

import numpy as np

from tests.data.counting import distributed_dataset


def fed(source, **options):
    return distributed_dataset(source, num_replicas=1, **options)


def rows(dataset):
    """The real rows of the batches to the end of the pass."""
    return [batch["y"][batch["mask"]].tolist() for batch in dataset]


def flat(batches):
    """The rows of all batches."""
    return [*itertools.chain.from_iterable(batches)]


def check_position(make, *, stops, passes=3, **options):
    """Stops after so many batches of the first pass, with prefetched ones under way, and goes on in a new dataset.

    Args:
        make: makes the source, as a new process would.
        stops: how many batches were had.
        passes: how many passes are compared.

    Returns:
        The rows of the passes.
    """
    whole = fed(make(), **options)
    expected = [rows(whole) for _ in range(passes)]
    for stop in stops:
        first = fed(make(), **options)
        assert first.element_spec["y"].shape == (len(expected[0][0]),)
        iterator = iter(first)
        assert [next(iterator)["mask"].sum() for _ in range(stop)] == [len(r) for r in expected[0][:stop]]
        saved = json.loads(json.dumps(first.state()))
        again = fed(make(), **options)
        assert again.element_spec is not None, "which has read a batch, that must not count"
        again.restore(saved)
        assert again.position == stop
        assert [rows(again) for _ in range(passes)] == [expected[0][stop:], *expected[1:]], f"stopped after {stop}"
        again.rewind()  # as `fit` does between passes
        between = fed(make(), **options)
        between.restore(json.loads(json.dumps(again.state())))
        assert rows(between) == rows(again)
        assert rows(first) == expected[0][stop:], "nothing was lost where the loop was left"
    return expected


def check_nothing_is_read_again(make, *, stop):
    """Goes on behind `stop` batches, and looks at the rows that are read for the next one.

    Args:
        make: makes the source of a `Counted`; the rows of a pass come once each.
        stop: how many batches were had.
    """
    counted = Counted(10 * stop)
    dataset = fed(make(counted), prefetch=0)
    iterator = iter(dataset)
    had = {row for _ in range(stop) for row in next(iterator)["y"].tolist()}
    saved, expected = json.loads(json.dumps(dataset.state())), next(iterator)["y"].tolist()
    iterator.close()
    counted = Counted(10 * stop)
    again = fed(make(counted), prefetch=0)
    again.restore(saved)
    counted.reads.clear()  # what a fingerprint reads
    iterator = iter(again)
    assert next(iterator)["y"].tolist() == expected
    iterator.close()
    assert set(expected) <= set(counted.reads)
    assert not had & set(counted.reads)


class Counted:
    """Rows that are read by number, and which were."""

    def __init__(self, count):
        self.count, self.reads = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if not 0 <= number < self.count:
            raise IndexError(number)
        self.reads.append(int(number))
        return {"y": np.int64(number), "x": np.full(3, number, np.float32)}
