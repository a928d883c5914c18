"""Datasets from a function: which replica receives which element, at the end of the data too."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jdist
from jdist.data import from_arrays
from jdist.data.sources.replica_batches import from_function
from jdist.errors import BatchError, DatasetError
from tests.data.counting import distributed_dataset
from tests.toys import TWO

PER_REPLICA = jdist.InputOptions(replication="per_replica")


def rows_of_replicas(batch, num_replicas=2):
    """The real rows of each replica."""
    parts = zip(*(np.split(np.asarray(batch[name]), num_replicas) for name in ("x", "mask")), strict=True)
    return [x[mask].tolist() for x, mask in parts]


def in_batches(rows, size):
    rows = list(rows)
    return [{"x": np.asarray(rows[start : start + size])} for start in range(0, len(rows), size)]


def make(kind, rows, size):
    if kind == "random access":
        return from_arrays({"x": np.asarray(rows)}, global_batch=size)
    return in_batches(rows, size) if kind == "list" else iter(in_batches(rows, size))


@pytest.mark.parametrize("kind", ["random access", "list", "iterator"])
class TestElements:
    def test_each_replica_takes_the_next_one(self, kind):
        contexts = []

        def dataset(context):
            contexts.append(context)
            return make(kind, range(9), context.per_replica_batch(4))

        batches = list(TWO.distribute_datasets_from_function(dataset))
        assert [rows_of_replicas(batch) for batch in batches] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]
        assert contexts == [jdist.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=2)]

    def test_what_does_not_fill_all_replicas_can_be_left_out_or_refused(self, kind):
        def dataset(context):
            return make(kind, range(10), 2)

        batches = list(TWO.distribute_datasets_from_function(dataset, partial="drop"))
        assert [rows_of_replicas(batch) for batch in batches] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        with pytest.raises(BatchError, match="2 rows instead of 4"):
            list(TWO.distribute_datasets_from_function(dataset, partial="error"))

    def test_fewer_elements_than_replicas_leave_the_last_replicas_without(self, kind):
        strategy = jdist.mirrored([f"cpu:{i}" for i in range(4)])
        (batch,) = strategy.distribute_datasets_from_function(lambda context: make(kind, range(3), 2))
        assert rows_of_replicas(batch, 4) == [[0, 1], [2], [], []]

    def test_a_pipeline_for_each_replica(self, kind):
        contexts = []

        def dataset(context):
            contexts.append((context.input_pipeline_id, context.num_input_pipelines, context.num_replicas_in_sync))
            rows = range(9)[context.input_pipeline_id :: context.num_input_pipelines]
            return make(kind, rows, context.per_replica_batch(4))

        batches = list(TWO.distribute_datasets_from_function(dataset, PER_REPLICA))
        assert [rows_of_replicas(batch) for batch in batches] == [[[0, 2], [1, 3]], [[4, 6], [5, 7]], [[8], []]]
        assert contexts == [(0, 2, 2), (1, 2, 2)]

    def test_a_pipeline_that_ends_before_the_others(self, kind):
        def dataset(context):
            return make(kind, [10] if context.input_pipeline_id == 0 else [20, 21, 22], 1)

        batches = list(TWO.distribute_datasets_from_function(dataset, PER_REPLICA))
        assert [rows_of_replicas(batch) for batch in batches] == [[[10], [20]], [[21], []], [[22], []]]

    def test_a_second_loop(self, kind):
        dataset = TWO.distribute_datasets_from_function(lambda context: make(kind, range(4), 2))
        assert len(list(dataset)) == 1
        if kind == "iterator":
            with pytest.raises(DatasetError, match="exhausted"):
                list(dataset)
        else:
            assert len(list(dataset)) == 1


def test_pipelines_of_different_kinds():
    def dataset(context):
        kind = "random access" if context.input_pipeline_id == 0 else "list"
        return make(kind, range(context.input_pipeline_id, 8, 2), 2)

    dataset = TWO.distribute_datasets_from_function(dataset, PER_REPLICA)
    for _ in range(2):
        assert [rows_of_replicas(batch) for batch in dataset] == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]


@pytest.mark.parametrize("strategy", [jdist.default(), jdist.one_device("cpu:1")], ids=lambda s: s.name)
@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["per_worker", "per_replica"])
def test_one_replica_takes_every_element(strategy, options):
    def dataset(context):
        assert context.num_replicas_in_sync == context.num_input_pipelines == 1
        return in_batches(range(3), 2)

    batches = strategy.distribute_datasets_from_function(dataset, options)
    assert [rows_of_replicas(batch, 1) for batch in batches] == [[[0, 1]], [[2]]]


def test_a_short_element_before_others_is_closed_up():
    elements = [{"x": np.array(rows)} for rows in ([0, 1], [2, 3], [4], [5, 6])]
    batches = list(TWO.distribute_datasets_from_function(lambda context: elements))
    assert [rows_of_replicas(batch) for batch in batches] == [[[0, 1], [2, 3]], [[4, 5], [6]]]


@given(
    rows=st.integers(1, 40),
    each=st.integers(1, 4),
    num_replicas=st.integers(1, 8),
    kind=st.sampled_from(["random access", "list", "iterator"]),
)
@settings(deadline=None)
def test_every_row_comes_once_and_in_order(rows, each, num_replicas, kind):
    context = jdist.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=num_replicas)
    source = from_function(lambda _: make(kind, range(rows), each), [context], num_replicas=num_replicas)
    dataset = distributed_dataset(source, num_replicas=num_replicas, prefetch=0)
    batches = list(dataset)
    assert [row for batch in batches for row in batch["x"][batch["mask"]].tolist()] == list(range(rows))
    full = each if kind == "random access" else min(each, rows)  # a plain iterable's first batch is a full one
    assert {len(batch["x"]) for batch in batches} == {full * num_replicas}
    if kind == "random access":
        assert dataset.num_steps == len(batches)


class Refilled:
    """Gives the same memory again and again, with new numbers in it."""

    num_steps = 4
    global_batch = 2
    fingerprint = "refilled"

    def __init__(self):
        self.memory = np.empty(2, np.int32)

    def batch_at(self, step):
        self.memory[:] = step
        return {"x": self.memory}


@pytest.mark.parametrize("plain", [True, False])
def test_memory_that_a_source_refills_is_copied_in_time(plain):
    def dataset(context):
        source = Refilled()
        return (source.batch_at(step) for step in range(4)) if plain else source

    batches = list(TWO.distribute_datasets_from_function(dataset))
    assert [batch["x"].tolist() for batch in batches] == [[0, 0, 1, 1], [2, 2, 3, 3]]


class TestPosition:
    def dataset(self, num_replicas=2, seed=3, rows=13):
        devices = [f"cpu:{i}" for i in range(num_replicas)]
        return jdist.mirrored(devices).distribute_datasets_from_function(
            lambda context: from_arrays(
                {"x": np.arange(rows)}, global_batch=context.per_replica_batch(4), shuffle_seed=seed, epochs=2
            )
        )

    @pytest.mark.parametrize("step", [0, 1, 3, 6])
    def test_a_saved_position_goes_on_with_the_next_batch(self, step):
        whole = self.dataset()
        expected = [batch["x"].tolist() for batch in whole]
        assert len(expected) == whole.num_steps == 7
        first, second = self.dataset(), self.dataset()
        iterator = iter(first)
        for _ in range(step):
            next(iterator)
        second.restore(first.state())
        assert [batch["x"].tolist() for batch in second] == expected[step:]

    def test_other_data_or_another_number_of_replicas_is_refused_by_name(self):
        state = self.dataset().state()
        with pytest.raises(DatasetError, match=r"pipeline_0\.shuffle_seed was 3 and is 4"):
            self.dataset(seed=4).restore(state)
        with pytest.raises(DatasetError, match="replicas_each was 2 and is 4"):
            self.dataset(num_replicas=4).restore(state)

    def test_the_position_in_plain_iterables_cannot_be_saved(self):
        dataset = TWO.distribute_datasets_from_function(lambda context: in_batches(range(4), 2))
        with pytest.raises(DatasetError, match="cannot be saved"):
            dataset.state()

    def test_without_end(self):
        def endless(context):
            return from_arrays({"x": np.arange(4)}, global_batch=2, epochs=None)

        dataset = TWO.distribute_datasets_from_function(endless)
        assert dataset.num_steps is None
        iterator = iter(dataset)
        assert [next(iterator)["x"].tolist() for _ in range(3)] == [[0, 1, 2, 3]] * 3
        dataset.close()

    def test_there_is_no_batch_behind_the_end(self):
        context = jdist.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=2)
        source = from_function(lambda _: from_arrays(np.arange(4), global_batch=2), [context], num_replicas=2)
        assert source.batch_at(0).tolist() == [0, 1, 2, 3]
        with pytest.raises(DatasetError, match="batch 1 does not exist: the source has 1 steps"):
            source.batch_at(1)


def broken():
    yield {"x": np.arange(2)}
    raise OSError("the disk is gone")


UNEQUAL, UNLIKE = ([{"x": np.arange(2)}, other] for other in ({"x": np.arange(3)}, {"y": np.arange(2)}))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (in_batches(range(4), 2), "a list is not a dataset function.*distribute_dataset"),
        (lambda _: None, "result for InputContext.*a NoneType is not a source of batches"),
    ],
)
def test_what_is_refused_by_the_call(fn, message):
    with pytest.raises(DatasetError, match=message):
        TWO.distribute_datasets_from_function(fn)


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (lambda _: [], DatasetError, "the dataset is empty: the ReplicaBatches gave no batch"),
        (lambda _: UNEQUAL, BatchError, "a batch has 3 rows, but the first per-replica batch has 2"),
        (lambda _: UNLIKE, BatchError, r"differ: in batch 1 \(from 0\) \['x'\] is missing; \['y'\] is new"),
        (lambda _: broken(), OSError, "the disk is gone"),
    ],
)
def test_what_is_refused_once_it_is_read(fn, error, message):
    with pytest.raises(error, match=message):
        list(TWO.distribute_datasets_from_function(fn))


def test_a_step_trains_on_them_as_on_global_batches():
    @jdist.distribute(TWO)
    def step(total, batch):
        return total + jdist.all_reduce((batch["x"] * batch["mask"]).sum(), "sum"), {}

    def dataset(context):
        return from_arrays({"x": np.arange(9.0)}, global_batch=context.per_replica_batch(4))

    total = TWO.init(lambda: jax.numpy.float32(0))
    for batch in TWO.distribute_datasets_from_function(dataset):
        total, _ = step(total, batch)
    assert float(TWO.fetch(total)) == 36
