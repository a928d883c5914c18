"""Batches of rows that are read by their numbers."""

import numpy as np
import pytest

from jdist.data import from_arrays, from_rows, shard
from jdist.data.position import ProcessShard
from jdist.errors import BatchError, DatasetError
from tests.data.adapters.positions import Counted, check_position, fed, flat, rows
from tests.data.counting import distributed_dataset

SEED = {"shuffle_seed": 3}


@pytest.mark.parametrize("options", [{}, SEED, {**SEED, "epochs": 2}, {**SEED, "workers": 3}])
def test_a_position_is_exact(options):
    (first, second, _) = check_position(lambda: from_rows(Counted(20), global_batch=6, **options), stops=(0, 1, 4))
    assert sorted(flat(first)) == sorted([*range(20)] * options.get("epochs", 1))
    assert first == second, "a pass is all epochs, in the same orders"


def test_it_is_the_order_of_arrays():
    read = from_rows(Counted(23), global_batch=5, shuffle_seed=7, epochs=3)
    arrays = from_arrays({"y": np.arange(23)}, global_batch=5, shuffle_seed=7, shuffle="index", epochs=3)
    assert [batch["y"].tolist() for batch in read] == [batch["y"].tolist() for batch in arrays]
    assert (read.num_steps, read.steps_per_epoch, read.rows_of(4)) == (15, 5, 3)


def test_a_far_batch_reads_its_own_rows_alone():
    counted = Counted(10**9)
    dataset = fed(from_rows(counted, global_batch=64, shuffle_seed=0), prefetch=0)
    dataset.element_spec  # noqa: B018 - the first batch
    dataset.go_to(100_000)
    counted.reads.clear()
    batch = next(iter(dataset))
    assert counted.reads == batch["y"].tolist()
    assert len(set(counted.reads)) == 64


@pytest.mark.parametrize("partial", ["pad", "drop"])
def test_each_of_several_processes_reads_its_own_rows_alone(partial):
    for index in range(2):
        counted = Counted(14)
        source = from_rows(counted, global_batch=8)
        assert source.fingerprint  # reads two rows, once
        counted.reads.clear()
        share = ProcessShard(index=index, count=2)
        for batch in distributed_dataset(source, num_replicas=4, share=share, prefetch=0, partial=partial):
            own = batch["y"][batch["mask"]].tolist()
            assert set(counted.reads) == {*own, *batch["y"].tolist()}
            assert set(own) <= {*range(4 * index, 4 * index + 4), *range(8 + 4 * index, 14)}
            counted.reads.clear()


@pytest.mark.parametrize(("count", "processes"), [(4, 1), (4, 2), (4, 4)])
def test_a_position_fits_another_number_of_processes(count, processes):
    saved = fed(from_rows(Counted(30), global_batch=8, **SEED))
    saved.go_to(2)
    parts = []
    for index in range(processes):
        share = ProcessShard(index=index, count=processes)
        source = from_rows(Counted(30), global_batch=8, **SEED)
        dataset = distributed_dataset(source, num_replicas=count, share=share)
        dataset.restore(saved.state())
        parts.append(rows(dataset))
    assert [flat(step) for step in zip(*parts, strict=True)] == rows(saved)


def test_len_and_dropped_batches():
    assert len(fed(from_rows(Counted(20), global_batch=6))) == 4
    dropped = fed(from_rows(Counted(20), global_batch=6, epochs=2), partial="drop")
    assert (len(dropped), dropped.num_steps) == (6, 6)
    assert [len(batch) for batch in rows(dropped)] == [6] * 6


def test_rows_may_be_numbers_lists_and_pairs():
    (batch,) = from_rows([(1, [1.0, 2.0]), (2, [3.0, 4.0])], global_batch=2)
    assert batch[0].tolist() == [1, 2]
    assert batch[1].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    (batch,) = from_rows(range(3), global_batch=3)
    assert batch.tolist() == [0, 1, 2]


