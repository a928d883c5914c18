"""Several processes that feed one strategy: which rows each makes, and how they agree on the steps and the end."""

import json
import re
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.data import from_arrays, from_files
from jdist.data.prefetch import THREAD_NAME
from jdist.errors import BatchError, ClusterError, DatasetError, PeerFailedError
from tests.data.job import Job


def arrays(rows, global_batch=2, **options):
    return from_arrays({"x": np.asarray(rows)}, global_batch=global_batch, **options)


def real(batches):
    """The rows of each batch that are no padding."""
    return [batch["x"][batch["mask"]].tolist() for batch in batches]


def flat(batches):
    return [row for rows in real(batches) for row in rows]


class Numbered:
    """A random-access source of the batches of another one, and nothing else."""

    def __init__(self, source):
        self.num_steps, self.global_batch, self.fingerprint = source.num_steps, source.global_batch, source.fingerprint
        self.batch_at = lambda step: source.batch_at(step)


class Numpys:
    """A random-access source whose numbers are numpy's."""

    num_steps, global_batch, fingerprint = np.int64(2), np.int64(3), "mine"

    def batch_at(self, step):
        return {"x": np.full(3, step)}


class Plain(Iterable):
    """Batches that can be read again and again, but not by number."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        for batch in self.batches:
            if isinstance(batch, Exception):
                raise batch
            yield {"x": np.asarray(batch, np.int32)}


# ---- which rows


def test_the_rows_of_a_short_batch_stay_with_the_replicas_that_one_process_gives_them_to():
    zero, one = Job(2).batches(arrays(range(14), 8), autoshard="data", prefetch=0)
    assert real(zero) == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert real(one) == [[4, 5, 6, 7], [12, 13]]
    assert one[1]["x"].tolist() == [12, 13, 8, 9], "filled up as one process fills up"


def outcome(parts):
    """The batches that the parts of all processes make together, their masks included; or why there are none."""
    if any(isinstance(part, Exception) for part in parts):
        (refused,) = {(type(part), str(part)) for part in parts}
        return refused
    joined = [
        {key: np.concatenate([part[key] for part in step], axis=-1) for key in step[0]}
        for step in zip(*parts, strict=True)
    ]
    return [{key: leaf.tolist() for key, leaf in batch.items()} for batch in joined]


@settings(deadline=None, max_examples=150)
@given(
    rows=st.integers(1, 40),
    global_batch=st.integers(1, 20),
    replicas=st.sampled_from([4, 8]),
    kind=st.sampled_from(["arrays", "iterable", "files", "numbered"]),
    weights=st.booleans(),
    partial=st.sampled_from(["pad", "drop", "error"]),
    steps_per_call=st.integers(1, 3),
    seed=st.none() | st.integers(0, 3),
)
def test_by_data_the_global_batch_is_the_same_whatever_the_number_of_processes(
    rows, global_batch, replicas, kind, weights, partial, steps_per_call, seed
):
    data = {"x": np.arange(rows)} | ({"weights": np.arange(rows) % 3 / 2} if weights else {})
    source: Any = from_arrays(data, global_batch=global_batch, shuffle_seed=seed)
    if kind == "iterable":
        source = list(source)
    elif kind == "files":
        source = from_files(["all"], lambda _: data, global_batch=global_batch)
    elif kind == "numbered":  # a source that is not asked for parts of batches
        source = Numbered(source)
    one, two, four = (
        outcome(
            Job(count, replicas_each=replicas // count).batches(
                [source] * count, autoshard="data", prefetch=0, partial=partial, steps_per_call=steps_per_call
            )
        )
        for count in (1, 2, 4)
    )
    assert one == two == four


@settings(deadline=None, max_examples=100)
@given(
    rows=st.integers(1, 30),
    global_batch=st.integers(1, 12),
    count=st.integers(1, 4),
    replicas_each=st.integers(1, 3),
    plain=st.booleans(),
)
def test_by_data_all_processes_together_have_the_rows_of_the_source_in_order(
    rows, global_batch, count, replicas_each, plain
):
    source: Any = arrays(range(rows), global_batch)
    sources = [list(source) if plain else source] * count
    parts = Job(count, replicas_each=replicas_each).batches(sources, autoshard="data", prefetch=0)
    assert [row for step in zip(*map(real, parts), strict=True) for part in step for row in part] == list(range(rows))
    (shape,) = {batch["x"].shape for part in parts for batch in part}
    assert shape[0] % replicas_each == 0


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    replicas_each=st.integers(1, 3),
    kind=st.sampled_from(["random-access", "iterable", "generator"]),
    prefetch=st.integers(0, 2),
)
def test_each_row_of_sources_of_their_own_comes_once_however_unequal(rows, sizes, replicas_each, kind, prefetch):
    count = len(rows)
    sources = [arrays(range(100 * i, 100 * i + n), sizes[i]) for i, n in enumerate(rows)]
    if kind != "random-access":
        sources = [list(source) if kind == "iterable" else iter(source) for source in sources]
    parts = Job(count, replicas_each=replicas_each).batches(sources, prefetch=prefetch)
    assert [flat(part) for part in parts] == [list(range(100 * i, 100 * i + n)) for i, n in enumerate(rows)]
    (shape,) = {batch["x"].shape for part in parts for batch in part}
    assert shape[0] % replicas_each == 0
    assert len({len(part) for part in parts}) == 1


@settings(deadline=None, max_examples=100)
@given(files=st.lists(st.integers(0, 7), min_size=3, max_size=7), count=st.integers(2, 3), each=st.integers(1, 3))
def test_by_file_each_process_reads_its_own_files_and_no_others(files, count, each):
    starts = np.cumsum([0, *files])
    rows = {str(i): np.arange(starts[i], starts[i + 1]) for i in range(len(files))}
    seen = [[] for _ in range(count)]

    def source(process):
        def read(path):
            seen[process].append(path)
            return {"x": rows[path]}

        return from_files(list(rows), read, global_batch=each * count)

    parts = Job(count).batches([source(i) for i in range(count)], autoshard="file", prefetch=0)
    own = [[i for i in range(len(files)) if i % count == process] for process in range(count)]
    if not all(sum(files[i] for i in mine) for mine in own):
        assert all(isinstance(part, DatasetError | PeerFailedError) for part in parts), parts  # refused by all
        return
    assert seen == [[str(i) for i in mine] for mine in own]
    assert [flat(part) for part in parts] == [[row for i in mine for row in rows[str(i)]] for mine in own]
    assert {batch["x"].shape for part in parts for batch in part} == {(each,)}


@pytest.mark.parametrize(("files", "reads"), [(3, [["0", "2"], ["1"]]), (1, [["0"], ["0"]])])
def test_auto_goes_by_file_where_there_are_enough_files(files, reads):
    seen = [[], []]

    def source(process):
        return from_files(
            [str(i) for i in range(files)], lambda path: seen[process].append(path) or np.arange(4), global_batch=2
        )

    Job(2).batches([source(0), source(1)], autoshard="auto", with_mask=True)
    assert seen == reads


def test_auto_shares_arrays_by_rows():
    assert real(Job(2).batches(arrays(range(4), 4), autoshard="auto")[1]) == [[2, 3]]


def test_one_process_has_everything_whatever_is_asked_for():
    for autoshard in ("auto", "file", "data", "off"):
        (part,) = Job(1).batches(arrays(range(5)), autoshard=autoshard)
        assert flat(part) == list(range(5))


@pytest.mark.parametrize("autoshard", ["data", "off"])
def test_numbers_of_a_source_may_be_numpys(autoshard):
    parts = Job(3).batches([Numpys()] * 3, autoshard=autoshard)
    assert {len(row) for part in parts for row in real(part)} == {1 if autoshard == "data" else 3}


# ---- what cannot be shared


def refusals(job, sources, error: Any = DatasetError, **options):
    results = job.batches(sources, **options)
    assert [type(result) for result in results] == [error] * job.count, results
    return [str(result) for result in results]


def in_files(paths, global_batch):
    return from_files(list(paths), lambda path: {"x": np.arange(3)}, global_batch=global_batch)


@pytest.mark.parametrize(
    ("sources", "autoshard", "error", "message"),
    [
        ([in_files("abc", 8)] * 3, "file", BatchError, "does not divide by 3 processes.* use a global batch of 6 or 9"),
        ([in_files("ab", 3)] * 3, "file", DatasetError, r'Use autoshard="data" \(each reads all files'),
        ([arrays(range(4))] * 2, "file", DatasetError, "cannot be shared file by file"),
        (
            [arrays(range(8)), arrays(range(8)), arrays(range(9))],
            "data",
            DatasetError,
            "rows is 8 on process 0, and 9 on process 2",
        ),
        (
            [in_files("abc", 2), in_files("ab", 2)],
            "auto",
            DatasetError,
            "the number of files is 3 on process 0, and 2 on process 1",
        ),
        (
            [arrays(range(8)), Plain([1])],
            "off",
            DatasetError,
            "source is random-access on process 0, and iterable on process 1",
        ),
    ],
)
def test_sources_that_cannot_be_shared_are_refused_by_all(sources, autoshard, error, message):
    for refused in refusals(Job(len(sources)), sources, error, autoshard=autoshard):
        assert re.search(message, refused)


@pytest.mark.parametrize("long", [False, True])
def test_batches_that_do_not_go_together_are_named_by_process_and_leaf(long, monkeypatch):
    if long:
        monkeypatch.setattr("jdist.data.lockstep._TEXT_BYTES", 10)
    sources = [arrays(np.zeros((3, 2), np.float32)), arrays(np.zeros((3, 2), np.float32)), arrays(np.zeros((3, 4)))]
    for message in refusals(Job(3), sources):
        if long:
            assert "that of process 2 is not that of process 0" in message
        else:
            assert "['x'] is float32[rows, 2] on process 0, and float64[rows, 4] on process 2" in message


@pytest.mark.parametrize("empty", [Plain(), Plain([])])
def test_a_process_without_any_row_is_named(empty):
    for message in refusals(Job(3), [Plain([1]), empty, Plain([2])]):
        assert message.startswith(
            "process 1 has no rows: its source gave none, so its part of a batch cannot be filled up"
        )


def test_if_no_process_has_rows_the_dataset_is_empty():
    for message in refusals(Job(2), [Plain(), Plain()]):
        assert message.startswith("the dataset is empty")


# ---- ends and errors


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_one_source_reaches_all(prefetch):
    job = Job(3)
    sources = [Plain([1], [2], [3]), Plain([4], OSError("disk gone")), Plain([5])]
    seen = [[], [], []]

    def program(process):
        for batch in job.dataset(process, sources[process], prefetch=prefetch):
            seen[process].append(batch)

    zero, one, two = job.run(program)
    assert (type(one), str(one)) == (OSError, "disk gone")
    for error in (zero, two):
        assert type(error) is PeerFailedError
        assert str(error) == "making batch 1 (from 0) failed on process 1: OSError: disk gone"
    assert [flat(batches) for batches in seen] == [[1], [4], [5]]


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (
            ([1, 2], [3]),
            "batches 2 (from 0) of the processes differ: the number of rows is 2 on process 0, and nothing, as its source "
            "has ended, on process 1. Every process must make the same",
        ),
        (
            ([1, 2], [3], [4, 5, 6]),
            "batches 2 (from 0) of the processes differ: the number of rows is 2 on process 0, and 3",
        ),
        (
            ([1, 2], [[3]], [4, 5]),
            "batches 1 (from 0) of the processes differ: ['x'] is int32[rows] on process 0, and int32[",
        ),
        (([1, 2], OSError("disk gone"), [4, 5]), "making batch 1 (from 0) failed on process 1: OSError: disk gone"),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_by_data_all_have_to_make_the_same_batches(second, what, prefetch):
    seen = [[], []]

    def program(process):
        source = Plain([1, 2], [3], [4, 5]) if process == 0 else Plain(*second)
        for batch in job.dataset(process, source, autoshard="data", prefetch=prefetch):
            seen[process].append(batch)

    job = Job(2)
    zero, one = job.run(program)
    assert isinstance(zero, PeerFailedError if "disk gone" in what else DatasetError)
    assert what in str(zero)
    assert str(one) == ("disk gone" if "disk gone" in what else str(zero))
    before = 2 if "batches 2" in what else 1  # all have handed out what was alike
    assert list(map(len, seen)) == [before, before]


def test_by_data_iterables_of_one_length_end_together_and_begin_again():
    job = Job(2)

    def program(process):
        dataset = job.dataset(process, Plain([1, 2], [3, 4], [5]), autoshard="data")
        return [real(dataset), real(dataset)]

    zero, one = job.run(program)
    assert zero == [[[1], [3], [5]]] * 2
    assert one == [[[2], [4], []]] * 2, "the first process has the one row of the last batch"
    job.network.beat()
    assert (job.network.state.values, job.network.state.forgotten) == ({}, {})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": np.arange(3)}, "a batch has 3 rows, but a full batch of this process has 2"),
        ({"y": np.arange(2)}, r"['x'] is missing"),
        (None, "must hold at least one array"),
    ],
)
def test_a_batch_that_is_refused_on_one_process_is_an_error_on_all(wrong, message):
    results = Job(2).batches([[{"x": np.arange(2)}, wrong], [{"x": np.arange(2)}] * 2], prefetch=0)
    assert isinstance(results[0], BatchError)
    assert isinstance(results[1], PeerFailedError)
    assert all(message in str(result) for result in results)


def test_drop_and_error_go_by_the_rows_of_all_processes():
    sources = [arrays(range(6)), arrays(range(10, 13))]
    dropped = Job(2).batches(sources, partial="drop")
    assert [real(part) for part in dropped] == [[[0, 1]], [[10, 11]]]
    for result in Job(2).batches(sources, partial="error", prefetch=0):
        assert "a batch has 3 rows instead of 4" in str(result)
    messages = refusals(Job(2), [arrays(range(6)), arrays(range(6), 4)], BatchError, partial="drop")
    assert "the processes have 2, 4 rows of a full batch" in messages[0]


def test_an_empty_batch_in_the_middle_is_a_batch_without_own_rows():
    sources = [Plain([1, 2], [], [3, 4]), Plain([5, 6], [7], [8])]
    assert [real(part) for part in Job(2).batches(sources)] == [[[1, 2], [], [3, 4]], [[5, 6], [7], [8]]]


def test_filling_repeats_the_last_real_row_and_is_a_buffer_of_its_own():
    (_, ended) = Job(2).batches([arrays(range(8)), arrays([7, 9])], prefetch=0)
    assert [batch["x"].tolist() for batch in ended[1:]] == [[9, 9]] * 3
    assert len({batch["x"].ctypes.data for batch in ended}) == 4


# ---- loops left early


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def left_early(job, sources, stops, *, prefetches=(2, 2)):
    """The rows of each process, in one loop for each of `stops`, which says how many batches to take."""

    def program(process):
        dataset = job.dataset(process, sources[process], prefetch=prefetches[process])
        rows = []
        for stop in stops:
            iterator = iter(dataset)
            rows.append(flat([batch for batch, _ in zip(iterator, range(stop), strict=False)]))
            dataset.close()
        return rows

    return job.run(program)


@pytest.mark.parametrize("kind", ["random-access", "generator"])
@pytest.mark.parametrize("prefetches", [(0, 3), (1, 4)])
def test_threads_that_are_unequally_far_ahead_lose_nothing(kind, prefetches):
    job = Job(2)
    sources: Any = [arrays(range(12)), arrays(range(100, 109))]
    if kind == "generator":
        sources = [iter(source) for source in sources]
    zero, one = left_early(job, sources, [1, 2, 9], prefetches=prefetches)
    # `zip` takes a batch more than it gives, except in the last loop.
    assert zero == [[0, 1], [4, 5, 6, 7], [10, 11]]
    assert one == [[100, 101], [104, 105, 106, 107], []]
    for thread in prefetch_threads():
        thread.join(20)
        assert not thread.is_alive()
    job.network.beat()
    assert job.network.state.values == {}
    if kind == "random-access":  # a generator's pass lasts as long as the dataset
        assert job.network.state.forgotten == {}


def test_loops_left_early_leave_nothing_behind():
    job = Job(2)
    left_early(job, [arrays(range(12), epochs=None), arrays(range(7), epochs=None)], [1] * 5, prefetches=(1, 3))
    job.network.beat()
    assert (job.network.state.values, job.network.state.forgotten) == ({}, {})
    assert [exchanges._answers for exchanges in job.network.exchanges] == [{}, {}]


def test_datasets_that_are_dropped_within_a_loop_leave_nothing_behind():
    job = Job(2)

    def program(process):
        for batch in job.dataset(process, arrays(range(20)), prefetch=1 + 3 * process):
            return batch["x"].tolist()

    assert job.run(program) == [[0, 1], [0, 1]]
    deadline_s = time.monotonic() + 20
    while (
        job.network.state.values or job.network.state.forgotten or prefetch_threads()
    ) and time.monotonic() < deadline_s:
        job.network.beat()
        time.sleep(0.01)
    assert (job.network.state.values, job.network.state.forgotten, prefetch_threads()) == ({}, {}, [])


def test_a_process_that_goes_on_where_another_has_left_the_loop_is_told():
    job = Job(2)
    gone = threading.Event()

    def program(process):
        dataset = job.dataset(process, arrays(range(20)), prefetch=1)
        iterator = iter(dataset)
        next(iterator)
        if process == 0:
            dataset.close()
            del iterator
            job.network.beat()
            gone.set()
            return None
        assert gone.wait(20)
        return list(iterator)

    _, error = job.run(program)
    assert isinstance(error, ClusterError)
    assert "process 0 will not reach 'dataset 1, pass 0, step " in str(error)


def test_datasets_side_by_side_do_not_mix():
    job = Job(2)

    def program(process):
        first = job.dataset(process, arrays(range(6)), name="dataset 1")
        second = job.dataset(process, Plain([10 + process], [20 + process]), name="dataset 2")
        return [(flat([a]), flat([b])) for a, b in zip(first, second, strict=False)]

    assert job.run(program) == [[([0, 1], [10]), ([2, 3], [20])], [([0, 1], [11]), ([2, 3], [21])]]


# ---- what a dataset tells, and where it goes on


@pytest.mark.parametrize("kind", ["random-access", "iterable"])
def test_numbers_are_those_of_all_processes(kind):
    job = Job(2, replicas_each=2)
    sources: Any = [arrays(range(9), 3), arrays(range(4), 1)]

    def program(process):
        source = sources[process]
        dataset = job.dataset(process, source if kind == "random-access" else list(source))
        shape = dataset.element_spec["x"].shape
        assert flat(dataset) == flat(dataset), "looking takes nothing away"
        return shape, dataset.global_batch, dataset.num_steps, repr(dataset)

    zero, one = job.run(program)
    assert zero == one
    assert zero[:3] == ((8,), 4, 4 if kind == "random-access" else None)
    assert "global batch 4 padded to 8 = 4 replicas x 2" in zero[3]


def test_a_process_with_an_endless_source_makes_the_dataset_endless():
    job = Job(2)
    sources = [arrays(range(4), epochs=None), arrays([8, 9])]

    def program(process):
        dataset = job.dataset(process, sources[process])
        return dataset.num_steps, flat([batch for _, batch in zip(range(4), dataset, strict=False)])

    assert job.run(program) == [(None, [0, 1, 2, 3, 0, 1, 2, 3]), (None, [8, 9])]


def states(job, sources, *, steps, **options):
    def program(process):
        dataset = job.dataset(process, sources[process], **options)
        iterator = iter(dataset)
        for _ in range(steps):
            next(iterator)
        dataset.close()
        return json.loads(json.dumps(dataset.state()))

    return job.run(program)


def rest(job, sources, state, **options):
    def program(process):
        dataset = job.dataset(process, sources[process], **options)
        dataset.restore(state)
        return list(dataset)

    return job.run(program)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_position_by_data_fits_any_number_of_processes(count):
    def sources(count):
        return [arrays(range(20), 4, shuffle_seed=3)] * count

    saved, other = states(Job(2), sources(2), steps=2, autoshard="data")
    assert saved == other
    whole = [row for batch in sources(1)[0] for row in batch["x"].tolist()]
    parts = rest(Job(count), sources(count), saved, autoshard="data")
    assert [row for step in zip(*map(real, parts), strict=True) for part in step for row in part] == whole[8:]


def test_a_position_in_sources_of_their_own_counts_steps():
    sources = [arrays(range(8)), arrays(range(10, 13))]
    saved, other = states(Job(2), sources, steps=3)
    assert saved == other
    assert saved["step"] == 3
    zero, one = rest(Job(2), sources, saved)
    assert (real(zero), real(one)) == ([[6, 7]], [[]])
    assert one[0]["x"].tolist() == [12, 12], "it had ended before, and its last row fills up"
    assert rest(Job(2), sources, {**saved, "step": 4}) == [[], []]


def test_a_position_in_sources_of_their_own_fits_these_processes_only():
    saved, _ = states(Job(2), [arrays(range(8)), arrays(range(10, 13))], steps=1)
    for error in rest(Job(3), [arrays(range(8))] * 3, saved):
        assert "processes was 2 and is 3; process_1.rows was 3 and is 8" in str(error)
        assert "process_2.rows was not there and is 8" in str(error)
    for error in rest(Job(2), [arrays(range(8)), arrays(range(10, 14))], saved):
        assert "belongs to another dataset: process_1.rows was 3 and is 4; process_1.content was" in str(error)
