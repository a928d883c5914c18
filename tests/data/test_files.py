"""Files as a source: batches over their ends, epochs, and errors that name the file."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import jdist
from jdist.data import FileSource, from_files
from jdist.errors import BatchError, DatasetError


def files(tmp_path, *sizes):
    """A file for each size, whose rows count on from file to file."""
    paths, start = [], 0
    for number, size in enumerate(sizes):
        paths.append(tmp_path / f"{number:02}.npy")
        np.save(paths[-1], np.arange(start, start + size))
        start += size
    return paths


def values(source):
    return [batch.tolist() for batch in source]


def test_batches_reach_over_the_ends_of_files(tmp_path):
    source = from_files(files(tmp_path, 3, 0, 1, 6), np.load, global_batch=4)
    assert isinstance(source, FileSource)
    assert values(source) == values(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_batches_do_not_reach_into_the_next_epoch(tmp_path):
    source = from_files(files(tmp_path, 2, 1), np.load, global_batch=2, epochs=2)
    assert values(source) == [[0, 1], [2], [0, 1], [2]]
    endless = iter(from_files(files(tmp_path, 2, 1), np.load, global_batch=2, epochs=None))
    assert [next(endless).tolist() for _ in range(5)] == [[0, 1], [2], [0, 1], [2], [0, 1]]


@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=8), global_batch=st.integers(1, 9))
def test_every_row_comes_once_and_in_order(sizes, global_batch):
    ends = np.cumsum(sizes)
    assume(ends[-1] > 0)
    rows = {str(number): np.arange(end - size, end) for number, (size, end) in enumerate(zip(sizes, ends, strict=True))}
    batches = values(from_files(rows, rows.__getitem__, global_batch=global_batch))
    assert [row for batch in batches for row in batch] == list(range(ends[-1]))
    assert all(len(batch) == global_batch for batch in batches[:-1])


def test_a_reader_may_refill_its_memory():
    memory = np.empty(3, np.int32)

    def read(path):
        memory[:] = int(path)
        return memory

    batches = [batch.copy() for batch in from_files(["0", "1", "2"], read, global_batch=2)]
    assert [batch.tolist() for batch in batches] == [[0, 0], [0, 1], [1, 1], [2, 2], [2]]


def test_they_are_distributed_with_the_global_batch_they_tell(tmp_path):
    strategy = jdist.mirrored(["cpu:0", "cpu:1"])

    def read(path):
        return {"x": np.load(path)}

    (batch,) = strategy.distribute_dataset(from_files(files(tmp_path, 2, 1), read, global_batch=8))
    assert batch["x"].shape == (8,)
    assert batch["mask"].tolist() == [True] * 3 + [False] * 5


def test_only_as_many_files_are_read_as_the_batches_need(tmp_path):
    asked = []

    def read(path):
        asked.append(path.name)
        return np.load(path)

    batches = iter(from_files(files(tmp_path, 2, 2, 2), read, global_batch=3))
    assert asked == []
    next(batches)
    assert asked == ["00.npy", "01.npy"]


@pytest.mark.parametrize(
    ("paths", "options", "message"),
    [
        ([], {}, "the dataset is empty: `paths` names no file"),
        ("data/*.npy", {}, r"a list of paths, but it is the one path 'data/\*.npy'"),
        (None, {}, "`paths` must be a list of paths, but it is None"),
        ([np.arange(2)], {}, "`paths` must hold strings or `pathlib.Path`s, but it holds array"),
        (["a"], {"read": "np.load"}, "`read` must be a function from a path to arrays, but it is a str"),
        (["a"], {"global_batch": 0}, "`global_batch` is 0; .* 1 or more"),
        (["a"], {"epochs": 0}, "`epochs` is 0; .* 1 or more"),
        (["a"], {"shuffle_window": 3}, "`shuffle_window` is 3, but nothing is shuffled without a `shuffle_seed`"),
        (
            ["a"],
            {"shuffle_seed": 0, "shuffle_window": 0},
            "`shuffle_window` is 0; it must be a whole number, 1 or more",
        ),
        (["a"], {"workers": 0}, "`workers` is 0; it must be a whole number, 1 or more"),
    ],
)
def test_what_is_refused(paths, options, message):
    with pytest.raises(DatasetError, match=message):
        from_files(paths, **{"read": np.load, "global_batch": 1, **options})


@pytest.mark.parametrize("epochs", [1, None])
def test_files_without_rows_are_refused(tmp_path, epochs):
    source = from_files(files(tmp_path, 0, 0), np.load, global_batch=1, epochs=epochs)
    with pytest.raises(DatasetError, match=r"the 2 files hold no rows; the first is '.*00.npy'"):
        list(source)


def test_an_error_while_reading_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        list(from_files([tmp_path / "gone.npy"], np.load, global_batch=1))
    assert "gone.npy" in raised.value.__notes__[0]
    with pytest.raises(BatchError, match="dtype") as refused:
        list(from_files(["words"], lambda path: np.array([path]), global_batch=1))
    assert refused.value.__notes__ == ["while reading 'words': file 1 of 1 of epoch 0, behind 0 rows of it"]


def test_files_that_differ_in_more_than_their_rows_are_refused():
    rows = {"none": np.zeros((0, 2)), "a": np.arange(1), "b": np.arange(1.0)}  # of a file without rows nothing is known
    for options in ({}, {"shuffle_seed": 0}):
        with pytest.raises(
            BatchError, match=r"the rows of '[ab]' differ from those of '[ab]': .* was \w+64\[rows\] and is"
        ):
            list(from_files(rows, rows.__getitem__, global_batch=1, **options))