def test_the_fingerprint_tells_data_apart_but_not_by_random_changes():
    def of(data, **options):
        return from_rows(data, global_batch=2, **options).fingerprint

    class Augmented(Counted):
        def __getitem__(self, number):
            return {"y": np.random.default_rng().normal()}

    assert of([1, 2, 3]) == of([1, 2, 3]) != of([1, 2, 4])
    assert of([1, 2, 3], shuffle_seed=1) != of([1, 2, 3])
    assert of(Augmented(3)) == of(Augmented(3)) != of(Augmented(4))


def test_its_batches_can_be_sharded():
    source = from_rows(Counted(12), global_batch=2)
    assert [batch["y"].tolist() for batch in shard(source, 2, 1)] == [[2, 3], [6, 7], [10, 11]]


def failing(number):
    class Failing(Counted):
        def __getitem__(self, wanted):
            if wanted == number:
                raise OSError("bad sector")
            return super().__getitem__(wanted)

    return Failing(20)


def test_an_error_names_the_row_and_the_batch():
    source = from_rows(failing(9), global_batch=4)
    assert len(source.fingerprint) > 0
    with pytest.raises(OSError, match="bad sector") as caught:
        rows(fed(source))
    assert caught.value.__notes__ == ["while reading row 9 (from 0)", "while making batch 2 (from 0) of a Failing"]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_batches_before_an_error_come_first(workers):
    dataset = iter(fed(from_rows(failing(9), global_batch=4, workers=workers)))
    assert [next(dataset)["y"][0] for _ in range(2)] == [0, 4]
    with pytest.raises(OSError, match="bad sector"):
        next(dataset)


def test_a_row_that_differs_is_named():
    with pytest.raises(
        BatchError, match=r"in the list row 2 \(from 0\) differs from row 0 .*: \['x'\] was int64.* and is"
    ):
        list(from_rows([{"x": [1, 2]}, {"x": [1, 2]}, {"x": [1]}], global_batch=3))
    with pytest.raises(BatchError, match=r"row 1 .* differs from row 0 .*: \['z'\] is new"):
        list(from_rows([{"x": 1}, {"x": 1, "z": 2}], global_batch=2))
    with pytest.raises(BatchError, match=r"row 1 .* differs from row 0 .*: \['x'\] was int64.* and is float64"):
        list(from_rows([{"x": 1}, {"x": 2.5}], global_batch=2))


def test_a_row_that_is_none_is_named():
    with pytest.raises(BatchError, match="a row of the list is None; it must be a tree of arrays") as caught:
        rows(fed(from_rows([{"x": 1}, {"x": 2}, None, {"x": 4}], global_batch=3)))
    assert caught.value.__notes__ == ["while reading row 2 (from 0)", "while making batch 0 (from 0) of a list"]


def test_what_a_device_cannot_hold_is_named_with_its_batch():
    with pytest.raises(BatchError, match=r"leaf \['y'\].*dtype <U1.*leave it out") as caught:
        rows(fed(from_rows([{"y": 1}, {"y": 2}, {"y": "a"}], global_batch=2)))
    assert caught.value.__notes__ == ["in batch 1 (from 0) of a list"]
    with pytest.raises(BatchError, match="has no leaves: None") as caught:
        rows(fed(batch for batch in [{"y": np.zeros(2)}, None]))
    assert caught.value.__notes__ == ["while making batch 1 (from 0) of a generator"]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "the dataset is empty: the list has 0 rows"),
        ([1], {"global_batch": 0}, "`global_batch` is 0; it must be a whole number"),
        ([1], {"workers": 0}, "`workers` is 0; it must be"),
        ([1], {"shuffle_seed": -1}, "`shuffle_seed` is -1; it must be"),
        (iter([1]), {}, "a list_iterator has no rows that can be read by their numbers"),
        (7, {}, "a int has no rows"),
    ],
)
def test_refused(data, options, message):
    with pytest.raises(DatasetError, match=message):
        from_rows(data, **{"global_batch": 2, **options})
