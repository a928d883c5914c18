"""One source for several input pipelines: which part each reads, and that the parts make the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jdist
from jdist.data import from_arrays, from_files, shard
from jdist.errors import DatasetError

TEN = {f"{number}.npy": np.array([10 * number, 10 * number + 1]) for number in range(10)}


def ten_files(names=tuple(TEN), global_batch=2):
    return from_files(names, TEN.__getitem__, global_batch=global_batch)


def rows(source):
    return [row for batch in source for row in np.ravel(batch).tolist()]


class Batches:
    """A random-access source that is not jdist's own."""

    global_batch = 2
    fingerprint = "kind=batches sizes=2"

    def __init__(self, num_steps):
        self.num_steps = num_steps

    def batch_at(self, step):
        return np.array([2 * step, 2 * step + 1])


class TestByData:
    SHARES = ([0, 3, 6, 9], [1, 4, 7], [2, 5, 8])

    @pytest.mark.parametrize("index", range(3))
    @pytest.mark.parametrize("policy", ["data", "auto"])
    @pytest.mark.parametrize(
        "source",
        [
            range(10),
            list(range(10)),
            from_arrays(np.arange(10), global_batch=1),
            from_arrays(np.arange(10), global_batch=4),
            from_files(["all"], lambda path: np.arange(10), global_batch=3),
        ],
        ids=["range", "list", "arrays of 1", "arrays of 4", "one file"],
    )
    def test_element_i_goes_to_shard_i_modulo_their_number(self, source, policy, index):
        assert rows(shard(source, 3, index, policy)) == self.SHARES[index]

    @pytest.mark.parametrize("index", range(3))
    def test_of_an_iterator(self, index):
        assert list(shard(iter(range(10)), 3, index)) == self.SHARES[index]

    def test_a_plain_iterable_can_be_gone_through_again(self):
        part = shard(range(4), 2, 1)
        assert list(part) == list(part) == [1, 3]

    def test_rows_of_arrays_are_not_copied_and_batches_keep_their_size(self):
        arrays = {"x": np.arange(20), "y": np.arange(40).reshape(20, 2)}
        part = shard(from_arrays(arrays, global_batch=4), 3, 1)
        assert part.global_batch == 4
        assert np.shares_memory(part.arrays["x"], arrays["x"])
        assert [len(batch["x"]) for batch in part] == [4, 3]
        assert part.batch_at(0)["y"].tolist() == [[2, 3], [8, 9], [14, 15], [20, 21]]

    def test_the_rows_of_several_files_are_counted_on(self):
        files = {"a": np.array([0, 1]), "b": np.array([2, 3, 4]), "c": np.array([5])}
        source = from_files(files, files.__getitem__, global_batch=9)
        assert [rows(shard(source, 2, index, "data")) for index in range(2)] == [[0, 2, 4], [1, 3, 5]]

    def test_whole_batches_of_another_random_access_source(self):
        parts = [shard(Batches(5), 2, index) for index in range(2)]
        assert [part.num_steps for part in parts] == [3, 2]
        assert [rows(part) for part in parts] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
        with pytest.raises(DatasetError, match="batch 2 does not exist: the shard has 2 steps"):
            parts[1].batch_at(2)
        endless = shard(Batches(None), 2, 1)
        assert endless.num_steps is None
        assert endless.batch_at(1000).tolist() == [4002, 4003]
        assert next(iter(endless)).tolist() == [2, 3]

    def test_each_epoch_has_its_own_order_of_the_shards_rows(self):
        source = from_arrays(np.arange(30), global_batch=5, shuffle_seed=1, epochs=2)
        drawn = rows(shard(source, 3, 2))
        assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(2, 30, 3))
        assert drawn[:10] != drawn[10:]


class TestByFile:
    def test_ten_files_for_five_pipelines(self):
        assert shard(ten_files(), 5, 3, "file").paths == ("3.npy", "8.npy")
        assert rows(shard(ten_files(), 5, 3, "file")) == [30, 31, 80, 81]

    @pytest.mark.parametrize("num_shards", [1, 3, 10])
    def test_auto_shares_files_while_there_are_enough(self, num_shards):
        for index in range(num_shards):
            by_file = shard(ten_files(), num_shards, index, "file")
            assert shard(ten_files(), num_shards, index).paths == by_file.paths == tuple(TEN)[index::num_shards]

    def test_auto_shares_rows_where_there_are_too_few(self):
        part = shard(ten_files(), 11, 2)
        assert part.paths == tuple(TEN)
        assert rows(part) == [10, 61]


def test_off_is_everything_for_everyone():
    for source in (range(4), ten_files(), from_arrays(np.arange(4), global_batch=2)):
        assert all(shard(source, 3, index, "off") is source for index in range(3))


COUNTS = st.integers(1, 60)
SHARDS = st.integers(1, 7)


def kinds(count, global_batch):
    """Sources of the numbers 0 to `count`, of every kind, the last one in files of uneven sizes."""
    cuts = [(start, min(start + 1 + start % 5, count)) for start in (0, 1, 3, 7, 10, 11, 13, 17)]
    cuts = [
        (start, stop) for start, stop in zip([0, *[b for _, b in cuts]], [*[b for _, b in cuts], count], strict=True)
    ]
    files = {str(number): np.arange(start, max(start, stop)) for number, (start, stop) in enumerate(cuts)}
    return {
        "arrays": from_arrays(np.arange(count), global_batch=global_batch),
        "shuffled": from_arrays(np.arange(count), global_batch=global_batch, shuffle_seed=0),
        "iterable": range(count),
        "files": from_files(files, files.__getitem__, global_batch=global_batch),
    }


@given(count=COUNTS, num_shards=SHARDS, global_batch=st.integers(1, 5), policy=st.sampled_from(["data", "auto"]))
def test_the_shards_are_disjoint_and_complete(count, num_shards, global_batch, policy):
    for name, source in kinds(count, global_batch).items():
        num_parts = min(num_shards, count) if name != "files" else min(num_shards, count, 8)
        parts = [shard(source, num_parts, index, policy) for index in range(num_parts)]
        if name == "files" and any(part.every == 1 and not _has_rows(part) for part in parts):
            continue  # a pipeline whose own files are all empty is refused where it is read
        seen = [row for part in parts for row in rows(part)]
        assert sorted(seen) == list(range(count)), name


def _has_rows(part):
    return any(len(part.read(path)) for path in part.paths)


@given(count=COUNTS, outer=SHARDS, inner=SHARDS)
def test_shards_of_shards_are_shards(count, outer, inner):
    for source in (range(count), from_files(["all"], lambda path: np.arange(count), global_batch=3)):
        for number in range(outer * inner):
            first, second = number % outer, number // outer
            part = shard(shard(source, outer, first, "data"), inner, second, "data")
            expected = list(range(number, count, outer * inner))
            if expected or source == range(count):
                assert rows(part) == expected


def test_shards_of_array_shards_say_which_they_are():
    whole = from_arrays(np.arange(24), global_batch=2)
    part = shard(shard(whole, 2, 1), 3, 2)
    assert (part.shard, rows(part)) == ((6, 5), [5, 11, 17, 23])
    assert part.fingerprint.endswith("shard=5/6")
    assert "shard=" not in whole.fingerprint


def test_files_that_are_shared_by_rows_are_shared_by_rows_again():
    by_rows = shard(ten_files(), 2, 0, "data")
    assert rows(shard(by_rows, 2, 0)) == list(range(0, 100, 20))


class TestPosition:
    @pytest.mark.parametrize("step", [0, 2, 4])
    @pytest.mark.parametrize("kind", ["arrays", "other"])
    def test_a_shard_goes_on_where_it_was(self, kind, step):
        def dataset():
            whole = from_arrays(np.arange(24), global_batch=2, shuffle_seed=7) if kind == "arrays" else Batches(12)
            return jdist.default().distribute_dataset(shard(whole, 3, 1))

        first, second = dataset(), dataset()
        expected = [batch.tolist() for batch in dataset()]
        iterator = iter(first)
        for _ in range(step):
            next(iterator)
        second.restore(first.state())
        assert [batch.tolist() for batch in second] == expected[step:]

    @pytest.mark.parametrize("whole", [from_arrays(np.zeros(24), global_batch=2), Batches(12)], ids=["arrays", "other"])
    def test_another_shards_position_is_refused(self, whole):
        parts = [jdist.default().distribute_dataset(shard(whole, 3, index)) for index in range(2)]
        with pytest.raises(DatasetError, match="shard was 0/3 and is 1/3"):
            parts[1].restore(parts[0].state())


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (range(4), (0, 0), "`num_shards` is 0; .* 1 or more"),
        (range(4), (2, 2), "`index` is 2; it must be a whole number from 0 to 1"),
        (range(4), (2, -1), "`index` is -1; .* from 0 to"),
        (range(4), (2, 0, "FILE"), "`policy` is 'FILE'; .* 'auto', 'file', 'data', 'off'. Did you mean 'file'"),
        (range(4), (2, 0, 3), "`policy` is 3; it must be one of 'auto', 'file', 'data', 'off'"),
        ({"x": np.arange(4)}, (2, 0), "a dict is not a source of batches"),
        (np.arange(4), (2, 0), "a ndarray is not a source of batches"),
        (3, (2, 0), "a int is not a source of batches"),
        ("path", (2, 0), "a str is not a source of batches"),
        (range(4), (2, 0, "file"), r"cannot be shared file by file.*from_files"),
        (from_arrays(np.arange(4), global_batch=2), (2, 0, "file"), "cannot be shared file by file.*from_files"),
        (Batches(3), (2, 0, "file"), "cannot be shared file by file.*from_files"),
        (ten_files(), (11, 0, "file"), r'too few files: 10 cannot be shared by 11 .*policy="data".*at least 11'),
        (shard(ten_files(), 2, 0, "data"), (2, 0, "file"), "shared by rows already"),
        (
            from_arrays(np.arange(2), global_batch=1),
            (3, 2),
            "nothing is left for shard 2 of 3: the source has 2 rows; use at most 2",
        ),
        (Batches(3), (4, 3), "shard 3 of 4: the source has 3 batches"),
    ],
)
def test_what_is_refused(source, arguments, message):
    with pytest.raises(DatasetError, match=message):
        shard(source, *arguments)


def test_a_shard_of_files_for_which_no_row_is_left_is_refused_when_it_is_read():
    with pytest.raises(DatasetError, match="the 1 files hold no rows of shard 2 of 3"):
        list(shard(from_files(["a"], lambda path: np.arange(2), global_batch=1), 3, 2))


def test_a_dataset_function_shards_by_its_context():
    strategy = jdist.mirrored(["cpu:0", "cpu:1"])

    def dataset(context):
        source = from_arrays({"x": np.arange(10)}, global_batch=context.per_replica_batch(4))
        return shard(source, context.num_input_pipelines, context.input_pipeline_id)

    options = jdist.InputOptions(replication="per_replica")
    batches = [
        np.split(b["x"], 2) for b in strategy.distribute_datasets_from_function(dataset, options, partial="drop")
    ]
    assert [[part.tolist() for part in batch] for batch in batches] == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
